"""Know the imperative verbs with which docstrings and subjects of commits may open.

A list, because no rule distinguishes "Count the rows" from "Counter of rows". A verb that is not in
it is added; a noun, an article or a third person is not.
"""

import re
from typing import Final

VERBS: Final = frozenset(
    """
    Abort Accept Access Ack Acknowledge Activate Adapt Add Adjust Admit Adopt Advance Advise Age
    Allocate Allot Allow Analyse Announce Answer Append Apply Approve Arrange Ask Assemble Assign
    Attach Attack Attempt Audit Augment Authenticate Avoid Await Backfill Balance Batch Be Become
    Begin Believe Benchmark Bind Block Bound Break Bring Buffer Build Bump Bundle Bypass Cache
    Call Cancel Cap Carry Carve Catch Chain Change Charge Check Choose Cite Claim Clarify Classify
    Clean Clear Clone Close Coalesce Collect Combine Commit Compact Compare Compile Complete
    Compose Compute Configure Confirm Connect Consolidate Consume Continue Control Convert Copy
    Correct Correlate Count Create Cut Decide Declare Decode Dedupe Deduplicate Defer Define
    Delete Deliver Deny Derive Describe Detach Detect Determine Disable Discard Disconnect
    Discover Dispatch Distinguish Divide Do Document Drain Draw Drop Duplicate Edit Elect
    Eliminate Emit Enable Encode Encourage Encrypt End Enforce Enqueue Ensure Enumerate Equip
    Escape Establish Estimate Evaluate Evict Examine Exchange Exclude Execute Exit Expand Expect
    Expire Explain Explore Export Expose Extend Extract Fail Fetch Fill Filter Find Finish Fire
    Fit Fix Flatten Flip Flush Focus Follow Forget Format Forward Free Freeze Gather Generate Get
    Give Go Group Guard Halve Hand Handle Harden Hash Have Help Hide Hold Identify Ignore
    Implement Import Include Increase Index Infer Inform Initialise Inject Inline Insert Inspect
    Install Integrate Interpolate Introduce Invalidate Invoke Isolate Iterate Join Judge Jump Keep
    Kill Know Last Launch Lead Learn Lease Leave Let Limit List Listen Load Localise Locate Lock
    Log Look Lose Lower Maintain Make Manage Map Mark Mask Match Measure Mend Mention Merge
    Migrate Minimise Mirror Modify Move Nack Name Narrow Nest Normalise Note Notify Number Observe
    Offer Omit Open Optimise Order Organise Override Pace Pack Parse Partition Pass Pause Permit
    Persist Pick Pin Place Plan Play Plot Point Poll Pool Postpone Prepare Preserve Prevent
    Preview Print Process Produce Prohibit Promote Propagate Protect Prove Provide Prune Publish
    Pull Purge Push Put Query Queue Quote Raise Reach Read Receive Recognise Recommend Reconcile
    Reconnect Record Recover Recreate Redact Redirect Redraw Reduce Refactor Refresh Refuse
    Regenerate Register Rehearse Reject Relax Relay Release Reload Remember Remove Render Renew
    Reopen Reorder Repair Repeat Rephrase Replace Replay Report Represent Request Requeue Require
    Rescue Resend Reserve Reset Resolve Respond Restore Restrict Resume Retain Retire Retry Return
    Revert Revoke Rewind Reword Rework Rewrite Roll Rotate Round Route Run Sample Sanitise Save
    Say Scan Schedule Score Seal Search Select Send Separate Serve Set Settle Share Shorten Shovel
    Show Shrink Sideline Sign Signal Silence Simplify Simulate Skip Sleep Snooze Sort Specify
    Spend Split Spread Stack Stage Stamp Stand Standardise Start State Stay Stop Store Stream
    Strip Submit Subscribe Substitute Suggest Sum Summarise Summarize Supervise Supply Support
    Suspend Swallow Swap Sweep Switch Synchronise Take Terminate Test Throttle Throw Tidy Tolerate
    Total Touch Trace Track Transform Translate Treat Trigger Trim Trust Try Turn Unblock Undo
    Unify Unlock Unpack Unwrap Update Upgrade Upload Use Validate Verify Vet Visit Wait Wake Walk
    Warn Watch Widen Wire Withhold Word Wrap Write Yield
    """.split()  # noqa: SIM905 - a list would have a line for each
)
_FIRST: Final = re.compile(r"\s*([^\W\d_]+)(?![\w'-])")


def opening_verb(text: str) -> str | None:
    """Return the verb with which a text opens; None: it opens with another word."""
    found = _FIRST.match(text)
    return found[1] if found and found[1] in VERBS else None
