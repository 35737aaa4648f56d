"""Engines with rounded weights: the promise holds, answers stay right, settings are checked."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.assets import facts
from headrace.bench.peers import ENGINES
from headrace.cli import main
from headrace.config import EngineConfig, Quantization
from headrace.kernels import cpu, dispatch, ops, quantized
from headrace.models.decoder import load_decoder
from tests.support.checkpoints import FolderOf
from tests.support.traces import prompts_of, run, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SCHEMES: list[Quantization] = ["int8", "int4"]
ISAS = cpu.available_isas() if cpu.available() else ()


def engine(scheme: Quantization, model: str = "tiny", **settings: Any) -> LLM:
    return LLM(model, quantization=scheme, **{"dtype": "bfloat16", "kv_cache_tokens": 16_384, **settings})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_promise_holds(isa: str, scheme: Quantization) -> None:
    """Alone, in a batch, cached, in prefill chunks: the same bits of logits, on every instruction set."""
    before = cpu.isa()
    cpu.use_isa(isa)
    try:
        private = engine(scheme, enable_prefix_caching=False)
        prompts = prompts_of(private)[::3]
        alone = [run(private, [prompt], SHORT)[0] for prompt in prompts]
        shared = engine(scheme, max_batch_tokens=96)
        same(run(shared, prompts, SHORT), alone)
        same(run(shared, prompts, SHORT), alone)
        assert shared.engine.stats().tokens.cached > 1000, "nothing was cached"
        same(run(engine(scheme), prompts, SHORT), alone)
    finally:
        cpu.use_isa(before)


def documents(count: int) -> list[tuple[str, str]]:
    """Questions about seeded documents of 500 tokens with 8 facts each, and how the right answers begin."""
    rng = random.Random(2026)
    made = []
    for _ in range(count):
        text, known = facts.fact_document(rng, 8, 500)
        name, code = rng.choice(sorted(known.items()))
        made.append((f"{text} {facts.question(name)}", f" {code}."))
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_shipped_model_still_knows_its_facts(scheme: Quantization) -> None:
    asked = documents(8)
    llm = engine(scheme)
    outputs = llm.generate([prompt for prompt, _ in asked], SamplingParams(temperature=0.0, max_tokens=12))
    right = sum(output.text.startswith(answer) for output, (_, answer) in zip(outputs, asked, strict=True))
    assert right >= 7


@pytest.mark.parametrize("kind", ["llama_gqa", "opt", "falcon40"])
@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.06), ("int4", 0.6)])
def test_logits_stay_close(kind: str, scheme: Quantization, most: float, folder_of: FolderOf) -> None:
    """Bounds on |difference| / |logits| of random checkpoints, whose wide weights magnify every error."""
    tokens = list(range(10, 130))
    exact, rounded = (
        engine(q, str(folder_of(kind)), dtype="float32", kv_cache_tokens=256).logits(tokens) for q in ("none", scheme)
    )
    lost = float((rounded - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())
    assert 0.005 < lost < most


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.parametrize("kind", ["llama_bias", "opt350"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_stand_for_the_rounded_weights(kind: str, scheme: Quantization, folder_of: FolderOf) -> None:
    """The kernels on codes, against torch on the weights multiplied out, every layer and the head."""
    folder, tokens = str(folder_of(kind)), list(range(10, 130))
    ours = engine(scheme, folder, dtype="float32", kv_cache_tokens=256)
    with dispatch.force("torch"):
        plain = engine(scheme, folder, dtype="float32", kv_cache_tokens=256, attention_backend="reference")
        want = plain.logits(tokens)
    torch.testing.assert_close(ours.logits(tokens), want, rtol=1e-4, atol=1e-3)


def test_all_matrices_are_quantised_and_nothing_else(folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of("llama_tied"), "bfloat16", quantization="int8")
    names = ("qkv", "out", "up", "down")
    want = {f"layers.{i}.{name}.weight" for i in range(2) for name in names} | {"head.weight"}
    if cpu.available():
        assert all(isinstance(matrix, quantized.Quantized) for matrix in decoder.matrices.values())
    assert set(decoder.matrices) == want and not want & set(decoder.weights)
    exact = load_decoder(folder_of("llama_tied"), "bfloat16")
    every = torch.arange(exact.config.vocab_size)
    assert torch.equal(decoder.embed(every, every), exact.embed(every, every))


def test_a_router_is_not_rounded(folder_of: FolderOf) -> None:
    """It decides which experts a row meets."""
    folder = folder_of("qwen3_moe")
    rounded, exact = load_decoder(folder, "float32", quantization="int4"), load_decoder(folder, "float32")
    assert isinstance(rounded.matrices["layers.0.experts.7.down.weight"], type(rounded.matrices["head.weight"]))
    name, x = "layers.1.router.weight", torch.eye(128)
    assert torch.equal(ops.linear(x, rounded.matrices[name]), ops.linear(x, exact.matrices[name]))


def test_rounding_is_part_of_the_caches_identity() -> None:
    engines = [engine(scheme) for scheme in ("none", *SCHEMES)]
    assert len({llm.engine.cache.identity for llm in engines}) == 3
    assert [llm.capacity.quantization for llm in engines] == ["none", *SCHEMES]
    assert [[name for name in llm.capacity.kernels if name.startswith("linear")] for llm in engines] == [
        ["linear"],
        ["linear_int8"],
        ["linear_int4"],
    ]


def test_settings(monkeypatch: pytest.MonkeyPatch, folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="quantization must be one of none, int8, int4, w8a8, fp8_rowwise, got 'fp8'"):
        EngineConfig(quantization="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantization must be one of none, int8, int4"):
        load_decoder(folder_of("llama"), quantization="q4")  # type: ignore[arg-type]
    monkeypatch.setenv("HEADRACE_QUANTIZATION", "int8")
    assert LLM("tiny", kv_cache_tokens=640).config.model.quantization == "int8"
    assert ENGINES["headrace-int8"].options["quantization"] == "int8"


def test_a_weight_that_has_no_groups_is_named(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized.FORMATS["int4"], "inputs", 128)
    with pytest.raises(ValueError, match=r"layers\.0\.down\.weight: .*multiple of 128.*use int8"):
        load_decoder(folder_of("llama"), quantization="int4")


def test_command_line() -> None:
    for command in ("serve", "generate", "chat"):
        assert "--quantization" in CliRunner().invoke(main.app, [command, "--help"]).output
    refused = CliRunner().invoke(main.app, ["generate", "hi", "--quantization", "int5"])
    assert refused.exit_code == 2 and "int4" in refused.stderr
