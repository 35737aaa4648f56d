"""Tasks that are cancelled: their clean-up is waited for, and a caller that is cancelled meanwhile stays so."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest

from headrace.server.job import cancel

pytestmark = pytest.mark.unit


class Work:
    """A task whose clean-up goes on until `cleaned` is set, and then fails."""

    def __init__(self) -> None:
        self.cleans, self.cleaned = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cleans.set()
            await self.cleaned.wait()
            raise OSError("the clean-up failed")


def test_clean_up_is_waited_for_and_its_failure_kept_quiet() -> None:
    async def run() -> list[object]:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
        works = [Work(), Work()]
        await asyncio.sleep(0)
        ends = asyncio.create_task(cancel(*(work.task for work in works)))
        for work in works:
            await work.cleans.wait()
            assert not ends.done()
            work.cleaned.set()
        await ends
        assert all(work.task.done() for work in works)
        del works, work
        gc.collect()  # asyncio tells of a failure when its task goes
        return told

    assert asyncio.run(run()) == []


def test_a_caller_that_is_cancelled_meanwhile_is_cancelled_behind_the_clean_up() -> None:
    async def run() -> bool:
        work = Work()
        await asyncio.sleep(0)
        caller = asyncio.create_task(cancel(work.task))
        await work.cleans.wait()
        for _ in range(2):
            caller.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not caller.done() and not work.task.done()
        work.cleaned.set()
        with suppress(asyncio.CancelledError):
            await caller
        assert work.task.done()
        return caller.cancelled()

    assert asyncio.run(run())
