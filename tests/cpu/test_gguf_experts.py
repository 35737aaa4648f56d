"""Models with experts from GGUF files: logits as transformers has them on the same weights, the promise, and lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.kernels import cpu, dispatch
from headrace.kernels.quantized import Parts, Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.gguf.header import GgufFile
from headrace.models.plain_config import plain_config
from headrace.models.sizes import weight_bytes
from headrace.types import UnsupportedModel
from tests.support.gguf_files import KindOf, q4_k_m, theirs, tokens_of, write_gguf
from tests.support.naive_attention import prompt_logits
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q2_K", "IQ4_XS",
    "IQ3_XXS", "IQ1_M", "NVFP4", "TQ2_0",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", dict(moe_intermediate_size=256)),
    "qwen3_moe, shares as they are": ("qwen3_moe", dict(moe_intermediate_size=256, norm_topk_prob=False)),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "olmoe, shares normalised": ("olmoe", dict(norm_topk_prob=True)),
}
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
needs_kernels = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))


def built(family: str = "qwen3_moe") -> PreTrainedModel:
    name, more = FAMILIES[family]
    return theirs(name, **more)


def mixed(name: str) -> Kind:
    """As q4_k_m, with routers in numbers and some of the experts' last matrices in six bits."""
    if "gate_inp" in name:
        return Kind.F32
    return Kind.Q6_K if name == "blk.0.ffn_down_exps.weight" else q4_k_m(name)


def sprinkled(name: str) -> Kind:
    """Experts of a layer in several types, some of them unlike in gate and up."""
    if "ffn_" not in name or "gate_inp" in name:
        return mixed(name)
    expert = int(name.split(".")[3])
    by_part = {"ffn_gate": (Kind.Q4_K, Kind.Q4_K, Kind.Q5_K, Kind.F16), "ffn_up": (Kind.Q4_K, Kind.Q6_K)}
    each = by_part.get(name.split(".")[2], (Kind.Q6_K, Kind.Q8_0, Kind.BF16))
    return each[expert % len(each)]


@torch.no_grad()
def difference(model: PreTrainedModel, path: Path) -> float:
    """The greatest difference of fp32 logits over 150 positions."""
    tokens = tokens_of(150)
    ours = prompt_logits(load_decoder(path, "float32"), tokens)
    return float((ours - model(torch.tensor([tokens])).logits[0]).abs().max())


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name: str, tmp_path: Path) -> None:
    model = built()
    path = write_gguf(model, tmp_path / "m.gguf", lambda tensor: Kind.F32 if "gate_inp" in tensor else Kind[name])
    assert difference(model, path) <= TOLERANCE
    assert read_config(path) == plain_config(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    model = built(family)
    assert difference(model, write_gguf(model, tmp_path / "m.gguf", mixed)) <= TOLERANCE


@pytest.mark.parametrize("kind_of", [q4_k_m, sprinkled], ids=["as one", "in several types"])
def test_a_tensor_for_each_expert(kind_of: KindOf, tmp_path: Path) -> None:
    """As older files have them."""
    model = built("mixtral")
    path = write_gguf(model, tmp_path / "m.gguf", kind_of, apart=True)
    assert difference(model, path) <= TOLERANCE
    with dispatch.force("torch"):
        assert difference(model, path) <= TOLERANCE
    if cpu.available() and kind_of is sprinkled:
        matrices = load_decoder(path).matrices
        ups = [matrices[f"layers.0.experts.{e}.up.weight"] for e in range(4)]
        assert [type(up) for up in ups] == [Quantized, Parts, Parts, Parts]
        assert not any(isinstance(up, Quantized) and up.gated for up in ups)


@needs_kernels
def test_memory_is_the_files(tmp_path: Path) -> None:
    """Experts stay in the file's bits."""
    path = write_gguf(built(), tmp_path / "m.gguf", lambda name: Kind.F32 if "gate_inp" in name else Kind.Q8_0)
    decoder, sizes = load_decoder(path), {name: info.size for name, info in GgufFile(path).tensors.items()}
    held = [w for name, w in decoder.matrices.items() if ".experts." in name]
    assert sum(w.nbytes for w in held) == sum(size for name, size in sizes.items() if "_exps" in name)
    assert weight_bytes(decoder.config, "bfloat16") <= path.stat().st_size


@needs_kernels
@pytest.mark.parametrize("kind_of", [mixed, sprinkled], ids=["", "sprinkled"])
def test_the_promise_holds(isa: str, kind_of: KindOf, tmp_path: Path) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits, on every instruction set."""
    apart = kind_of is sprinkled
    path = str(write_gguf(built("mixtral" if apart else "qwen3_moe"), tmp_path / "m.gguf", kind_of, apart=apart))
    prompts = [tokens_of(150 + 31 * i, seed=i // 2) for i in range(4)]
    sizes = dict(dtype="bfloat16", kv_cache_tokens=4096)
    private = LLM(path, enable_prefix_caching=False, **sizes)
    alone = [run(private, [prompt], SHORT)[0] for prompt in prompts]
    shared = LLM(path, max_batch_tokens=96, **sizes)
    for _ in range(2):
        same(run(shared, prompts, SHORT), alone)
    assert shared.engine.stats().tokens.cached > 200, "nothing was cached"
    with dispatch.force("ops"):
        same(run(LLM(path, **sizes), prompts, SHORT), alone)


def test_outside_and_over_ranks(tmp_path: Path) -> None:
    """Weights outside, and two context ranks of two tensor ranks, whose borders cut no scale: the bits of one."""
    path = str(write_gguf(built(), tmp_path / "m.gguf", mixed))
    prompts = [tokens_of(100 + 31 * i, seed=i) for i in range(2)]
    want = run(LLM(path, kv_cache_tokens=1024), prompts, SHORT)
    outside = dict(offload_schedule="row", weight_offload=True, kv_offloading_size=0.01)
    same(run(LLM(path, **outside), prompts, SHORT), want)
    ranks = dict(context_parallel_size=2, tensor_parallel_size=2, prefill_strategy="chain", threads=1)
    with ranks_as_threads(), LLM(path, kv_cache_tokens=1024, **ranks) as llm:
        same(run(llm, prompts, SHORT), want)


LIES: dict[str, tuple[dict[str, int], str]] = {
    "more experts than there are": ({"expert_count": 9}, r"shape \[8, .*9 experts are expected"),
    "as many as nobody has": ({"expert_count": 2**31}, "num_experts"),
    "none": ({"expert_count": 0}, "num_experts_per_tok 3 is not supported with 0 experts"),
    "more chosen than there are": (
        {"expert_used_count": 9},
        "expert_used_count 9 is more than qwen3moe.expert_count 8",
    ),
    "another width": ({"expert_feed_forward_length": 128}, r"where \[128, 256\] is expected"),
    "another function": ({"expert_gating_func": 2}, "expert_gating_func 2 is not supported"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie: str, tmp_path: Path) -> None:
    """Each is one error that names the file."""
    claims, words = LIES[lie]
    claims = {f"qwen3moe.{key}": value for key, value in claims.items()}
    path = write_gguf(built(), tmp_path / "m.gguf", lambda _: Kind.Q8_0, claims=claims)
    with pytest.raises((ValueError, UnsupportedModel), match=words) as refused:
        load_decoder(path)
    assert str(path) in str(refused.value)


def test_experts_where_none_are_told(tmp_path: Path) -> None:
    path = write_gguf(built("mixtral"), tmp_path / "m.gguf", lambda _: Kind.Q8_0, claims={"llama.expert_count": 0})
    with pytest.raises(ValueError, match=r"m\.gguf: .*lacks model\.layers\.0\.mlp"):
        load_decoder(path)
