"""Models from GGUF files: logits as transformers has them on the same weights, and the promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.kernels import cpu, dispatch
from headrace.kernels.quantized import Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.gguf import types
from headrace.models.gguf.header import GgufFile
from headrace.models.plain_config import plain_config
from headrace.models.shards import Share
from headrace.models.weights import StoredMatrix, load_weights
from tests.support.gguf_files import q4_k_m, theirs, tokens_of, write_gguf
from tests.support.naive_attention import prompt_logits
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import prompts_of, run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
TYPES = tuple(each.name for each in types.TYPES.values())
FAMILIES = (
    "llama", "llama_tied", "llama_bias", "llama_linear", "llama3", "llama_yarn", "mistral_window", "qwen2", "qwen3"
)  # fmt: skip
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@torch.no_grad()
def difference(model: PreTrainedModel, path: Path) -> float:
    """The greatest difference of fp32 logits over 150 positions."""
    tokens = tokens_of(150)
    ours = prompt_logits(load_decoder(path, "float32"), tokens)
    return float((ours - model(torch.tensor([tokens])).logits[0]).abs().max())


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name: str, tmp_path: Path) -> None:
    model = theirs()
    path = write_gguf(model, tmp_path / "m.gguf", lambda _: Kind[name])
    assert difference(model, path) <= TOLERANCE
    config = read_config(path)
    assert config == plain_config(path)
    assert config.dtype == {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")
    assert (config.stored.formats if config.stored else ()) == (() if name in ("F32", "F16", "BF16") else (name,))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Of several types each, so that q, k and v of a layer are no one weight."""
    model = theirs(family)
    tied = bool(model.config.tie_word_embeddings)
    path = write_gguf(model, tmp_path / "m.gguf", q4_k_m, tied=tied)
    assert difference(model, path) <= TOLERANCE


def test_without_kernels(tmp_path: Path) -> None:
    model = theirs()
    path = write_gguf(model, tmp_path / "m.gguf", q4_k_m)
    with dispatch.force("torch"):
        assert difference(model, path) <= TOLERANCE


def test_a_model_in_parts(tmp_path: Path) -> None:
    """Whichever of them is named; and one that is missing is named."""
    model = theirs()
    first = write_gguf(model, tmp_path / "m.gguf", q4_k_m, parts=3)
    second = first.with_name("m-00002-of-00003.gguf")
    assert difference(model, first) <= TOLERANCE
    tokens = tokens_of(9)
    for place in (first, second, tmp_path):
        assert LLM(str(place), kv_cache_tokens=640).logits(tokens).shape == (9, 320)
    second.unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf is missing"):
        LLM(str(first), kv_cache_tokens=640)


@pytest.mark.parametrize("isa", cpu.available_isas() if cpu.available() else ())
def test_the_promise_holds(isa: str, tmp_path: Path) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits, on every instruction set."""
    path = str(write_gguf(theirs("qwen3"), tmp_path / "m.gguf", q4_k_m))
    before = cpu.isa()
    cpu.use_isa(isa)
    try:
        prompts = [tokens_of(200 + 31 * i, seed=i // 2) for i in range(4)]
        sizes = dict(dtype="bfloat16", kv_cache_tokens=4096)
        private = LLM(path, enable_prefix_caching=False, **sizes)
        alone = [run(private, [prompt], SHORT)[0] for prompt in prompts]
        shared = LLM(path, max_batch_tokens=96, **sizes)
        same(run(shared, prompts, SHORT), alone)
        same(run(shared, prompts, SHORT), alone)
        assert shared.engine.stats().tokens.cached > 300, "nothing was cached"
        same(run(LLM(path, **sizes), prompts, SHORT), alone)
    finally:
        cpu.use_isa(before)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_tensor_ranks(ranks: int, tmp_path: Path) -> None:
    """Each has its rows of the file's, whose scales no border cuts."""
    path = write_gguf(theirs(num_key_value_heads=4), tmp_path / "m.gguf", q4_k_m)
    config = read_config(path)
    whole: dict[str, StoredMatrix] = {}
    load_weights(path, config, torch.float32, stored=whole)
    for rank in range(ranks):
        share, own = Share(config, rank, ranks), dict[str, StoredMatrix]()
        load_weights(path, config, torch.float32, share=share, stored=own)
        assert set(own) == {name for name in whole if share.holds(name)}
        for name, matrix in own.items():
            rows, every = share.rows(name), whole[name].numbers(torch.float32)
            want = every if rows is None else torch.cat([every[part.start : part.stop] for part in rows])
            assert torch.equal(matrix.numbers(torch.float32), want) and matrix.shape == want.shape


@pytest.mark.parametrize("schedule", ["row", "column"])
def test_weights_outside(schedule: str, tmp_path: Path) -> None:
    """Layers that stream, their q, k and v in several formats, have the bits of those in memory."""
    path = str(write_gguf(theirs(), tmp_path / "m.gguf", q4_k_m))
    prompts = [tokens_of(100 + 31 * i, seed=i) for i in range(2)]
    resident = run(LLM(path, kv_cache_tokens=1024), prompts, SHORT)
    streamed = LLM(path, offload_schedule=schedule, weight_offload=True, kv_offloading_size=0.01)
    same(run(streamed, prompts, SHORT), resident)


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "IQ3_S", "IQ2_XXS", "IQ1_M"])
def test_memory_is_reckoned(name: str, tmp_path: Path) -> None:
    """Before it is taken: codes of few bits and codebooks take more of it than of the file."""
    path = write_gguf(theirs(), tmp_path / "m.gguf", lambda _: Kind[name])
    decoder = load_decoder(path, "bfloat16")
    tensors = GgufFile(path).tensors.values()
    numbers = sum(info.size for info in tensors if info.type.plain)
    stored = decoder.config.stored
    assert stored is not None and all(isinstance(each, Quantized) for each in decoder.matrices.values())
    held = sum(each.nbytes for each in (*decoder.matrices.values(), decoder.tables["embed.weight"]))
    assert stored.bytes - numbers == held
    assert stored.bytes > sum(info.size for info in tensors if info.name != "token_embd.weight")


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    path = write_gguf(theirs(), tmp_path / "m.gguf", lambda _: Kind.Q8_0)
    info = GgufFile(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[info.begin : info.begin + 2] = b"\x00\x7e"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.gguf: model\.layers\.1\.mlp\.up_proj\.weight: a scale is NaN"):
        load_decoder(path)


@pytest.mark.parametrize("strategy", ["chain", "ring-kv"])
def test_over_ranks(strategy: str, tmp_path: Path) -> None:
    """Two context ranks of two tensor ranks: their shares are of the codes as they are stored."""
    path = str(write_gguf(theirs(), tmp_path / "m.gguf", q4_k_m))
    with LLM(path, dtype="bfloat16", kv_cache_tokens=4096) as llm:
        prompts = [each for each in prompts_of(llm) if len(each) < 400][:3]
        truth = run(llm, prompts, SHORT)
    ranks = dict(context_parallel_size=2, tensor_parallel_size=2, prefill_strategy=strategy, threads=1)
    with ranks_as_threads(), LLM(path, dtype="bfloat16", kv_cache_tokens=4096, **ranks) as llm:
        same(run(llm, prompts, SHORT), truth)
        assert llm.engine.stats().ranks.prefills.get(strategy)
