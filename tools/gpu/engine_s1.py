"""The engine on the S1 shape (tools.gpu.engine)."""

from __future__ import annotations

from collections.abc import Iterator

from tools.gpu.engine import cases_of
from tools.gpu.runner import Case


def cases() -> Iterator[Case]:
    return cases_of("S1", first_token_goal=0.8)
