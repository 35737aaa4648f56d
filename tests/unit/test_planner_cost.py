"""The cost model: what it books by hand-made sums, its limits, and the papers' measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planner import cost, ring_cost
from headrace.planner.chain_partition import _seconds, balanced, best_chain
from headrace.planner.machine import LayerTimes, Machine, ModelShape, shares
from headrace.planner.partition import bounds_of, cut, even, fractions_of, interpolate, zigzag
from headrace.planner.timeline import Cost
from tests.support.planner_oracles import (
    GQA,
    H100,
    LLAMA_405B_TP8,
    MACHINE,
    S2,
    TABLE_4,
    chain_entries,
    gather_entries,
)

pytestmark = pytest.mark.unit

TINY = ModelShape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, mlp=8, vocab=10)
PLAIN = Machine(
    name="plain", cores=1, isa="none", date="2025-01-01", linear_flops_s=1.0, attention_flops_s=((1, 1.0),),
    memory_bytes_s=1e30, link_bytes_s=1.0,
)  # fmt: skip
"""One operation and one byte a second: predictions are counts."""


COPYING = msgspec.structs.replace(PLAIN, memory_bytes_s=2.0)
"""A copied token of TINY takes 8 s, and nothing else is bound by memory."""


def single(machine: Machine, shape: ModelShape, ranks: int, T: int, P: int = 0, *more: Any, **settings: Any) -> Cost:
    return cost.single(machine, shape, ranks, (P, P + T), P, *more, **settings)


def gather(machine: Machine, shape: ModelShape, ranks: int, T: int, P: int = 0, *more: Any, **settings: Any) -> Cost:
    return cost.gather(machine, shape, ranks, [P + bound for bound in even(T, ranks)], P, *more, **settings)


def chain(machine: Machine, shape: ModelShape, bounds: Sequence[int], *more: Any, **settings: Any) -> Cost:
    return cost.chain(machine, shape, len(bounds) - 1, bounds, *more, **settings)


def ring_kv(machine: Machine, shape: ModelShape, ranks: int, T: int, P: int = 0, *more: Any, **settings: Any) -> Cost:
    return ring_cost.ring_kv(machine, shape, ranks, zigzag(T, ranks, 1, P), P, *more, **settings)


def ring_q(machine: Machine, shape: ModelShape, ranks: int, T: int, P: int = 0, *more: Any, **settings: Any) -> Cost:
    return ring_cost.ring_q(machine, shape, ranks, zigzag(T, ranks, 1, P), P, *more, **settings)


def layers(count: int) -> ModelShape:
    return msgspec.structs.replace(TINY, layers=count)


def fast_links(machine: Machine) -> Machine:
    return msgspec.structs.replace(machine, link_bytes_s=1e30, latency_s=0.0)


def test_sizes_of_a_shape() -> None:
    assert (TINY.qkv_weights, TINY.rest_weights) == (4 * 4 * 2, 4 * 4 + 3 * 4 * 8)
    assert TINY.linear_flops == 2 * (32 + 112)
    assert (TINY.pair_flops, TINY.kv_bytes, TINY.q_bytes, TINY.state_bytes) == (16, 8, 8, 32)
    assert msgspec.structs.replace(TINY, gated=False).rest_weights == 16 + 2 * 32


def test_single_is_the_sum_of_its_work() -> None:
    """10 causal pairs of 4 rows, of the last layer 4 of one row; the head is one row of 10 outputs."""
    layer, head = 4 * TINY.linear_flops + 10 * 16, 2 * 4 * 10
    assert single(PLAIN, TINY, 1, 4, full_last_layer=True).ttft_s == layer + head
    last = 4 * 64 + 4 * 16 + 224
    assert single(PLAIN, TINY, 3, 4) == Cost(last + head, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert single(PLAIN, layers(3), 1, 4).ttft_s == 2 * layer + last + head


def test_single_fetches_what_lies_elsewhere() -> None:
    """8 cached tokens, 6 at home: 2 x 8 bytes come while the projections (4 rows x 64) run."""
    quick = single(PLAIN, TINY, 2, 4, 8, (6, 2), full_last_layer=True)
    assert quick.ttft_s == 4 * TINY.linear_flops + (10 + 32) * 16 + 80
    assert (quick.bytes_sent, quick.wait_s, cost.home((6, 2), 2), cost.home((2, 6), 2)) == ((0, 16), (0, 0), 0, 1)
    slow = single(msgspec.structs.replace(PLAIN, link_bytes_s=0.01), TINY, 2, 4, 8, (6, 2), full_last_layer=True)
    assert slow.wait_s == (1600 - 256, 0) and slow.ttft_s == pytest.approx(quick.ttft_s + 1600 - 256)


def test_chain_of_two_by_hand() -> None:
    """Rank 1 attends its own block first, then waits for rank 0's 3 tokens; rank 0 ends after the projections."""
    done = chain(PLAIN, TINY, (0, 3, 4))
    qkv, rest = 2 * 32, 2 * 112
    arrival = 3 * qkv + 3 * 8
    local = qkv + 16
    assert done.bytes_sent == (24, 0) and done.wait_s == (0, arrival - local)
    assert done.ttft_s == arrival + 3 * 16 + rest + 80


def test_chain_leaves_the_last_layer_early() -> None:
    """Of the only layer the first ranks do the projections and relay: nothing that they would have to wait for."""
    assert chain(PLAIN, TINY, (0, 9, 10, 11)).wait_s[:2] == (0, 0)
    assert chain(PLAIN, layers(2), (0, 9, 10, 11)).wait_s[1] > 0


def test_last_layer_of_a_chain() -> None:
    """Rows 0, 1 | 2, 3: of row 3 alone, 2 local pairs, then the 2 tokens of rank 0, which are there by then."""
    done = chain(PLAIN, TINY, (0, 2, 4))
    assert done.ttft_s == 2 * 64 + 2 * 16 + 2 * 16 + 224 + 80 and done.wait_s == (0, 0)
    assert chain(PLAIN, TINY, (0, 2, 4), full_last_layer=True).ttft_s == 2 * 64 + 3 * 16 + 4 * 16 + 2 * 224 + 80
    whole = 2 * 64 + 7 * 16 + 2 * 224
    assert chain(PLAIN, layers(2), (0, 2, 4)).ttft_s == whole + done.ttft_s
    idle = chain(PLAIN, TINY, (0, 4, 4))  # rank 1 has no rows, but keeps the keys
    assert idle.ttft_s == single(PLAIN, TINY, 1, 4).ttft_s and idle.wait_s == (0, 4 * 64 + 4 * 8)


def test_gather_of_two_by_hand() -> None:
    full = gather(PLAIN, TINY, 2, 4, full=True, full_last_layer=True)
    causal = gather(PLAIN, TINY, 2, 4, full_last_layer=True)
    ready = 2 * 64 + 2 * 8
    assert full.ttft_s == ready + 2 * 4 * 16 + 2 * 224 + 80
    assert causal.ttft_s == ready + 7 * 16 + 2 * 224 + 80
    assert full.wait_s == (16, 16)
    last = ready + 4 * 16 + 224 + 80
    for done in (gather(PLAIN, TINY, 2, 4), gather(PLAIN, TINY, 2, 4, full=True)):
        assert done.ttft_s == last and done.wait_s == (16, 16) and done.bytes_sent == (16, 16)
    assert gather(PLAIN, layers(2), 2, 4, full=True).ttft_s == full.ttft_s - 80 + last


def test_rings_of_two_by_hand() -> None:
    """4 tokens, rank 0 has rows 0 and 3, rank 1 rows 1 and 2: 5 pairs each."""
    kv = ring_kv(PLAIN, TINY, 2, 4, full_last_layer=True)
    assert kv.bytes_sent == (16, 16) and kv.wait_s == (0, 0)  # 16 s under the 3 local pairs' 48
    assert kv.ttft_s == 2 * 64 + 5 * 16 + 2 * 224 + 80
    q = ring_q(PLAIN, TINY, 2, 4, fold=None, full_last_layer=True)
    assert q.bytes_sent == (16 + 2 * 32, 16 + 2 * 32)
    assert q.ttft_s == 2 * 64 + 5 * 16 + 64 + 2 * 224 + 80


def test_last_layer_of_ring_kv() -> None:
    """Row 3 on rank 0 meets its own 2 keys, then those of rank 1, which keeps nothing and so waits for nothing."""
    done = ring_kv(PLAIN, TINY, 2, 4)
    assert done.ttft_s == 2 * 64 + 4 * 16 + 224 + 80
    assert ring_kv(PLAIN, layers(2), 2, 4).ttft_s == 2 * 64 + 5 * 16 + 2 * 224 + done.ttft_s
    slow = msgspec.structs.replace(PLAIN, link_bytes_s=0.25)
    assert ring_kv(slow, TINY, 2, 4).wait_s == (64 - 32, 0)
    assert gather(slow, TINY, 2, 4).wait_s == (64, 64)
    both = ring_kv(msgspec.structs.replace(PLAIN, link_bytes_s=0.001), TINY, 2, 4096).wait_s
    assert min(both) > 0  # a block each


def test_last_layer_of_ring_q() -> None:
    """Only row 3 of rank 0 goes round: its q of 8 bytes, 2 pairs, one state of 32 bytes."""
    paper = ring_q(PLAIN, TINY, 2, 4, fold=None)
    away = 2 * 64 + 8 + 2 * 16 + 32
    assert paper.ttft_s == away + 32 / 1e30 + 224 + 80 and paper.bytes_sent == (8, 32)
    assert paper.wait_s == (away - 2 * 64 - 2 * 16, 8)
    kept = ring_q(PLAIN, TINY, 2, 4)  # rank 0 keeps the first block: keys come to it, its queries stay
    assert kept.ttft_s == 2 * 64 + 16 + 4 * 16 + 224 + 80
    assert kept.bytes_sent == (0, 16) and kept.wait_s == (16, 0)


def test_copies_between_pool_and_workspace() -> None:
    """Those who keep new tokens copy them, and holders of cached ones these: 8 s a token here."""

    def more(predict: Callable[[Machine], Cost]) -> float:
        return predict(COPYING).ttft_s - predict(PLAIN).ttft_s

    assert more(lambda m: chain(m, TINY, (0, 2, 4))) == 4 * 8
    assert more(lambda m: chain(m, layers(3), (0, 2, 4))) == 3 * 4 * 8
    assert more(lambda m: ring_kv(m, TINY, 2, 4)) == 4 * 8
    assert more(lambda m: gather(m, TINY, 2, 4)) == 0  # rank 0 copies and is through before rank 1
    assert more(lambda m: gather(m, TINY, 2, 4, 2048)) == (1024 + 4) * 8
    assert more(lambda m: single(m, TINY, 2, 4)) == more(lambda m: single(m, TINY, 2, 4, 8, (8, 0))) == 0
    assert more(lambda m: single(m, TINY, 2, 4, 8, (6, 2))) == (6 + 4) * 8


def test_links_take_time_from_both_ranks() -> None:
    """16 bytes at half a second each: rank 1 loses 8 s, unless it would wait for them anyway."""
    busy = msgspec.structs.replace(PLAIN, link_cpu_s_per_byte=0.5)
    assert chain(busy, TINY, (0, 2, 4)).ttft_s == chain(PLAIN, TINY, (0, 2, 4)).ttft_s + 8
    slow, busy = (msgspec.structs.replace(machine, link_bytes_s=0.1) for machine in (PLAIN, busy))
    assert chain(busy, TINY, (0, 2, 4)).ttft_s == chain(slow, TINY, (0, 2, 4)).ttft_s


def test_ring_q_sends_a_state_per_block() -> None:
    """rows * heads * (head_dim + 2) * 4 bytes for every block of the keys that lie on the other rank."""
    args = (MACHINE, S2, 2, 128, 16384)
    state = 64 * 8 * 130 * 4
    q_bytes = 64 * S2.q_bytes
    new = 1  # block 8, with all new keys, goes to rank 0
    keys = 64 * S2.kv_bytes
    spread = ring_q(*args, full_last_layer=True).bytes_sent
    assert spread == (S2.layers * (q_bytes + (4 + new) * state), S2.layers * (q_bytes + keys + 4 * state))
    assert ring_q(*args, fold=None, full_last_layer=True).bytes_sent[0] == S2.layers * (q_bytes + state)
    one_sided = ring_q(*args, (1, 0), full_last_layer=True).bytes_sent
    assert one_sided == (S2.layers * 9 * state, S2.layers * (q_bytes + keys))
    row = (S2.q_bytes, keys + 4 * state / 64)  # of the last layer, whose last row is on rank 0
    assert ring_q(*args).bytes_sent == tuple(x * 7 / 8 + y for x, y in zip(spread, row, strict=True))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum), st.integers(1, 5))
def test_traffic_is_that_of_equations_4_to_7(sizes: list[int], layers: int) -> None:
    shape = msgspec.structs.replace(TINY, layers=layers)
    bounds = bounds_of(sizes)
    assert sum(chain(PLAIN, shape, bounds).bytes_sent) == layers * shape.kv_bytes * chain_entries(bounds)
    sent = sum(cost.gather(PLAIN, shape, len(sizes), bounds).bytes_sent)
    assert sent == layers * shape.kv_bytes * gather_entries(bounds)


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3000), st.integers(0, 5000),
    st.lists(st.floats(0, 1), min_size=5, max_size=5), st.floats(1e6, 1e12),
)  # fmt: skip
def test_no_strategy_beats_its_work(ranks: int, T: int, P: int, lies: list[float], link: float) -> None:
    """At least the single work over the ranks, at most every rank's and all transfers in a row."""
    machine = msgspec.structs.replace(fast_links(MACHINE), link_bytes_s=link, attention_flops_s=((1, 4e11),))
    on = lies[:ranks] if any(lies[:ranks]) else None
    whole = single(fast_links(machine), S2, 1, T, P).ttft_s
    for done in (
        single(machine, S2, ranks, T, P, on),
        gather(machine, S2, ranks, T, P, on),
        gather(machine, S2, ranks, T, P, on, full=True),
        chain(machine, S2, [P + b for b in even(T, ranks)], P, on),
        ring_kv(machine, S2, ranks, T, P, on),
        ring_q(machine, S2, ranks, T, P, on),
    ):
        assert done.ttft_s * ranks >= 0.8 * whole
        assert len(done.wait_s) == len(done.bytes_sent) == ranks and min(done.wait_s) >= 0
        assert done.ttft_s <= sum(done.bytes_sent) / link + 4 * ranks * whole
        if ranks == 1:
            assert sum(done.bytes_sent) == 0


def test_deep_chain_comes_to_its_slowest_stage() -> None:
    """With many layers the time per layer is that of the slowest rank (KV-Runahead, arXiv 2405.05329)."""
    machine, bounds = fast_links(MACHINE), (0, 3000, 6000, 8192)
    times = LayerTimes(machine, S2)
    stages = []
    for left, right in pairwise(bounds):
        rows, before = right - left, [b for b in bounds if b <= left]
        pieces = [times.attend(rows, rows * (b - a), b - a) for a, b in pairwise(before)]
        own = times.attend(rows, rows * (rows + 1) // 2, rows)
        stages.append(times.qkv(rows) + own + sum(pieces) + times.rest(rows))
    deep = msgspec.structs.replace(S2, layers=400)
    assert chain(machine, deep, bounds).ttft_s / 400 == pytest.approx(max(stages), rel=0.01)


def test_chain_on_a_slow_link_waits_for_it() -> None:
    slow = msgspec.structs.replace(MACHINE, link_bytes_s=1e7)
    done = chain(slow, S2, (0, 4096, 8192))
    link = S2.layers * 4096 * S2.kv_bytes / 1e7
    assert link < done.ttft_s < 1.1 * link + 1 and done.wait_s[1] > 0.7 * link
    assert best_chain(slow, S2, 2, 8192)[1] < best_chain(MACHINE, S2, 2, 8192)[1]


def test_cached_tokens_count_where_they_lie() -> None:
    T, P = 512, 16384
    bounds = [P + b for b in even(T, 2)]
    spread, first, last = (chain(MACHINE, S2, bounds, P, on) for on in ((1, 1), (1, 0), (0, 1)))
    each = P * S2.kv_bytes * S2.layers
    handed = 256 * S2.kv_bytes * S2.layers
    assert spread.bytes_sent == (each / 2 + handed, each / 2)
    assert first.bytes_sent == (each + handed, 0)
    assert last.bytes_sent == (handed, each)


def test_searched_chain_against_the_gathers() -> None:
    """S2, 16k on two ranks of one core: the aims of the benchmark are within the model's reach."""
    chained = chain(MACHINE, S2, best_chain(MACHINE, S2, 2, 16384)).ttft_s
    assert single(MACHINE, S2, 2, 16384).ttft_s / chained > 1.85
    assert gather(MACHINE, S2, 2, 16384).ttft_s / chained > 1.2
    assert gather(MACHINE, S2, 2, 16384, full=True).ttft_s / chained > 1.4


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [S2, GQA], ids=["S2", "GQA"])
def test_predicted_partition_is_near_the_searched_one(ranks: int, shape: ModelShape) -> None:
    """KVR-P at 12k from 8k and 16k, within 1.5% of the model's own search."""
    entries = {tokens: fractions_of(best_chain(MACHINE, shape, ranks, tokens, unit=1)) for tokens in (8192, 16384)}
    predicted = chain(MACHINE, shape, cut(interpolate(entries, 12288), 12288, 0, 64)).ttft_s
    assert predicted / chain(MACHINE, shape, best_chain(MACHINE, shape, ranks, 12288)).ttft_s < 1.015


@pytest.mark.parametrize(("T", "depth"), [(1531, 8), (5003, 1), (5003, 2), (5003, 8), (9011, 40), (30000, 12)])
def test_model_optimum_is_one(T: int, depth: int) -> None:
    """Scaled from a neighbouring token count, no worse by 1% than any split of two ranks, a hundred tried."""
    P, on, shape = 4096, (3, 1), msgspec.structs.replace(S2, layers=depth)

    def seconds(split: int) -> float:
        return chain(MACHINE, shape, (P, P + split, P + T), P, on).ttft_s

    found = best_chain(MACHINE, shape, 2, T, P, on, unit=1)
    assert seconds(found[1] - P) < 1.01 * min(seconds(T * i // 100) for i in range(1, 100))


def test_balanced_stages_are_equal() -> None:
    """Without waits, each rank of the seed takes the same time but for one row's; of the last layer the projections."""
    machine = fast_links(MACHINE)
    times, bounds = LayerTimes(machine, S2), cut(balanced(machine, S2, 4, 8192), 8192)
    stages = []
    for left, right in pairwise(bounds):
        rows = right - left
        pairs = rows * left + rows * (rows + 1) // 2
        stages.append(times.qkv(rows) + (times.attend(rows, pairs, right) + times.rest(rows)) * 7 / 8)
    stages[-1] += times.copy(8192)
    assert max(stages) / min(stages) < 1.005
    assert balanced(machine, S2, 4, 3) == (0.25,) * 4


def test_the_last_layer_keeps_its_share_in_a_deep_model() -> None:
    """The fill and the last layer of few layers are those of many; the latter draws splits towards even ones."""
    deep = msgspec.structs.replace(S2, layers=60)
    for bounds in ((0, 9000, 16384), (0, 4000, 9000, 16384)):
        walked = chain(MACHINE, deep, bounds).ttft_s
        assert _seconds(MACHINE, deep, bounds, 0, None) == pytest.approx(walked, rel=2e-3)
    splits = [best_chain(MACHINE, msgspec.structs.replace(S2, layers=n), 2, 16384)[1] for n in (1, 2, 60)]
    assert splits[0] < splits[1] < splits[2]


def test_context_parallelism_table_5() -> None:
    """Attention 414 and 1,608 us, pass-KV transfers 627 and 631 us, at 2.5% and 10% of 128,000 on four hosts."""
    times = LayerTimes(H100, LLAMA_405B_TP8)
    for T, attention, transfer in ((3200, 414e-6, 627e-6), (12800, 1608e-6, 631e-6)):
        assert times.attend(T // 4, T // 4 * 32000, 32000) == pytest.approx(attention, rel=0.03)
        assert 32000 * LLAMA_405B_TP8.kv_bytes / H100.link_bytes_s == pytest.approx(transfer, rel=0.01)


def test_context_parallelism_table_4() -> None:
    """Pass-KV grows with the miss rate as measured: 11,096 ms from none to all (a fit), and a constant beside it."""
    model = (H100, LLAMA_405B_TP8, 4)
    predicted = {T: ring_kv(*model, T, 128_000 - T, full_last_layer=True).ttft_s for T, _, _ in TABLE_4}
    slope = (predicted[128_000] - predicted[12_800]) / 0.9
    assert slope == pytest.approx(11.096, rel=0.15)
    offsets = [kv / 1e3 - predicted[T] for T, kv, _ in TABLE_4]
    assert max(offsets) - min(offsets) < 1.2 and min(offsets) > 0.3


def test_profile_goes_to_json_and_back() -> None:
    assert msgspec.json.decode(msgspec.json.encode(MACHINE), type=Machine) == MACHINE


def test_rates() -> None:
    assert MACHINE.attention_rate(1) == 400e9 and MACHINE.attention_rate(16) == 400e9
    assert MACHINE.attention_rate(32) == pytest.approx(440e9)
    assert MACHINE.attention_rate(64) == MACHINE.attention_rate(10**6) == 480e9
    one = LayerTimes(MACHINE, S2).linear(1, 10**6)
    assert one == 2 * 10**6 / 25e9  # read-bound


@pytest.mark.parametrize(
    "wrong",
    [
        {"linear_flops_s": 0.0}, {"link_bytes_s": float("nan")}, {"latency_s": -1.0}, {"attention_flops_s": ()},
        {"attention_flops_s": ((64, 1.0), (16, 1.0))}, {"attention_flops_s": ((64, 0.0),)},
    ],
)  # fmt: skip
def test_bad_profiles(wrong: dict) -> None:
    with pytest.raises(ValueError, match="headrace tune"):
        Machine(**(msgspec.structs.asdict(MACHINE) | wrong))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="bounds must be"):
        chain(MACHINE, S2, (0, 5, 4))
    with pytest.raises(ValueError, match="bounds must be"):
        chain(MACHINE, S2, (0, 5, 9), P=64)
    with pytest.raises(ValueError, match="cached_on"):
        shares((1, 2, 3), 2)
    with pytest.raises(ValueError, match="heads"):
        msgspec.structs.replace(S2, heads=0)
    assert shares(None, 4) == shares((0, 0, 0, 0), 4) == (0.25,) * 4
