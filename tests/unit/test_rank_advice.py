"""What is said at the start of ranks that share one machine, whole."""

from __future__ import annotations

import msgspec
import pytest

from headrace.config import EngineConfig
from headrace.engine.rank_advice import advice
from headrace.planner.machine import ComputeRates, Machine
from tests.support.planner_oracles import MACHINE, S2

pytestmark = pytest.mark.unit


def profile(gain: float) -> Machine:
    """One engine attains so many times what a rank does."""
    rates = ComputeRates(
        cores=2, linear_flops_s=gain * MACHINE.linear_flops_s, memory_bytes_s=gain * MACHINE.memory_bytes_s,
        attention_flops_s=tuple((rows, gain * rate) for rows, rate in MACHINE.attention_flops_s),
    )  # fmt: skip
    return msgspec.structs.replace(MACHINE, one_engine=rates)


TWO, THREE = EngineConfig(context_parallel_size=2), EngineConfig(context_parallel_size=3)


def test_one_engine_is_as_fast() -> None:
    assert advice(TWO, 2, 1, 2, profile(2.5), S2) == (
        "2 ranks share the 2 cores of this machine (predicted for 2,048 tokens: 0.45 s, by one engine with all 2 cores "
        "0.36 s). One engine also decodes faster and holds the weights once. Ranks on one machine hold no longer "
        "context. Leave out --context-parallel-size (-cp), or give each rank a machine of its own",
        True,
    )


def test_ranks_are_faster() -> None:
    """As on several sockets: worth a line, no warning."""
    assert advice(TWO, 2, 1, 2, profile(1.2), S2) == (
        "2 ranks share the 2 cores of this machine (predicted for 2,048 tokens: 0.45 s, by one engine with all 2 cores "
        "0.74 s). One engine decodes faster and holds the weights once",
        False,
    )


def test_a_small_gain_is_none() -> None:
    """0.45 s against 0.50: predictions are no better than that."""
    told = advice(TWO, 2, 1, 2, profile(1.8), S2)
    assert told is not None and told[1] and "0.45 s, by one engine with all 2 cores 0.50 s" in told[0]
    assert "Ranks gain less than predictions may be off, and one engine decodes faster" in told[0]


def test_more_threads_than_cores() -> None:
    told = advice(THREE, 3, 1, 2, profile(1.2), S2)
    assert told is not None and told[1]
    assert told[0].startswith(
        "3 ranks of 1 thread exceed the 2 cores of this machine and take turns on them (predicted"
    )
    told = advice(EngineConfig(context_parallel_size=2), 2, 4, 64, profile(2.0), S2)
    assert told is not None and told[0].startswith("2 ranks of 4 threads share this machine (predicted")


def test_without_a_prediction() -> None:
    """Tensor ranks are no part of the cost model, and without the C++ kernels no rank takes all cores."""
    assert advice(EngineConfig(tensor_parallel_size=2), 2, 1, 2, profile(2.0), S2) == (
        "2 ranks share the 2 cores of this machine: one engine with all 2 cores decodes faster. Ranks on one machine "
        "hold no longer context. Leave out --tensor-parallel-size (-tp), or give each rank a machine of its own",
        True,
    )
    told = advice(EngineConfig(context_parallel_size=2, tensor_parallel_size=2), 4, 1, 4)
    assert told is not None and "--context-parallel-size (-cp) and --tensor-parallel-size (-tp), or give" in told[0]
    for told in (advice(TWO, 2, 1, 2), advice(TWO, 2, 1, 2, MACHINE, S2)):
        assert told is not None and "predicted" not in told[0] and "(-cp)" in told[0]


def test_several_machines() -> None:
    assert advice(TWO, 1, 8, 8, MACHINE, S2) is None
    assert advice(EngineConfig(context_parallel_size=4), 2, 4, 8) == (
        "2 of 4 ranks share the 8 cores of this machine. Start one rank a machine, with all its cores "
        "(torchrun --nproc-per-node 1)",
        True,
    )
