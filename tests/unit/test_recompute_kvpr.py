"""The paper's split against its own figures (KVPR, arXiv 2411.17089) and against trying every split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.offload.streaming.kvpr import DecodeSplit, Step, Stream, crossing, decode_split, kvpr_split, kvpr_time

OPT = Step(batch=32, tokens=1024, prompt=1024, hidden=4096, kv_width=4096, compute_s=312e12, link_s=32e9)
"""OPT-6.7B on an A100 behind PCIe 4.0."""


def test_the_papers_split() -> None:
    assert crossing(OPT) == pytest.approx(1024 / (1 + 2 * 4096 * 32e9 / (2 * 312e12)))
    assert kvpr_split(OPT) == 721
    assert kvpr_time(721, OPT) == pytest.approx(10.87e-3, rel=1e-3)
    assert kvpr_time(0, OPT) == pytest.approx(16.78e-3, rel=1e-3)
    row = replace(OPT, x_resident=True)
    assert kvpr_split(row) == 721
    assert kvpr_time(721, row) == pytest.approx(4.96e-3, rel=1e-3)


def test_split_grows_with_the_sequence() -> None:
    """Figure of appendix A.4: prompt 256, 32 generated tokens, 181 at first and about 203 at the end."""
    splits = [kvpr_split(replace(OPT, tokens=tokens, prompt=256)) for tokens in range(257, 289)]
    assert splits[0] == 181
    assert splits[-1] == 203
    assert splits == sorted(splits)


def test_never_above_the_prompt() -> None:
    assert kvpr_split(replace(OPT, tokens=1024, prompt=128)) == 128
    assert kvpr_split(replace(OPT, tokens=1024, prompt=0)) == 0
    assert kvpr_split(replace(OPT, tokens=1024, prompt=100), grain=64) == 64


@pytest.mark.parametrize("width", [2048, 1024, 512])
def test_wide_activations_are_not_sent(width: int) -> None:
    """Where X is as wide as K and V together or wider; with X at hand the crossing does not depend on that."""
    assert kvpr_split(replace(OPT, kv_width=width)) == 0
    assert kvpr_split(replace(OPT, kv_width=width, x_resident=True)) == 721
    assert kvpr_split(replace(OPT, kv_width=2049)) > 0


@pytest.mark.parametrize(
    "changes", [{"batch": 0}, {"link_s": 0.0}, {"compute_s": float("nan")}, {"prompt": 2000}, {"prompt": -1}]
)
def test_step_refuses(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(OPT, **changes)
    with pytest.raises(ValueError, match="grain"):
        kvpr_split(OPT, grain=0)


rates = st.floats(1e-3, 1e3)


@given(
    tokens=st.integers(1, 300),
    share=st.floats(0, 1),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    rate=rates,
    grain=st.sampled_from([1, 3, 64]),
    resident=st.booleans(),
)
def test_split_is_the_best(
    tokens: int, share: float, widths: tuple[int, int], rate: float, grain: int, resident: bool
) -> None:
    step = Step(
        batch=2, tokens=tokens, prompt=int(tokens * share), hidden=widths[0], kv_width=widths[1], compute_s=rate,
        link_s=1.0, x_resident=resident,
    )  # fmt: skip
    splits = range(0, step.prompt + 1, grain)
    found = kvpr_split(step, grain)
    assert found in splits
    assert kvpr_time(found, step) == min(kvpr_time(split, step) for split in splits)


def one(stream: Stream, projected: int, total: int) -> float:
    """T of KVPR, section 3.2, for one number, written out again."""
    x = 0.0 if stream.x_resident else projected * stream.x_bytes
    moved = stream.weight_bytes / stream.batches + x + (total - projected) * stream.kv_bytes + stream.hidden_bytes
    transfers = [stream.weight_bytes > 0, x > 0, projected < total, stream.hidden_bytes > 0]
    link = moved / stream.link_s + sum(transfers) * stream.latency_s
    compute = projected * stream.project_s + stream.compute_s + (moved + stream.out_bytes) * stream.cpu_s_per_byte
    out = stream.out_bytes / (stream.out_link_s or stream.link_s) + (stream.latency_s if stream.out_bytes else 0.0)
    return max(link, compute, out)


sizes = st.floats(0.01, 10)
streams = st.builds(
    Stream,
    kv_bytes=sizes,
    x_bytes=sizes,
    link_s=sizes,
    project_s=sizes,
    compute_s=st.just(0.0) | sizes,
    weight_bytes=st.just(0.0) | st.floats(1, 100),
    batches=st.integers(1, 4),
    hidden_bytes=st.just(0.0) | sizes,
    out_bytes=st.just(0.0) | sizes,
    latency_s=st.just(0.0) | sizes,
    cpu_s_per_byte=st.just(0.0) | sizes,
    x_resident=st.booleans(),
)
batches = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=0, max_size=5)


@given(streams, batches, st.booleans())
def test_decode_split_is_the_best(stream: Stream, pairs: list[tuple[int, int]], uniform: bool) -> None:
    chunks, stored = [max(pair) for pair in pairs], [min(pair) for pair in pairs]
    total = sum(chunks)
    found = decode_split(chunks, stored, stream, uniform=uniform)
    if uniform:
        tried = {sum(min(level, has) for has in stored) for level in range(max(stored, default=0) + 1)}
        level = max(found.projected, default=0)
        assert found.projected == tuple(min(level, has) for has in stored)
    else:
        tried = set(range(sum(stored) + 1))
        assert all(0 <= count <= has for count, has in zip(found.projected, stored, strict=True))
    assert sum(found.projected) in tried
    assert found.seconds == pytest.approx(one(stream, sum(found.projected), total))
    assert found.seconds == pytest.approx(min(one(stream, count, total) for count in tried))
    assert found.load_all_s == pytest.approx(one(stream, 0, total))


STREAM = Stream(kv_bytes=2.0, x_bytes=1.0, link_s=1.0, project_s=1.0)


def test_decode_split_spreads_evenly() -> None:
    found = decode_split([10, 10, 3], [10, 2, 3], STREAM)
    assert sum(found.projected) == 15
    assert found.projected == (10, 2, 3)
    short = decode_split([6, 6, 6], [6, 6, 6], replace(STREAM, project_s=4.0))
    assert sum(short.projected) == 7  # 7 * 4 against 7 + 11 * 2
    assert sorted(short.projected) == [2, 2, 3]
    assert "link" in short.reason


def test_weights_on_the_link_shift_the_split() -> None:
    """Weights that cross the same link make it the bottleneck: more is projected; slow other work: less."""
    plain = decode_split([40], [40], replace(STREAM, project_s=4.0))
    loaded = decode_split([40], [40], replace(STREAM, project_s=4.0, weight_bytes=100.0, batches=2))
    busy = decode_split([40], [40], replace(STREAM, project_s=4.0, compute_s=30.0))
    assert busy.projected < plain.projected < loaded.projected


def test_decode_split_of_wide_activations() -> None:
    assert decode_split([9], [9], replace(STREAM, x_bytes=2.0)).projected == (0,)
    assert decode_split([9], [9], replace(STREAM, x_bytes=2.0, x_resident=True)).projected == (6,)


def test_decode_split_of_nothing() -> None:
    assert decode_split([], [], STREAM) == DecodeSplit((), 0.0, 0.0, 0.0, 0.0, decode_split([], [], STREAM).reason)


def test_stream_refuses() -> None:
    with pytest.raises(ValueError, match="link_s"):
        replace(STREAM, link_s=0.0)
    with pytest.raises(ValueError, match="batches"):
        replace(STREAM, batches=0)
    with pytest.raises(ValueError, match="project_s"):
        replace(STREAM, project_s=-1.0)
    with pytest.raises(ValueError, match="stored"):
        decode_split([1], [2], STREAM)


def test_seconds_of_many_at_once() -> None:
    counts = np.arange(8)
    assert STREAM.seconds(counts, 7).tolist() == [one(STREAM, int(count), 7) for count in counts]
