"""The HTTP client of Java, as it is without settings."""

import asyncio
import shutil
from pathlib import Path

from tests.servers import unavailable
from tests.serving import served


async def test_the_client_of_java_publishes_without_settings() -> None:
    """It asks for HTTP/2 by `Upgrade: h2c` with its first request, and sends the body all the same."""
    java = shutil.which("java")
    if java is None:
        unavailable("there is no Java")
    async with served() as place:
        url = "http://{}:{}".format(*place.address)
        source = Path(__file__).with_name("Publish.java")
        process = await asyncio.create_subprocess_exec(
            java, "-Xmx64m", str(source), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
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
