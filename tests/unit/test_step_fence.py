"""What waits for the steps of a rank: for all that it was sent before, and for none that come later."""

from __future__ import annotations

import threading

import pytest

from headrace.parallel.step_fence import StepFence

pytestmark = pytest.mark.unit


def waits(wait: object) -> threading.Thread:
    thread = threading.Thread(target=wait, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_behind_the_steps_sent_so_far() -> None:
    fence = StepFence()
    fence.here()()  # nothing was sent
    fence.sent(), fence.sent()
    behind = waits(fence.here())
    fence.sent()
    later = fence.here()
    fence.computed()
    behind.join(0.05)
    assert behind.is_alive(), "one of the two steps is not computed"
    fence.computed()
    behind.join(20)
    assert not behind.is_alive()
    last = waits(later)
    last.join(0.05)
    assert last.is_alive()
    fence.computed()
    last.join(20)
    assert not last.is_alive()


def test_rank_0_is_sent_none() -> None:
    fence = StepFence()
    fence.computed()
    fence.here()()
