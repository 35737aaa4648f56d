"""When an engine counts as hung: after so many ticks without a word, and later while it loads."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engine import watchdog
from headrace.engine.watchdog import Watchdog

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("loading", "pings"), [(False, 4), (True, 8)])
def test_an_engine_hangs_after_so_much_silence(loading: bool, pings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOADING_S", 2 / 64)
    asked: list[int] = []
    watched = Watchdog(1 / 64)
    watched.loading = loading

    def ping() -> None:
        asked.append(1)
        if len(asked) == 3:
            watched.heard()  # what it says begins the count anew

    told = asyncio.run(watched.until_hung(ping))
    assert len(asked) == 2 + pings and told.startswith("the engine process hung: no sign of life for 0.0")
