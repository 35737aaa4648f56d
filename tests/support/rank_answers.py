"""Questions to servers of several ranks, and what they answer."""

from __future__ import annotations

from typing import Any

from tests.support.server_process import PROMPT, TEXT, ServerProcess, text

LONG = [(i * 37 + i // 61) % 1900 + 50 for i in range(5000)]
QUESTIONS: list[Any] = [PROMPT, LONG, [*LONG[:3000], 7, 8, 9]]
CHAIN = ("--prefill-strategy", "chain")


def answers(server: ServerProcess) -> list[list[int]]:
    bodies = [text(question, max_tokens=16, ignore_eos=True, return_token_ids=True) for question in QUESTIONS]
    return [server.http.post(TEXT, json=body).json()["choices"][0]["token_ids"] for body in bodies]
