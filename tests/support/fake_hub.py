"""A hub of models on 127.0.0.1: what huggingface_hub asks of one, answered from memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Hub:
    """repos: name -> file -> its bytes. asked: files that were fetched. status: of names that are not there, or are
    kept from strangers. damaged: files that arrive with other bytes."""

    repos: dict[str, dict[str, bytes]]
    asked: list[str] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    url: str = ""

    def entries(self, repo: str) -> list[dict[str, Any]]:
        """Of the files of a repository: name, size, hashes."""
        return [self._entry(name, data) for name, data in self.repos[repo].items()]

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        made = {
            "type": "file",
            "path": name,
            "rfilename": name,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }
        if name.endswith(LARGE):
            made["lfs"] = {"oid": _sha256(data), "sha256": _sha256(data), "size": len(data), "pointerSize": 130}
        return made


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if repo in self.hub.gated or repo not in self.hub.repos:
            gated = repo in self.hub.gated
            return self._send(403 if gated else 404, b"{}", {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"})
        if api and rest[:1] == ["tree"]:
            return self._send(200, json.dumps(self.hub.entries(repo)).encode())
        if api:
            told = {"id": repo, "sha": COMMIT, "siblings": self.hub.entries(repo)}
            return self._send(200, json.dumps(told).encode())
        name = "/".join(rest[2:])  # resolve/COMMIT/...
        data = self.hub.repos[repo].get(name)
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        etag = _sha256(data) if name.endswith(LARGE) else hashlib.sha1(data).hexdigest()
        if body:
            self.hub.asked.append(name)
            data = bytes(len(data)) if name in self.hub.damaged else data
        self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub answers at hub.url."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
