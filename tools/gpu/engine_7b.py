"""The engine on the 7B shape (tools.gpu.engine)."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu.engine import cases_of
from tools.gpu.runner import Case


def cases() -> Iterator[Case]:
    return cases_of("7B", first_token_goal=1.05)
