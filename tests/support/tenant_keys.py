"""Files of tenants' keys, and requests with them to a fake server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.fake_server import TEXT, Running, check_refusal

ACME, OTHER, FREE = "key-of-acme", "key-of-other", "key-of-free"
FILE = f"""
[tenants.acme]
keys = ["{ACME}"]
metrics = true
[tenants.other]
keys = ["{OTHER}"]
salt = "s"
"""
Write = Callable[[str], str]
"""Writes a file of keys: its path."""


def key_file(folder: Path) -> Write:
    def to_file(told: str) -> str:
        path = folder / "keys.toml"
        path.write_text(told)
        path.chmod(0o600)
        return str(path)

    return to_file


def limited(rules: str) -> str:
    return f'[tenants.acme]\nkeys = ["{ACME}"]\nmetrics = true\n{rules}\n[tenants.free]\nkeys = ["{FREE}"]\n'


def post(running: Running, body: dict[str, Any], key: str = ACME, path: str = TEXT) -> httpx.Response:
    return running.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def check_limited(reply: httpx.Response, limit: str, wait: str) -> None:
    check_refusal(reply, 429, None)
    error = reply.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and error["type"] == "rate_limit_error"
    assert limit in error["message"] and reply.headers["retry-after"] == wait, (error, reply.headers)
