"""The throughput of streamed decoding: what it predicts of a step, and what it makes of what it sees."""

from __future__ import annotations

import pytest

from headrace.offload.streaming.decode_split import LayerCosts, chunks_to_project
from headrace.offload.streaming.throughput import LATEST, Operation, OperationWork, RecentMean, Throughput
from headrace.offload.ticket import Ticket

WORK = OperationWork(rows=4)


def throughput(link_s: float = 1e-9, project_s: float = 0.0, rest_s: float = 0.0, resident: bool = False) -> Throughput:
    """K and V of a chunk: 2 ms at 1 GB/s; X: 1 ms."""
    found = Throughput(2_000_000, 1_000_000, resident)
    found.link.observe(link_s)
    found.projected(1, project_s)
    found.computed(WORK, rest_s)
    return found


def test_all_loaded_and_nothing_computed_takes_the_link_s_time() -> None:
    assert throughput().seconds([Operation(10, 0, WORK)] * 8) == pytest.approx(8 * 0.020)


def test_the_longer_of_link_and_arithmetic_and_how_the_step_begins() -> None:
    """Bound by the link: all transfers, then what the last operation computes. By arithmetic: the first transfer."""
    assert throughput(rest_s=0.005).seconds([Operation(10, 0, WORK)] * 8) == pytest.approx(8 * 0.020 + 0.005)
    assert throughput(rest_s=0.050).seconds([Operation(10, 0, WORK)] * 8) == pytest.approx(0.020 + 8 * 0.050)


@pytest.mark.parametrize("resident", [False, True])
def test_projecting_hides_under_loading(resident: bool) -> None:
    """Four chunks projected in 3 ms each, six loaded in 2 ms each; X before, unless it is there."""
    x = 0.0 if resident else 0.004
    found = throughput(project_s=0.003, resident=resident).seconds([Operation(6, 4, WORK)] * 20)
    # The link: x + 12 ms an operation; the arithmetic: 12 ms.
    assert found == pytest.approx(20 * max(x + 0.012, 0.012), rel=0.03)


def test_weights_and_hidden_states_cross_the_same_link() -> None:
    heavy = OperationWork(rows=4, weight_bytes=9_000_000, hidden_bytes=1_000_000)
    assert throughput().seconds([Operation(10, 0, heavy)] * 9) == pytest.approx(9 * 0.020 + 8 * 0.010)


@pytest.mark.parametrize("resident", [False, True])
def test_the_split_is_the_solver_s(resident: bool) -> None:
    found = throughput(project_s=0.003, rest_s=0.004, resident=resident).split(40, 36, WORK)
    costs = LayerCosts(kv_bytes=2e6, x_bytes=1e6, link_s=1e9, project_s=0.003, compute_s=0.004, x_resident=resident)
    assert found == chunks_to_project(40, 36, costs) > 0


def test_a_figure_is_that_of_the_latest_but_for_a_single_burst() -> None:
    figure = RecentMean()
    assert figure.value == 0.0
    for value in [1.0] * 10 + [50.0]:
        figure.observe(value)
    assert figure.value == 1.0
    figure.observe(50.0)
    assert figure.value > 2.0, "what happens again and again counts"
    for _ in range(LATEST):
        figure.observe(3.0)
    assert figure.value == pytest.approx(3.0)
    figure.forget()
    assert figure.value == 0.0


def test_short_transfers_do_not_count() -> None:
    found = throughput()
    for size in (100, 10_000_000):
        ticket = Ticket(size, "kv")
        ticket.began_s = -2.0
        ticket.end(None)
        before = found.link.value
        found.carried(ticket)
        assert (found.link.value != before) == (size == 10_000_000)
