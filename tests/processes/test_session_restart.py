"""A session that a server has saved goes on in the next one, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.server_process import PROMPT, TEXT, ServerProcess, process

SESSIONS = "/v1/cache/sessions"


def answered(server: ServerProcess, ids: list[int]) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": 2, "return_token_ids": True}
    return dict(server.http.post(TEXT, json=body).json())


def test_a_session_goes_on_after_a_restart(tmp_path: Path) -> None:
    options = ("--sessions-dir", str(tmp_path / "sessions"), "--kv-cache-tokens", "8192")
    with process(tmp_path, *options) as server:
        server.wait_ready()
        first = server.http.post(TEXT, json={"prompt": PROMPT * 10, "max_tokens": 20, "temperature": 0}).json()
        saved = server.http.post(SESSIONS, json={"name": "earth", "request_id": first["id"]}).json()
        assert saved["saved_tokens"] == saved["tokens"] // 64 * 64 > 0, saved
        ids = server.http.post("/tokenize", json={"prompt": PROMPT * 10}).json()["tokens"]
        truth = answered(server, ids)
        assert server.stop() == 0
    with process(tmp_path, *options) as server:
        server.wait_ready()
        (listed,) = server.http.get(SESSIONS).json()["data"]
        assert listed["name"] == "earth" and listed["bytes"] == saved["bytes"]
        loaded = server.http.post(f"{SESSIONS}/earth/load").json()
        assert loaded["restored_tokens"] == saved["saved_tokens"] and loaded["tokens"] == saved["tokens"]
        again = answered(server, ids)
        assert again["choices"] == truth["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1) // 64 * 64
        assert server.http.delete(f"{SESSIONS}/earth").json()["deleted"]
        assert server.http.post(f"{SESSIONS}/earth/load").status_code == 404
        assert server.stop() == 0
