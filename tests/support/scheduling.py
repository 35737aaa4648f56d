"""Which of pytest's workers runs which test: `pytest -n 2 -p tests.support.scheduling` (pytest-xdist)."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Generator
from random import Random

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONGEST = (
    "processes/test_server_ranks.py",
    "processes/test_deploy.py",
    "processes/test_server.py",
    "processes/test_offload_server.py",
    "processes/test_tour.py",
    "processes/test_ray.py",
    "processes/test_torchrun_ranks.py",
    "processes/test_async_llm.py",
    "processes/test_prefill_bench.py",
    "processes/test_likelihood_ranks.py",
    "processes/test_restart_bench.py",
    "processes/test_ranked_restore.py",
    "processes/test_ranked_streaming.py",
    "processes/test_ranks.py",
    "processes/test_foreign_connections.py",
    "cpu/test_every_pair.py",
    "cpu/test_ranked_tiers.py",
    "cpu/test_ranked_stream.py",
    "cpu/test_cli.py",
    "cpu/test_stream.py",
    "cpu/test_triton.py",
    "cpu/test_triton_layers.py",
    "cpu/test_templates.py",
)
"""Files that take longest come first, so that at the end no worker is left alone with one of them."""

FOLDERS = ("processes", "cpu", "gpu", "unit")
"""Of the others, those come last that take least."""


class Scheduling(LoadScopeScheduling):
    """A file to one worker, in the order of their collection: its tests share what was started or made for them, and
    ports, clusters and network namespaces that no two may have at once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


def place(nodeid: str) -> tuple[int, int, str]:
    """Where a test stands in the order: the same in all workers, in whatever order they have collected."""
    name = nodeid.split("::")[0].removeprefix("tests/")
    folder = name.split("/")[0]
    first = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return first, FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), name


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker imports files in an order of its own: in a fresh clone, where none is compiled yet, each compiles a
    part of them and finds the others compiled."""
    report = yield
    if isinstance(collector, pytest.Directory):
        Random(os.environ.get("PYTEST_XDIST_WORKER", "")).shuffle(report.result)
    return report


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """In place of --dist load."""
    if config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False  # by the number of their tests
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and modules stay to the end: each full collection would look through some millions of objects, and pytest
    makes several when it ends. Libraries tell of objects that are never freed: these are, after that. Then torch is
    there, and takes the worker's number of threads."""
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        share_the_cores(os.environ.get("PYTEST_XDIST_WORKER", "gw0"))


def share_the_cores(worker: str) -> None:
    """The first worker, and what it starts, computes on as many threads as torch chooses, each other one on a single
    thread: together they have about as many as there are cores. Tests that ask for a number of threads have theirs."""
    if worker == "gw0":
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
