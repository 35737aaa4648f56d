"""Which of pytest's workers runs which test: `pytest -n 2 -p tests.support.scheduling` (pytest-xdist)."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import zlib
from collections.abc import Generator
from random import Random

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LONGEST = (
    "processes/test_server_ranks.py",
    "cpu/test_families.py",
    "cpu/test_tensor_tiers.py",
    "processes/test_ray.py",
    "cpu/test_gguf_families.py",
    "cpu/test_models.py",
    "processes/test_server.py",
    "cpu/test_ranked_tiers.py",
    "cpu/test_kernels_formats.py",
    "processes/test_deploy.py",
    "cpu/test_offload.py",
    "cpu/test_gpu_weights.py",
    "processes/test_offload_server.py",
    "cpu/test_gpu_hybrid.py",
    "cpu/test_tensor_parallel.py",
    "processes/test_ranked_restore.py",
    "cpu/test_ptx.py",
    "cpu/test_kernels_attend.py",
    "processes/test_async_llm.py",
    "cpu/test_every_pair.py",
    "cpu/test_hybrid_engine.py",
    "processes/test_torchrun_ranks.py",
    "cpu/test_experts.py",
    "cpu/test_ranked_stream.py",
    "processes/test_tour.py",
    "cpu/test_offload_damage.py",
    "cpu/test_bench.py",
    "processes/test_prefill_bench.py",
    "cpu/test_kernels_linear.py",
    "cpu/test_ranked_remote.py",
    "processes/test_ranks.py",
    "cpu/test_parallel.py",
    "cpu/test_gpu_latent.py",
    "processes/test_docs_served.py",
    "cpu/test_stream.py",
    "cpu/test_device_sampler.py",
    "processes/test_ranked_streaming.py",
    "cpu/test_cli.py",
    "cpu/test_triton.py",
    "processes/test_restart_bench.py",
    "cpu/test_sparse.py",
    "cpu/test_draft_model.py",
    "processes/test_likelihood_ranks.py",
    "cpu/test_triton_compiled.py",
    "cpu/test_gpu_adapters.py",
    "processes/test_foreign_connections.py",
    "cpu/test_gpu_streamed_weights.py",
    "cpu/test_kernels_states.py",
)
"""Files that take longest come first, so that at the end no worker is left alone with one of them. Between two that
start processes, and wait for them, stand two that compute: neither cores nor workers are without work meanwhile."""

FOLDERS = ("unit",)
"""Files of these folders take least, and come last."""


class Scheduling(LoadScopeScheduling):
    """A file to one worker, in the order of their collection: its tests share what was started or made for them, and
    ports, clusters and network namespaces that no two may have at once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid))


def place(nodeid: str) -> tuple[int, int, int, str]:
    """Where a test stands in the order: the same in all workers, in whatever order they have collected. Files that
    are not among the longest are shuffled by their names, so that those with processes are spread over the others."""
    name = nodeid.split("::")[0].removeprefix("tests/")
    first = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return first, int(name.split("/")[0] in FOLDERS), zlib.crc32(name.encode()), name


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
