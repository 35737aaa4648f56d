"""What torchrun says in the environment of the processes that it starts. Imports no torch."""

from __future__ import annotations

import os

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""By which torchrun is known: others set some of them too."""


def started_this() -> bool:
    return all(name in os.environ for name in VARIABLES)


def check_size(ranks: int) -> None:
    """Raises ValueError where torchrun started another number of processes than the settings ask for."""
    if started_this() and int(os.environ["WORLD_SIZE"]) != ranks:
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but context_parallel_size * tensor_parallel_size "
            f"is {ranks}: make them equal"
        )
