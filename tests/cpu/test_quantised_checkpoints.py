"""Quantised checkpoints in safetensors: logits as transformers has them on the weights that formulas give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.kernels import cpu, dispatch
from headrace.kernels.formats import FORMATS as CODED
from headrace.kernels.quantized import Parts, Quantized
from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from headrace.models.quantised import Scheme, scheme_of
from headrace.models.quantised_layouts import coded
from headrace.models.slots import is_of_heads
from tests.support.gguf_files import theirs, tokens_of
from tests.support.hybrid_checkpoints import Sequence, build_model
from tests.support.naive_attention import prompt_logits
from tests.support.quantised_files import (
    COMPRESSED,
    FORMATS,
    NF4,
    awq,
    gptq,
    write,
)
from tests.support.traces import run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 1e-4
needs_kernels = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))


def test_numbers_of_nf4_are_bitsandbytes_in_bf16() -> None:
    assert torch.equal(torch.tensor(CODED["NF4"].codes.table), torch.tensor(NF4).bfloat16().float())


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


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        ([dict(type="float", num_bits=8, strategy="channel"), dict(type="float", num_bits=8, group_size=128)], "FP8"),
        ([dict(num_bits=8, strategy="channel"), dict(num_bits=8, strategy="group", group_size=64)], "int8"),
    ],
)
def test_groups_of_one_kind_are_one_scheme(groups: list[dict[str, Any]], want: str) -> None:
    """By rows, in blocks or in groups: scales say how."""
    form = "float-quantized" if want == "FP8" else "int-quantized"
    said = {"format": form, "config_groups": {str(n): {"weights": each} for n, each in enumerate(groups)}}
    assert scheme_of({"quantization_config": COMPRESSED | said}) == Scheme(want, "plain", 8)


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
        assert isinstance(up, Parts) == (name == "gptq act-order" or "mixed" in name)


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
        ("qwen3_moe", "gptq act-order"), ("qwen3_moe", "W8A8"), ("mixtral", "FP8 blocks"), ("qwen2", "mixed"),
        ("qwen3_moe", "ModelOpt NVFP4"),
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


def test_what_modelopt_says_beside_config_json(tmp_path: Path) -> None:
    """Older folders have a file of its own for it."""
    model = theirs("qwen2")
    folder, tokens = write(model, tmp_path / "m", "ModelOpt NVFP4"), tokens_of(150)
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    written = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": said["quant_algo"], "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(load_decoder(folder, "float32"), tokens) - want).abs().max() <= TOLERANCE
    assert read_config(folder) == plain_config(folder)


def test_experts_of_numbers_beside_experts_of_codes(tmp_path: Path) -> None:
    """One product takes all of a layer, also where the gates and ups of others go by two orders."""
    model = theirs("qwen3_moe", moe_intermediate_size=256)
    folder, tokens = write(model, tmp_path / "m", "gptq act-order"), tokens_of(150)
    tensors, expert = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts.0."
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(expert)}
    gates, ups = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][0].chunk(2)
    down = model.state_dict()["model.layers.0.mlp.experts.down_proj"][0]
    for part, matrix in (("gate_proj", gates), ("up_proj", ups), ("down_proj", down)):
        tensors[f"{expert}{part}.weight"] = matrix.contiguous()
    save_file(tensors, folder / "model.safetensors")
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(load_decoder(folder, "float32"), tokens) - want).abs().max() <= TOLERANCE
    assert len(LLM(str(folder), kv_cache_tokens=640).generate([tokens], SamplingParams(max_tokens=3))) == 1


def test_what_is_quantised_is_not_rounded_again(tmp_path: Path) -> None:
    folder = write(theirs("qwen2"), tmp_path / "m", "awq")
    with pytest.raises(ValueError, match=r"quantised already.*AWQ int4"):
        LLM(str(folder), quantization="int8", kv_cache_tokens=640)
