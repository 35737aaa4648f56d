"""A worker's end of its control link: what was sent before a command is known to it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.parallel.control import RunStep, TierCommand
from headrace.parallel.step_fence import StepFence
from headrace.parallel.worker import DriverLink

pytestmark = pytest.mark.unit


def test_the_fence_hears_of_steps_in_order() -> None:
    nobody: Any = None
    link, fence, waits = DriverLink(nobody), StepFence(), []
    link.fence, link.tiers = fence, lambda body, answer: waits.append(fence.here())
    for message in (TierCommand(b""), RunStep(b"step"), TierCommand(b"")):
        link._take(message)
    assert link.steps.get() == b"step"
    waits[0]()  # no step had come
    fence.computed()
    waits[1]()
    assert fence._sent == 1
