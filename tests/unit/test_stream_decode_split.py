"""The split of a streamed batch against trying every split, written out again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.streaming.decode_split import LayerCosts, chunks_to_project

pytestmark = pytest.mark.unit


def one(costs: LayerCosts, projected: int, stored: int) -> float:
    """T of one split."""
    x = 0.0 if costs.x_resident else projected * costs.x_bytes
    moved = costs.weight_bytes + x + (stored - projected) * costs.kv_bytes + costs.hidden_bytes
    return max(moved / costs.link_s, projected * costs.project_s + costs.compute_s)


sizes = st.floats(0.01, 10)
layer_costs = st.builds(
    LayerCosts,
    kv_bytes=sizes,
    x_bytes=sizes,
    link_s=sizes,
    project_s=sizes,
    compute_s=st.just(0.0) | sizes,
    weight_bytes=st.just(0.0) | st.floats(1, 100),
    hidden_bytes=st.just(0.0) | sizes,
    x_resident=st.booleans(),
)


@given(layer_costs, st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_split_is_the_best(costs: LayerCosts, counts: tuple[int, int]) -> None:
    stored, most = max(counts), min(counts)
    found = chunks_to_project(stored, most, costs)
    assert 0 <= found <= most
    assert one(costs, found, stored) == pytest.approx(min(one(costs, count, stored) for count in range(most + 1)))


COSTS = LayerCosts(kv_bytes=2.0, x_bytes=1.0, link_s=1.0, project_s=1.0)


def test_of_equals_the_fewest() -> None:
    assert chunks_to_project(18, 18, replace(COSTS, project_s=4.0)) == 7  # 7 * 4 against 7 + 11 * 2
    assert chunks_to_project(9, 9, replace(COSTS, compute_s=100.0)) == 0
    assert chunks_to_project(0, 0, COSTS) == 0


def test_weights_on_the_link_shift_the_split() -> None:
    """Weights that cross the same link make it the bottleneck: more is projected; slow other work: less."""
    plain = chunks_to_project(40, 40, replace(COSTS, project_s=4.0))
    loaded = chunks_to_project(40, 40, replace(COSTS, project_s=4.0, weight_bytes=50.0))
    busy = chunks_to_project(40, 40, replace(COSTS, project_s=4.0, compute_s=30.0))
    assert busy < plain < loaded


def test_wide_activations_are_projected_only_where_they_are_at_hand() -> None:
    assert chunks_to_project(9, 9, replace(COSTS, x_bytes=2.0)) == 0
    assert chunks_to_project(9, 9, replace(COSTS, x_bytes=2.0, x_resident=True)) == 6


@pytest.mark.parametrize("changes", [{"link_s": 0.0}, {"project_s": -1.0}, {"kv_bytes": float("nan")}])
def test_refuses_what_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(COSTS, **changes)
    with pytest.raises(ValueError, match="cannot project 2 of 1"):
        chunks_to_project(1, 2, COSTS)


def test_seconds_of_many_at_once() -> None:
    counts = np.arange(8)
    assert COSTS.seconds(counts, 7).tolist() == [one(COSTS, int(count), 7) for count in counts]
