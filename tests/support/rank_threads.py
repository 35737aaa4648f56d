"""Ranks as threads of one process, and a made-up machine that their planner goes by."""

from __future__ import annotations

import queue
import threading
from typing import Any, Protocol

import torch

from headrace.parallel import messages
from headrace.parallel.rank import Rank
from headrace.planner.machine import Machine

MACHINE = Machine(
    name="made up", cores=2, isa="none", date="2026-01-01", linear_flops_s=1e9, attention_flops_s=((1, 1e9),),
    memory_bytes_s=1e9, link_bytes_s=1e9,
)  # fmt: skip


class Failing(Protocol):
    def fail(self, why: str) -> None:
        """Wakes whoever waits for a rank."""


class Threads:
    """Workers as threads that compute the steps sent to them."""

    def __init__(self, ranks: list[Rank], hub: Failing) -> None:
        self.hub, self.ranks = hub, ranks
        self.boxes = [queue.SimpleQueue[bytes | None]() for _ in ranks]
        self.threads = [
            threading.Thread(target=self._work, args=pair, daemon=True) for pair in zip(ranks, self.boxes, strict=True)
        ]
        for thread in self.threads:
            thread.start()

    def _work(self, rank: Rank, box: Any) -> None:
        torch.set_num_threads(1)
        try:
            while (step := box.get()) is not None:
                rank.run(messages.decode(step))
        except BaseException as error:
            self.hub.fail(repr(error))

    def send(self, step: bytes) -> None:
        for rank, box in zip(self.ranks, self.boxes, strict=True):
            rank.fence.sent()
            box.put(step)

    def close(self) -> None:
        for box in self.boxes:
            box.put(None)
        for thread in self.threads:
            thread.join()
