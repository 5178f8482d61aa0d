"""Know the imperative verbs with which docstrings and subjects of commits may open.

A list, because no rule distinguishes "Count the rows" from "Counter of rows". A verb that is not in
it is added; a noun, an article or a third person is not.
"""

import re
from typing import Final

VERBS: Final = frozenset(
    """
    Abort Accept Access Ack Acknowledge Activate Adapt Add Adjust Adopt Advance Advise Age
    Allocate Allow Analyse Announce Answer Append Apply Approve Arrange Ask Assemble Assign
    Attempt Audit Authenticate Avoid Await Backfill Balance Batch Be Become Begin Believe
    Benchmark Bind Block Bound Break Bring Buffer Build Bypass Cache Call Cancel Cap Carry Catch
    Chain Change Charge Check Choose Claim Classify Clean Clear Clone Close Collect Commit Compact
    Compare Compile Complete Compose Compute Configure Confirm Connect Consume Continue Control
    Convert Copy Correct Count Create Cut Decide Declare Decode Dedupe Deduplicate Defer Define
    Delete Deliver Deny Derive Describe Detect Determine Disable Discard Disconnect Discover
    Dispatch Distinguish Divide Do Document Drain Draw Drop Duplicate Elect Emit Encode Encrypt
    End Enforce Enqueue Ensure Enumerate Escape Estimate Evaluate Evict Exchange Exclude Execute
    Exit Expand Expect Expire Explain Export Expose Extend Extract Fail Fetch Fill Filter Find
    Finish Fire Fix Flip Flush Focus Follow Forget Format Forward Free Gather Generate Get Give Go
    Group Guard Hand Handle Hash Have Help Hide Hold Identify Ignore Implement Import Include
    Increase Index Infer Initialise Inject Insert Inspect Install Interpolate Invoke Iterate Join
    Judge Jump Keep Kill Know Last Launch Lead Learn Lease Leave Let Limit List Listen Load Locate
    Lock Log Look Lose Lower Maintain Make Manage Map Mark Match Measure Mend Mention Merge
    Migrate Mirror Move Nack Name Narrow Nest Note Notify Number Observe Offer Omit Open Order
    Override Pace Pack Parse Partition Pass Pause Permit Persist Pick Plan Play Plot Point Poll
    Pool Prepare Preserve Prevent Preview Print Process Produce Prohibit Promote Protect Prove
    Provide Prune Publish Pull Purge Push Put Query Queue Quote Raise Read Receive Recognise
    Recommend Reconcile Record Recover Recreate Redraw Reduce Refactor Refresh Refuse Regenerate
    Register Reject Relay Release Reload Remember Remove Render Renew Reorder Repair Repeat
    Replace Replay Report Represent Request Require Rescue Resend Reserve Reset Resolve Respond
    Restore Restrict Resume Retain Retire Retry Return Revert Revoke Reword Rework Rewrite Roll
    Rotate Round Route Run Sample Sanitise Save Say Scan Schedule Score Seal Search Select Send
    Separate Serve Set Settle Share Shorten Shovel Show Sideline Sign Signal Simulate Skip Sleep
    Snooze Sort Spend Split Stack Stage Stamp Stand Standardise Start State Stay Stop Store Stream
    Strip Submit Subscribe Suggest Sum Summarise Summarize Supervise Supply Support Suspend Swap
    Sweep Switch Synchronise Take Test Tidy Total Touch Trace Track Transform Translate Treat
    Trigger Trim Trust Try Turn Unblock Undo Unify Unlock Update Upgrade Upload Use Validate
    Verify Visit Wait Wake Walk Warn Watch Wire Withhold Word Wrap Write Yield
    """.split()  # noqa: SIM905 - a list would have a line for each
)
_FIRST: Final = re.compile(r"\s*([^\W\d_]+)(?![\w'-])")


def opening_verb(text: str) -> str | None:
    """Return the verb with which a text opens; None: it opens with another word."""
    found = _FIRST.match(text)
    return found[1] if found and found[1] in VERBS else None
