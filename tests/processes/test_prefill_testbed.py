"""Prefills on a testbed of three ranks and the tiny model: their answers, their figures, their links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from headrace.bench.prefill_grid import prefill_config
from headrace.bench.prefill_links import RankLink
from headrace.bench.prefill_testbed import PrefillTestbed, open_testbed
from headrace.bench.tune import table_stamp
from headrace.parallel.rate_limit import RateLimitedTransport
from headrace.planner.choice import shards_for
from headrace.planner.schedule import Shards
from headrace.planner.shards import Prefill
from headrace.planner.tuned_table import TunedTable
from headrace.strategies import OFFERED

pytestmark = pytest.mark.matrix  # what a benchmark stands on; the strategies themselves: tests/cpu/test_parallel.py

KV_BYTES = 3 * 2 * 4 * 32 * 2
"""K and V of one token of the tiny model, in bf16: layers, two, heads, head size, bytes."""


@pytest.fixture(scope="module")
def testbed() -> Iterator[PrefillTestbed]:
    with open_testbed(prefill_config("tiny", 3, 4096, 1)) as opened:
        yield opened


def cut(testbed: PrefillTestbed, strategy: str, T: int, P: int = 0) -> Shards:
    return shards_for(strategy, Prefill(testbed.machine, testbed.shape, testbed.size, T, P))


@pytest.mark.parametrize(
    ("T", "P", "placement"), [(300, 0, "own"), (200, 2112, "own"), (200, 2112, "round"), (64, 128, "last")]
)
def test_every_prefill_gives_the_token_of_one_rank(testbed: PrefillTestbed, T: int, P: int, placement: Any) -> None:
    """So cached chunks hold what they should, wherever they were laid and by whom."""
    alone = testbed.alone(T, P)
    expected = testbed.logits
    assert alone.bytes_sent == (0,) and len(alone.wait_s) == 1
    for strategy in (*OFFERED, "gather-full"):
        testbed.run(strategy, cut(testbed, strategy, T, P), P, placement)
        assert torch.allclose(testbed.logits, expected, atol=0.05, rtol=0.05), strategy
        assert testbed.logits.argmax() == expected.argmax()


def test_figures_of_all_ranks_come_back(testbed: PrefillTestbed) -> None:
    hidden = 256 * 2
    run = testbed.run("chain", Shards((0, 192, 512, 768), (0, 1, 2)))
    assert run.bytes_sent == (192 * KV_BYTES, 512 * KV_BYTES, hidden)
    assert len(run.wait_s) == 3 and run.wait_s[0] > 0
    gather = testbed.run("gather", Shards((0, 256, 512, 768), (0, 1, 2)))
    assert gather.bytes_sent == (512 * KV_BYTES, 512 * KV_BYTES, 512 * KV_BYTES + hidden)


def test_relays_count_for_the_prefill_that_they_belong_to(testbed: PrefillTestbed) -> None:
    """Also those that a rank's threads send on when it has done itself."""
    testbed.set_link(RankLink(0.05))
    ring = cut(testbed, "ring-kv", 768)
    for _ in range(5):
        assert testbed.run("ring-kv", ring).bytes_sent == (512 * KV_BYTES,) * 3
    testbed.set_link(RankLink())


def test_a_limited_link_is_a_lower_bound(testbed: PrefillTestbed) -> None:
    rate = 0.004e9
    testbed.set_link(RankLink(rate / 1e9, latency_s=0.02))
    run = testbed.run("chain", Shards((0, 512, 1024, 1024), (0, 1, 2)))
    carried = run.bytes_sent[0]
    assert carried == 512 * KV_BYTES
    assert run.seconds >= carried / rate - carried / testbed.machine.link_bytes_s + 0.02
    assert run.wait_s[1] > 0
    testbed.set_link(RankLink())
    assert not isinstance(testbed._rank.rank.transport, RateLimitedTransport)
    assert testbed.run("chain", Shards((0, 512, 1024, 1024), (0, 1, 2))).bytes_sent[0] == carried


def test_what_does_not_fit_is_refused(testbed: PrefillTestbed) -> None:
    for bounds, P, message in (
        ((0, 2048, 4160), 0, "4160 tokens do not fit in the 4096"),
        ((100, 200, 300), 100, "cached must be a multiple of 64, got 100"),
        ((64, 64, 64), 64, "tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            testbed.run("chain", Shards(bounds, (0, 1)), P)


def test_a_table_of_another_link_is_used_on_the_testbed_but_not_of_another_machine(testbed: PrefillTestbed) -> None:
    limited = table_stamp(testbed, RankLink(0.1))
    assert limited.link.endswith(", limited to 0.1 GB/s")
    testbed.check_table(TunedTable(stamp=limited, machine=testbed.machine))
    foreign = msgspec.structs.replace(limited, machine="another processor, 1 cores, none")
    with pytest.raises(ValueError, match="machine: tuned for 'another processor"):
        testbed.check_table(TunedTable(stamp=foreign, machine=testbed.machine))
