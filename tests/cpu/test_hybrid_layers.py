"""Hybrid models whose layers are computed in C++ as a whole: the bits of single operations, alone and in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import Quantization
from headrace.engine.programs import InCpp
from headrace.engine.runner import Runner
from headrace.kernels import cpu, dispatch
from headrace.kernels.block import Blocks
from headrace.kernels.recurrent_step import StatesInCpp
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.layers import OneByOne
from tests.support.hybrid_checkpoints import Sequence, make_checkpoint, states_of
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import NaiveAttend, batch_of, naive
from tests.support.traces import Trace, run, same

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not cpu.available(), reason="there are no kernels")]
SHORT = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)


def words(count: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=g).tolist()


def both(folder: Path, quantization: Quantization = "none") -> tuple[Decoder, Decoder]:
    """By whole layers, and op by op."""
    fast = load_decoder(folder, "bfloat16", quantization=quantization)
    with dispatch.force("ops"):
        slow = load_decoder(folder, "bfloat16", quantization=quantization)
    assert isinstance(fast.layers, Blocks) and isinstance(slow.layers, OneByOne)
    return fast, slow


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        *((kind, "none") for kind in ("next", "next_uneven", "next_experts", "3_5_tied", "3_5_ends_recurrent")),
        *((kind, "none") for kind in ("lfm3", "lfm3_plain", "lfm2", "lfm2_four_inputs", "lfm2_experts")),
        *((kind, "none") for kind in ("granite", "granite_uneven", "granite_experts", "nemotron", "nemotron_experts")),
        *((kind, "none") for kind in ("falcon_h1", "falcon_h1_normed")),
        ("falcon_h1", "int4"),
        ("next", "int4"),
        ("next_experts", "w8a8"),
        ("lfm2", "int8"),
        ("lfm3", "int8"),
        ("granite", "int4"),
        ("nemotron_experts", "int8"),
    ],
)
def test_the_bits_of_single_operations(kind: str, quantization: Quantization, tmp_path: Path) -> None:
    """With as many rows as go through a layer together, and more."""
    fast, slow = both(make_checkpoint(kind, tmp_path), quantization)
    for count in (1, 70, 1030):
        got, want = (Sequence(each, NaiveAttend).logits(words(count)) for each in (fast, slow))
        assert want.isfinite().all() and want.std() > 0.1
        assert torch.equal(got, want), count


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_gates_that_do_not_fill_blocks(quantization: Quantization, tmp_path: Path) -> None:
    """The MLP's half that gates is multiplied where it is no part of the product, too."""
    fast, slow = both(make_checkpoint("falcon_h1", tmp_path, intermediate_size=96), quantization)
    for count in (1, 70):
        got, want = (Sequence(each, NaiveAttend).logits(words(count)) for each in (fast, slow))
        assert torch.equal(got, want), count


@pytest.mark.parametrize("kind", ["3_5", "3_5_ends_recurrent", "lfm3", "granite", "nemotron", "falcon_h1"])
def test_steps_in_one_call(kind: str, isa: str, tmp_path: Path) -> None:
    """The engine decodes by one call of C++ a step, and prefills by one for all layers but the last."""
    folder = make_checkpoint(kind, tmp_path)
    prompts = [words(n, n) for n in (5, 64, 130)]

    def traces() -> list[Trace]:
        llm = LLM(str(folder), dtype="bfloat16", kv_cache_tokens=2048, recurrent_states=8, max_batch_tokens=96)
        executor = llm.engine.loaded.executor
        assert isinstance(executor, Runner)
        assert isinstance(executor.decoding, InCpp) == isinstance(executor.decoder.layers, Blocks)
        return run(llm, prompts, SHORT)

    fast = traces()
    with dispatch.force("ops"):
        same(fast, traces())


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    decoder = load_decoder(make_checkpoint("3_5", tmp_path), "bfloat16")
    recur, spec = states_of(decoder), decoder.config.recurrent
    assert spec is not None
    StatesInCpp(spec, recur.states)
    recur.states[1].matrices.resize_(1, 1)
    with pytest.raises(ValueError, match="matrices must be"):
        StatesInCpp(spec, recur.states)
    with pytest.raises(ValueError, match="forward needs `recur`"):
        decoder.forward(batch_of([1], 0, 1), naive(decoder))
