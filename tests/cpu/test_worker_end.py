"""The engine's process when its server goes: what requests under way have computed is stored."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine import messages as m
from headrace.engine.watchdog import StepWatch
from headrace.engine.worker import _step_on
from headrace.types import CHUNK, Request
from tests.support.offloading import MIXES, forced, look_at_once

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

PROMPT = list(range(10, 310))
"""Four chunks of 64, and some."""
SHORT = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


class HungUp:
    """A link whose other side goes before the message of that number, of a kind, and an inbox that has told nothing of
    it."""

    def __init__(self, kind: type, number: int, first: m.ToEngine) -> None:
        self.serving = threading.Event()
        self.kind, self.left, self.first = kind, number, [first]

    def send(self, message: Any) -> None:
        self.left -= isinstance(message, self.kind)
        if self.left < 0:
            raise BrokenPipeError

    send_events = send

    def give_up(self) -> None:
        raise ConnectionResetError

    def get(self, timeout: float | None = None) -> m.ToEngine | None:
        if not self.first:
            raise queue.Empty
        return self.first.pop()

    def empty(self) -> bool:
        return not self.first


def loading(path: Path) -> LLM:
    llm = LLM("tiny", dtype="float32", kv_cache_tokens=1024, kv_offload_path=str(path / "kv"), kv_offload_disk_size=0.1)
    llm.engine.offload.choose = forced(*MIXES["load"])  # type: ignore[union-attr]
    look_at_once(llm)
    return llm


def test_what_a_step_leaves_half_done_is_not_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever in it raises what a server that is gone raises."""
    with loading(tmp_path) as llm:
        core: Any = llm.engine
        link: Any = HungUp(m.Events, 2, m.Add(Request("a", PROMPT, LONG)))
        monkeypatch.setattr(core, "_compute", lambda slices: link.send_events(None) or link.give_up())
        assert _step_on(core, link, link, StepWatch.of(core.loaded.config, lambda reason: None)) == 0
        monkeypatch.undo()
        assert core.has_work
    with loading(tmp_path) as again:
        assert again.generate([PROMPT], SHORT)[0].metrics.restored_tokens == 0


@pytest.mark.parametrize(("kind", "number"), [(m.Events, 2), (m.Prefills, 0)], ids=["events", "prefills"])
def test_a_server_that_goes_during_a_step(kind: type, number: int, tmp_path: Path) -> None:
    """And nothing is stored half computed: what comes back is what a model computes that never met it."""
    with loading(tmp_path) as llm:
        core: Any = llm.engine
        link: Any = HungUp(kind, number, m.Add(Request("a", PROMPT, LONG)))
        assert _step_on(core, link, link, StepWatch.of(core.loaded.config, lambda reason: None)) == 0
        assert not core.has_work
    with loading(tmp_path) as again, LLM("tiny", dtype="float32", kv_cache_tokens=1024) as fresh:
        [answer], [expected] = (each.generate([PROMPT], SHORT) for each in (again, fresh))
        assert answer.metrics.restored_tokens == 4 * CHUNK
        assert answer.token_ids == expected.token_ids
