"""A server that a benchmark starts: what is told of its refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError

import pytest

from headrace.bench.server_process import ServerProcess

pytestmark = pytest.mark.unit

REPLIES = {
    "/refused": b'{"error": {"message": "the prompt has 9 tokens; the context is 4"}}',
    "/other": b"<html>no JSON</html>",
    "/list": b"[]",
}


class Refusing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(REPLIES[self.path])

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """One that is no process: its address is all that is asked for."""
    found = ServerProcess.__new__(ServerProcess)
    with HTTPServer(("127.0.0.1", 0), Refusing) as http:
        found.url = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield found
        http.shutdown()


@pytest.mark.parametrize(
    ("path", "told"),
    [("/refused", "the prompt has 9 tokens; the context is 4"), ("/other", "Bad Request"), ("/list", "Bad Request")],
)
def test_the_reason_of_a_refusal_is_told(path: str, told: str, server: ServerProcess) -> None:
    with pytest.raises(HTTPError, match=f"^HTTP Error 400: {told}$"):
        server.get(path)
