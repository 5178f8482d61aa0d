"""Test Java's HTTP client without settings."""

import asyncio
import shutil
from pathlib import Path

from tests.support.http_listener import served
from tests.support.servers import unavailable


async def test_publishes_with_javas_http_client() -> None:
    """The client asks for HTTP/2 by `Upgrade: h2c` in its first request, and sends the body anyway."""
    java = shutil.which("java")
    if java is None:
        unavailable("there is no Java")
    async with served() as place:
        url = "http://{}:{}".format(*place.address)
        source = Path(__file__).with_name("Publish.java")
        process = await asyncio.create_subprocess_exec(
            java,
            "-Xmx64m",
            str(source),
            url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
    lines = output.decode().splitlines()
    expected = []
    for path in ("rooms", "else", "rooms"):
        for chunked in ("false", "true"):
            body = f"b'from Java {chunked}'"
            answer = f"202 (7, {body}, None)" if path == "rooms" else f"404 POST /else {body}"
            expected.append(f"HTTP_1_1 {answer}")
    assert lines == expected
