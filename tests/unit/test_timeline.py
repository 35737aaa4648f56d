"""What is loaded from tiers during a predicted prefill: when it is passed on, and beside what."""

from __future__ import annotations

import msgspec
import pytest

from headrace.planner import cost
from headrace.planner.machine import LayerTimes, Machine, ModelShape
from headrace.planner.ring_cost import ring_kv, ring_q
from headrace.planner.timeline import Loads, Timeline

pytestmark = pytest.mark.unit

SHAPE = ModelShape(layers=1, hidden=256, heads=4, kv_heads=4, head_dim=64, mlp=512, vocab=1000)
MACHINE = Machine(
    name="one", cores=1, isa="any", date="", linear_flops_s=20e9, attention_flops_s=((1, 5e9),), memory_bytes_s=5e9,
    link_bytes_s=1e8, latency_s=1e-4,
)  # fmt: skip
STRATEGIES = {"chain": cost.chain, "gather": cost.gather}
CACHED = 1024


def seconds(strategy: str, layers: int, loads: dict[int, Loads]) -> float:
    """One new row, which the last of two ranks has; rank 0 has all cached tokens."""
    shape = msgspec.structs.replace(SHAPE, layers=layers)
    bounds = (CACHED, CACHED, CACHED + 1)
    return STRATEGIES[strategy](MACHINE, shape, 2, bounds, CACHED, (1.0, 0.0), loads=loads).ttft_s


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_what_is_projected_is_passed_on_when_it_has_been(strategy: str) -> None:
    """X comes after 0.5 s, its projection takes 0.25 s, then K and V go to the rank that attends to them."""
    times = LayerTimes(MACHINE, SHAPE)
    sent = CACHED * SHAPE.kv_bytes / MACHINE.link_bytes_s + MACHINE.latency_s
    attended = times.attend(1, CACHED + 1, CACHED + 1)
    whole = 0.75 + sent + attended + times.rest(1) + times.head() + 2 * MACHINE.latency_s
    assert seconds(strategy, 1, {0: Loads((0.5,), (0.0,), 0.25)}) == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_rank_without_rows_projects_while_another_computes(strategy: str) -> None:
    """A layer more takes the longer of the two, not both."""
    computing = seconds(strategy, 9, {}) - seconds(strategy, 8, {})
    for project_s in (0.5 * computing, 2 * computing):
        loads = {layers: {0: Loads((0.0,) * layers, (0.0,) * layers, project_s)} for layers in (8, 9)}
        more = seconds(strategy, 9, loads[9]) - seconds(strategy, 8, loads[8])
        assert more == pytest.approx(max(project_s, computing), rel=0.05)


@pytest.mark.parametrize("model", [ring_kv, ring_q])
def test_ranks_of_a_ring_project_their_own(model: cost.CostModel) -> None:
    """Both at the same time, in each layer; queries travel meanwhile, keys cannot."""
    shape, bounds = msgspec.structs.replace(SHAPE, layers=4), tuple(range(CACHED, CACHED + 641, 160))
    without = model(MACHINE, shape, 2, bounds, CACHED, (1.0, 1.0)).ttft_s
    loads = {rank: Loads((0.0,) * 4, (0.0,) * 4, 0.5) for rank in (0, 1)}
    found = model(MACHINE, shape, 2, bounds, CACHED, (1.0, 1.0), loads=loads).ttft_s
    assert found == pytest.approx(without + 4 * 0.5, rel=0.02)
    assert (found < without + 4 * 0.5 - 0.01) is (model is ring_q)


def test_what_is_still_to_come_holds_up_nothing() -> None:
    """Messages of a second each: one that is ready later leaves a port to others until then, and waits its turn."""
    run = Timeline(LayerTimes(msgspec.structs.replace(MACHINE, latency_s=0.0), SHAPE), 3, False)
    size = MACHINE.link_bytes_s
    assert run.send(0, 1, size, 5.0, in_turn=False) == 6.0
    assert run.send(0, 1, size, 0.0) == 1.0
    assert run.send(0, 2, size, 0.5) == 2.0
    assert run.send(0, 1, size, 4.5) == 7.0, "between 4.5 and 5 there is no room"
    assert run.send(2, 1, size, 0.0, in_turn=False) == 2.0, "the first rank's comes before it"
    assert run.send(0, 1, size, 2.5, in_turn=False) == 3.5, "ready before what was booked in turn"
    assert run.send(0, 1, size, 0.0) == 8.0, "in turn"
