"""Tensor ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub, RankLost

Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[TensorGroup], Result], hub: LoopbackHub | None = None) -> list[Result]:
    """What each rank's thread returns; the first error otherwise."""
    hub = hub or LoopbackHub(size)

    def one(rank: int) -> Result:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                return work(TensorGroup(hub.transport(rank)))
        except BaseException as error:
            hub.fail(f"rank {rank}: {error}")
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, RankLost)):
            raise error
    assert hub.broken or hub.left_over() == 0
    return [future.result() for future in futures]
