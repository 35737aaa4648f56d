"""What streamed decoding tells of itself: bytes, tokens, schedules and waiting, of one rank and of several."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.ranked_streams import RankedStreams, answering
from headrace.offload.streaming_totals import StreamingTotals
from headrace.stats import EngineStats, StreamStats
from headrace.types import CHUNK
from tests.support.streamed_ranks import close, stores, streamed_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [(i * 37) % 1900 + 50 for i in range(4 * CHUNK)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STEPS = 4
"""The prompt's, and one for each token but the last."""


def streamed(**settings: Any) -> StreamStats:
    """Figures of an engine that has answered the prompt."""
    with LLM("tiny", dtype="bfloat16", kv_offloading_size=0.05, max_model_len=512, threads=1, **settings) as llm:
        llm.generate([PROMPT], PARAMS)
        (told,) = llm.engine.stats().stream.values()
    return told


def test_one_rank_that_loads() -> None:
    told = streamed(offload_schedule="row", kv_offload_activations="off")
    assert told.steps == {"row": STEPS} and told.projected_tokens == 0
    assert told.loaded_tokens == 4 * CHUNK + 2 * 5 * CHUNK, "whole chunks of each decode step, the begun one too"
    assert told.bytes_in and told.bytes_out and 0 < told.waited_s < told.seconds


def test_projected_tokens_and_weights() -> None:
    told = streamed(offload_schedule="auto", offload_x_resident=True, kv_link_gbps=0.01)
    assert told.projected_tokens > 0 and told.steps == {"row": STEPS}
    weights = streamed(offload_schedule="auto", weight_offload=True, kv_offload_activations="off")
    assert weights.steps == {"column": STEPS} and weights.bytes_in > told.bytes_in


def test_share_of_the_time_that_the_link_binds() -> None:
    assert StreamStats(seconds=4.0, waited_s=1.0).link_bound == 0.25
    assert StreamStats().link_bound == 0


@pytest.mark.parametrize("weights", [False, True])
def test_every_rank(weights: bool) -> None:
    llm = streamed_ranks(2, allowed=("ring-kv",), max_model_len=4096, weight_offload=weights, kv_link_gbps=0.5)
    llm.generate([PROMPT * 12], PARAMS)
    told = llm.engine.stats().stream
    assert list(told) == ["0", "1"]
    for rank, store in enumerate(stores(llm)):
        own = told[str(rank)]
        assert own.steps == {"row": STEPS} and own.bytes_in == store.totals.bytes_in and own.bytes_out
        assert own.loaded_tokens > 0 and 0 < own.waited_s < own.seconds
        kv = store.totals.loaded * store.store.chunk_bytes
        assert own.bytes_in > kv if weights else own.bytes_in == kv
    close(llm)


class Told:
    """In place of a store."""

    def __init__(self, **counted: Any) -> None:
        self.totals = StreamingTotals(**counted)

    def told(self) -> StreamStats:
        return self.totals.told("row", 2)


def test_ranks_in_other_processes_answer_later() -> None:
    asked: list[int] = []
    own, other = Told(steps=3, loaded=4), Told(steps=3, loaded=2, bytes_in=7)
    streams = RankedStreams({0: own}, [1], lambda rank, command: asked.append(rank))  # type: ignore[dict-item]
    assert streams.told()["1"] == StreamStats() and asked == [1]
    answering(other)(b"", lambda body: streams.heard(1, body))  # type: ignore[arg-type]
    told = streams.told()
    assert asked == [1], "not asked again at once"
    assert told == {"0": own.told(), "1": other.told()}
    assert told["0"].loaded_tokens == 2 * CHUNK and told["1"].bytes_in == 7
    with pytest.raises(ValueError):
        streams.heard(1, b"nonsense")


def test_counters_go_on_across_restarts() -> None:
    earlier = EngineStats(stream={"0": StreamStats(bytes_in=5, waited_s=0.5, seconds=1.0, steps={"row": 2})})
    own = EngineStats(stream={"0": StreamStats(bytes_in=6, seconds=1.0, steps={"row": 1, "column": 4})})
    (both,) = own.after(earlier).stream.values()
    assert both.bytes_in == 11 and both.link_bound == 0.25 and both.steps == {"row": 3, "column": 4}
