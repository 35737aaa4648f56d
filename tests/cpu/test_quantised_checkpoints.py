"""Quantised checkpoints in safetensors: logits as transformers has them on the weights that formulas give."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace import LLM, SamplingParams
from headrace.kernels import cpu, dispatch
from headrace.kernels.formats import FORMATS as CODED
from headrace.kernels.quantized import Parts, Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from headrace.models.quantised import Scheme
from headrace.models.quantised_layouts import coded
from headrace.models.slots import is_of_heads
from headrace.types import UnsupportedModel
from tests.support.gguf_files import theirs, tokens_of
from tests.support.hybrid_checkpoints import Sequence, build_model
from tests.support.naive_attention import prompt_logits
from tests.support.traces import run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
needs_kernels = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]
"""A module's tensors by the ends of their names, and the matrix [N, K] that they stand for by the format's formula."""


def words(codes: Tensor, bits: int) -> Tensor:
    """int32 [..., n * bits / 32] of codes [..., n], the first in the lowest bits."""
    whole = (codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
    return (whole - (whole >> 31 << 32)).int()


def drawn(weight: Tensor, bits: int, group: int, seed: int, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """codes [N, K], zero points [N, K / G] and fp16 scales [N, K / G] of a matrix about as wide as `weight`."""
    made = torch.Generator().manual_seed(seed)
    outputs, inputs = weight.shape
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=made)
    half = 1 << bits - 1
    zeros = torch.full((outputs, inputs // group), half)
    if not sym:
        zeros += torch.randint(-3, 4, zeros.shape, generator=made)
    scales = weight.std() / half * 1.7 * (0.5 + torch.rand(zeros.shape, generator=made))
    return codes, zeros, scales.half()


def gptq(
    weight: Tensor, seed: int, bits: int = 4, group: int = 32, sym: bool = False, act_order: bool = False
) -> Written:
    codes, zeros, scales = drawn(weight, bits, group, seed, sym)
    inputs = weight.shape[1]
    g_idx = torch.arange(inputs) // group
    if act_order:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed % 2))]
    tensors = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - 1).T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    return tensors, scales.float()[:, g_idx] * (codes - zeros[:, g_idx])


def awq(weight: Tensor, seed: int) -> Written:
    codes, zeros, scales = drawn(weight, 4, 64, seed, False)
    each = torch.arange(weight.shape[1]) // 64

    def by_outputs(values: Tensor) -> Tensor:
        """int32 [.., N / 8]: of eight outputs the nibbles hold 0 2 4 6 1 3 5 7."""
        return words(values.T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    tensors = {"qweight": by_outputs(codes), "qzeros": by_outputs(zeros), "scales": scales.T.contiguous()}
    return tensors, scales.float()[:, each] * (codes - zeros[:, each])


def packed(weight: Tensor, seed: int, bits: int = 4, sym: bool = True) -> Written:
    codes, zeros, scales = drawn(weight, bits, 128, seed, sym)
    each = torch.arange(weight.shape[1]) // 128
    tensors = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not sym:
        tensors["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
    return tensors, scales.bfloat16().float()[:, each] * (codes - zeros[:, each])


def int8(weight: Tensor, seed: int) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def fp8(weight: Tensor, seed: int) -> Written:
    scale = weight.abs().max() / 400
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}, codes.float() * scale


def fp8_blocks(weight: Tensor, seed: int) -> Written:
    blocks = -(-weight.shape[0] // 128), weight.shape[1] // 128
    scales = (0.5 + torch.rand(blocks, generator=torch.Generator().manual_seed(seed))) / 2000
    spread = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    codes = (weight / spread).clamp(-440, 440).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def weights_of(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **more}}}}


def w8a8(**more: Any) -> dict[str, Any]:
    """int8 of each output, and of each row as it passes, unless `more` of the activations says something else."""
    rows = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    groups = weights_of("int", 8, strategy="channel")
    groups["config_groups"]["group_0"]["input_activations"] = rows | more
    return COMPRESSED | {"format": "int-quantized"} | groups


COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor, int], Written]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq),
    "gptq symmetric": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128}, lambda w, s: gptq(w, s, group=128, sym=True)
    ),
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        lambda w, s: gptq(w, s, act_order=True),
    ),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 64}, lambda w, s: gptq(w, s, 8, 64)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "W4A16": (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4), packed),
    "W4A16 with zeros": (
        COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 4), lambda w, s: packed(w, s, sym=False)
    ),
    "W8A16": (COMPRESSED | {"format": "pack-quantized"} | weights_of("int", 8), lambda w, s: packed(w, s, 8)),
    "W8": (COMPRESSED | {"format": "int-quantized"} | weights_of("int", 8), int8),
    "W8A8, activations of one scale": (w8a8(strategy="tensor", dynamic=False), int8),
    "FP8": (COMPRESSED | {"format": "float-quantized"} | weights_of("float", 8), fp8),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
}  # fmt: skip


ROUNDED: tuple[dict[str, Any], Callable[[Tensor, int], Written]] = (w8a8(), int8)
"""The one whose activations are rounded."""
PROJECTION = re.compile(r"_proj|\.w[123]\.")
MIXTRALS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def published(model: PreTrainedModel, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter by the name that checkpoints have for it; of experts, which transformers fuses, each matrix."""
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    if parameter.dim() != 3 or ".experts." not in name:
        yield name, parameter
        return
    layer, _, fused = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    for expert, matrices in enumerate(parameter):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{layer}.{expert}.{MIXTRALS[part] if mixtral else part}.weight", matrix


def write(model: PreTrainedModel, folder: Path, name: str) -> Path:
    """The model's folder with all projections of its layers quantised, and in `model` what they stand for."""
    config, quantise = FORMATS.get(name, ROUNDED)
    folder.mkdir()
    fields = json.loads(model.config.to_json_string()) | {"quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": [type(model).__name__]}))
    tensors: Tensors = {}
    with torch.no_grad():
        corrections = [named for named in model.named_buffers() if named[0].endswith("e_score_correction_bias")]
        every = [*model.named_parameters(), *corrections]
        matrices = [each for named in every for each in published(model, *named)]
        for seed, (each, matrix) in enumerate(matrices):
            if not PROJECTION.search(each) or matrix.dim() == 1:
                tensors[each] = matrix.contiguous()
                continue
            stored, meant = quantise(matrix.detach(), seed)
            matrix.copy_(meant)
            tensors |= {f"{each.removesuffix('.weight')}.{end}": tensor for end, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = theirs("qwen2")
    folder = write(model, tmp_path / "m", name)
    decoder = load_decoder(folder, "float32")
    tokens = tokens_of(150)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(decoder, tokens) - want).abs().max() <= TOLERANCE
    if cpu.available():
        down = decoder.matrices["layers.0.down.weight"]
        assert isinstance(down, Quantized) and (down.order is not None) == (name == "gptq act-order")
    config = read_config(folder)
    assert config == plain_config(folder) and config.stored is not None and config.dtype == "bfloat16"


@pytest.mark.parametrize(("layout", "middle"), [("gptq", 0x77777777), ("awq", 0x88888888 - (1 << 32))])
def test_some_rows_have_the_format_of_all(layout: Literal["gptq", "awq"], middle: int) -> None:
    """A tensor rank's, whose zero points are by chance those of a symmetric matrix."""
    tensors, _ = (gptq if layout == "gptq" else awq)(torch.randn(64, 256), 1)
    tensors["qzeros"][:, :4] = middle
    scheme = Scheme("", layout, 4, zeros_less_one=layout == "gptq")
    whole, some = (coded(scheme, tensors, rows) for rows in (None, torch.arange(32)))
    assert some.format == whole.format == CODED["W4 zeros"].grouped(some.format.group, "fp16")
    assert some.smalls is not None and not some.smalls.any()
    assert torch.equal(some.dequantised(), whole.dequantised()[:32])


@pytest.mark.parametrize(("kind", "name"), [("next", "gptq"), ("3_5", "FP8")])
def test_logits_of_hybrids(kind: str, name: str, tmp_path: Path) -> None:
    """Rows of a matrix are taken from several places of the file: queries and their gates, and each key head's part."""
    model = build_model(kind)
    folder, tokens = write(model, tmp_path / "m", name), tokens_of(150)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (Sequence(load_decoder(folder, "float32")).logits(tokens) - want).abs().max() <= TOLERANCE
    assert read_config(folder) == plain_config(folder)


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(moe_intermediate_size=256),
    "mixtral": {},
    "olmoe": {},
    "glm4_moe": {},
    "minimax_m2": dict(intermediate_size=128),
}
OF_EXPERTS = [
    *(("qwen3_moe", name) for name in FORMATS), ("mixtral", "awq"), ("mixtral", "W4A16"), ("olmoe", "gptq"),
    ("glm4_moe", "FP8"), ("minimax_m2", "FP8 blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name"), OF_EXPERTS)
def test_logits_of_experts(family: str, name: str, tmp_path: Path) -> None:
    """Each expert's matrices are a module of their own; with act-order some of the gates and ups go by two orders."""
    model = theirs(family, **EXPERTS[family])
    folder, tokens = write(model, tmp_path / "m", name), tokens_of(150)
    decoder = load_decoder(folder, "float32")
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(decoder, tokens) - want).abs().max() <= TOLERANCE
    assert read_config(folder) == plain_config(folder)
    if cpu.available():
        up, down = (decoder.matrices[f"layers.1.experts.3.{part}.weight"] for part in ("up", "down"))
        assert isinstance(down, Quantized) and (down.order is not None) == (name == "gptq act-order")
        assert isinstance(up, Parts) == (name == "gptq act-order")


@pytest.mark.parametrize("name", ["FP8 blocks", "gptq"])
def test_logits_of_latent_attention(name: str, tmp_path: Path) -> None:
    """What heads make of latents is multiplied out; queries' rows and a latent's are taken in another order."""
    sizes = dict(moe_intermediate_size=256, kv_lora_rank=128, q_lora_rank=128, v_head_dim=64)
    model = theirs("deepseek_v3", **sizes, head_dim=16, num_key_value_heads=4)
    folder, tokens = write(model, tmp_path / "m", name), tokens_of(150)
    decoder = load_decoder(folder, "float32")
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(decoder, tokens) - want).abs().max() <= TOLERANCE
    assert read_config(folder) == plain_config(folder)
    if cpu.available():
        coded = {each for each, weight in decoder.matrices.items() if isinstance(weight, Quantized)}
        assert {f"layers.0.{each}.weight" for each in ("queries", "query_in", "latent", "out")} <= coded
        assert not any(is_of_heads(each) for each in coded)
        assert sum(is_of_heads(each) for each in decoder.matrices) == 2 * 4 * decoder.config.layers


def test_logits_of_a_hybrid_with_experts(tmp_path: Path) -> None:
    """And with a shared expert beside them."""
    model = build_model("next_experts")
    folder, tokens = write(model, tmp_path / "m", "gptq"), tokens_of(150)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (Sequence(load_decoder(folder, "float32")).logits(tokens) - want).abs().max() <= TOLERANCE


def rounded(x: Tensor) -> Tensor:
    """Rows to 127 steps of their own."""
    top = x.abs().amax(-1, keepdim=True)
    return (x * (127 / top)).round() * (top / 127)


@needs_kernels
def test_rounded_activations(tmp_path: Path) -> None:
    """As transformers' class makes them of the weights multiplied out and rows that are rounded before each product.

    Sums in another order round few numbers to the other side of a half, which is a step in the logits of that row and
    of those that attend to it: so prompts are short, and some may differ.
    """
    model = theirs("qwen2")
    folder, prompts = write(model, tmp_path / "m", "W8A8"), [tokens_of(2, seed=n) for n in range(40)]
    with torch.no_grad():
        exact = model(torch.tensor(prompts)).logits[:, -1]
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
        want = model(torch.tensor(prompts)).logits[:, -1]
    decoder, config = load_decoder(folder, "float32"), read_config(folder)
    off = torch.stack([prompt_logits(decoder, prompt)[-1] for prompt in prompts]) - want
    assert (off.abs().amax(-1) <= TOLERANCE).float().mean() > 0.75 and off.norm() < 0.5 * (exact - want).norm()
    assert config.stored is not None and config.stored.formats == ("W8A8",) and config == plain_config(folder)


@needs_kernels
def test_rounded_activations_of_experts(tmp_path: Path) -> None:
    """Rows are rounded, which changes logits by a little."""
    model = theirs("qwen3_moe", **EXPERTS["qwen3_moe"])
    folder, tokens = write(model, tmp_path / "m", "W8A8"), tokens_of(150)
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0]
    off = (prompt_logits(load_decoder(folder, "float32"), tokens) - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.05


def test_activations_without_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights alone are used, and a line says so."""
    model = theirs("qwen2")
    folder, tokens = write(model, tmp_path / "m", "W8A8"), tokens_of(150)
    with torch.no_grad():
        exact = model(torch.tensor([tokens])).logits[0]
    with dispatch.force("torch"), caplog.at_level("WARNING"):
        assert (prompt_logits(load_decoder(folder, "float32"), tokens) - exact).abs().max() <= TOLERANCE
    assert "W8A8: only the C++ kernels and a GPU round activations" in caplog.text


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "gptq act-order"), ("qwen2", "awq"), ("qwen2", "FP8 blocks"), ("qwen2", "W8A8"),
        ("qwen3_moe", "gptq act-order"), ("qwen3_moe", "W8A8"), ("mixtral", "FP8 blocks"),
    ],
)  # fmt: skip
def test_the_promise_holds(family: str, name: str, tmp_path: Path) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits."""
    folder = str(write(theirs(family, **EXPERTS.get(family, {})), tmp_path / "m", name))
    prompts = [tokens_of(200 + 31 * i, seed=i // 2) for i in range(4)]
    short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = LLM(folder, enable_prefix_caching=False, kv_cache_tokens=4096)
    want = [run(alone, [prompt], short)[0] for prompt in prompts]
    shared = LLM(folder, max_batch_tokens=96, kv_cache_tokens=4096)
    for _ in range(2):
        same(run(shared, prompts, short), want)
    assert shared.engine.stats().tokens.cached > 300, "nothing was cached"


def test_what_is_quantised_is_not_rounded_again(tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", "awq")
    with pytest.raises(ValueError, match=r"quantised already.*AWQ int4"):
        LLM(str(folder), quantization="int8", kv_cache_tokens=640)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": 4}, "quant_method None is not supported; supported: gptq"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"} | weights_of("float", 4), "nvfp4"),
        (COMPRESSED | {"format": "pack-quantized", "config_groups": 3}, "config_groups"),
        ([], "must be an object"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(config: Any, words: str, tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", "awq")
    told = json.loads((folder / "config.json").read_text()) | {"quantization_config": config or [1]}
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedModel, match=words):
        read_config(folder)
