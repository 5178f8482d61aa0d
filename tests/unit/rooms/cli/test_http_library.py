"""Test that commands load httpx without what only its own command line uses."""

import subprocess
import sys
import textwrap


def test_a_client_loads_neither_rich_nor_pygments() -> None:
    code = textwrap.dedent("""
        import sys
        from rooms.cli.client import ApiClient, httpx
        with ApiClient("http://127.0.0.1:1", "key"):
            print(sorted({"rich", "pygments", "httpx._main"} & set(sys.modules)), httpx.codes.OK)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 200\n"
