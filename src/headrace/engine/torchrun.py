"""Under torchrun every process runs the same program: rank 0 goes on as the engine, the others become its workers.

Imports no torch, so that rank 0's server need not load it.
"""

from __future__ import annotations

import os
import signal
import threading

from headrace.config import EngineConfig
from headrace.parallel.torchrun_environment import check_size, started_this


def serve_if_worker(config: EngineConfig) -> None:
    """On ranks other than 0 serves as a worker and ends the process. Returns on rank 0, and without torchrun.

    Raises ValueError where torchrun started another number of processes than the settings have ranks, and where hosts
    cannot reach each other.
    """
    check_size(config.ranks.context * config.ranks.tensor)
    if not started_this() or os.environ["RANK"] == "0":
        return
    from headrace.parallel import launch

    launch.serve_if_worker(config.ranks.interface)


def leave_signals_to_rank_0() -> None:
    """torchrun passes its signals to all ranks. A worker that has met the driver stays for as long as that finishes its
    answers, and ends with it."""
    if started_this() and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
