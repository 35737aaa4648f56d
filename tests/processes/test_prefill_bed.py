"""Prefills on a bed of three ranks and the tiny model: their answers, their figures, their links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from headrace.bench.prefill import check_table, settings
from headrace.bench.prefill_links import Link
from headrace.bench.prefill_testbed import Bed, open_bed
from headrace.cli.tune import table_stamp
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.planner.choice import shards_for
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable
from headrace.strategies import OFFERED

KV_BYTES = 3 * 2 * 4 * 32 * 2
"""K and V of one token of the tiny model, in bf16: layers, two, heads, head size, bytes."""


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with open_bed(settings("tiny", 3, 4096, 1)) as opened:
        yield opened


def cut(bed: Bed, strategy: str, T: int, P: int = 0) -> Shards:
    return shards_for(strategy, bed.machine, bed.shape, bed.size, T, P, None)


@pytest.mark.parametrize(
    ("T", "P", "placement"), [(300, 0, "own"), (200, 2112, "own"), (200, 2112, "round"), (64, 128, "last")]
)
def test_every_prefill_gives_the_token_of_one_rank(bed: Bed, T: int, P: int, placement: Any) -> None:
    """So cached chunks hold what they should, wherever they were laid and by whom."""
    alone = bed.alone(T, P)
    expected = bed.logits
    assert alone.bytes_sent == (0,) and len(alone.wait_s) == 1
    for strategy in (*OFFERED, "gather-full"):
        bed.run(strategy, cut(bed, strategy, T, P), P, placement)
        assert torch.allclose(bed.logits, expected, atol=0.05, rtol=0.05), strategy
        assert bed.logits.argmax() == expected.argmax()


def test_figures_of_all_ranks_come_back(bed: Bed) -> None:
    hidden = 256 * 2
    run = bed.run("chain", Shards((0, 192, 512, 768), (0, 1, 2)))
    assert run.bytes_sent == (192 * KV_BYTES, 512 * KV_BYTES, hidden)
    assert len(run.wait_s) == 3 and run.wait_s[0] > 0
    gather = bed.run("gather", Shards((0, 256, 512, 768), (0, 1, 2)))
    assert gather.bytes_sent == (512 * KV_BYTES, 512 * KV_BYTES, 512 * KV_BYTES + hidden)


def test_relays_count_for_the_prefill_that_they_belong_to(bed: Bed) -> None:
    """Also those that a rank's threads send on when it has done itself."""
    bed.set_link(Link(0.05))
    ring = cut(bed, "ring-kv", 768)
    for _ in range(5):
        assert bed.run("ring-kv", ring).bytes_sent == (512 * KV_BYTES,) * 3
    bed.set_link(Link())


def test_a_limited_link_is_a_lower_bound(bed: Bed) -> None:
    rate = 0.004e9
    bed.set_link(Link(rate / 1e9, latency_s=0.02))
    run = bed.run("chain", Shards((0, 512, 1024, 1024), (0, 1, 2)))
    carried = run.bytes_sent[0]
    assert carried == 512 * KV_BYTES
    assert run.seconds >= carried / rate - carried / bed.machine.link_bytes_s + 0.02
    assert run.wait_s[1] > 0
    bed.set_link(Link())
    assert not isinstance(bed._rank.rank.transport, RateLimitedTransport)
    assert bed.run("chain", Shards((0, 512, 1024, 1024), (0, 1, 2))).bytes_sent[0] == carried


def test_what_does_not_fit_is_refused(bed: Bed) -> None:
    for bounds, P, message in (
        ((0, 2048, 4160), 0, "4160 tokens do not fit in the 4096"),
        ((100, 200, 300), 100, "cached must be a multiple of 64, got 100"),
        ((64, 64, 64), 64, "tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bed.run("chain", Shards(bounds, (0, 1)), P)


def test_a_table_of_another_link_is_used_on_the_bed_but_not_of_another_machine(bed: Bed) -> None:
    limited = table_stamp(bed, Link(0.1))
    assert limited.link.endswith(", limited to 0.1 GB/s")
    check_table(TunedTable(stamp=limited, machine=bed.machine), bed)
    foreign = msgspec.structs.replace(limited, machine="another processor, 1 cores, none")
    with pytest.raises(ValueError, match="machine: tuned for 'another processor"):
        check_table(TunedTable(stamp=foreign, machine=bed.machine), bed)
