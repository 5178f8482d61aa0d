"""nginx with the configuration of compose/nginx.conf, before a service on loopback."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.local.services import free_port
from tests.support.debian_programs import debian_program
from tests.support.servers import unavailable
from tests.support.service import ROOT

_MAIN = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/rooms.conf;
}}
"""


@contextmanager
def nginx_before(api_port: int, files: Path, folder: Path) -> Iterator[int]:
    """Yield the port of nginx; `files`: the folder that is /etc/rooms/tls in the containers."""
    program = debian_program(
        "nginx", package="nginx", path="usr/sbin/nginx", variable="ROOMS_NGINX"
    )
    port = free_port()
    text = (ROOT / "compose/nginx.conf").read_text()
    for given, ours in (
        ("api:8080", f"127.0.0.1:{api_port}"),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("/etc/rooms/tls", str(files)),
    ):
        assert given in text
        text = text.replace(given, ours)
    (folder / "rooms.conf").write_text(text)
    (folder / "nginx.conf").write_text(_MAIN.format(folder=folder))
    command = [
        str(program),
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "start.log"),
    ]
    tested = subprocess.run([*command, "-t"], check=False, capture_output=True, text=True)
    if "error while loading shared libraries" in tested.stderr:
        unavailable(f"nginx cannot run here: {tested.stderr}")
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)
