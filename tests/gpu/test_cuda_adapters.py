"""Adapters (LoRA) on a GPU: what they add is near its definition, a row has the same bits whatever rows ride along, and
engines give each prompt's bits alone, in every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from tests.support.adapters import with_adapter, write_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, flush, forced, watched
from tests.support.small_gpu_engines import launched
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAMES = ["all", "some", "late", ""]
INVOCATION = [5, 6, 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ROWS = 5000
"""More than one launch arranges."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [32, 96])
def test_what_they_add(rank: int, dtype: torch.dtype) -> None:
    """Of three, the second of which has nothing for the matrix."""
    from headrace.kernels.triton import adapted

    torch.manual_seed(1)
    drawn = [(torch.randn(rank, 1152) / 34, torch.randn(200, rank) / rank**0.5) for _ in range(3)]
    there = [(down.to("cuda", dtype), up.to("cuda", dtype)) for down, up in drawn]
    pairs = adapted.GpuPairs([there[0], None, there[2]])
    x, made = torch.randn(ROWS, 1152, device="cuda").to(dtype), torch.randn(ROWS, 200, device="cuda").to(dtype)
    numbers = torch.randint(-1, 3, (ROWS,))

    def added(rows: Tensor) -> Tensor:
        return pairs.added(adapted.arranged(numbers[rows].cuda(), 3), x[rows.cuda()], made[rows.cuda()].clone())

    every = added(torch.arange(ROWS))
    plain = ((numbers < 0) | (numbers == 1)).cuda()
    assert torch.equal(every[plain], made[plain])
    for number in (0, 2):
        mine = (numbers == number).cuda()
        down, up = there[number]
        truth = made[mine].double() + x[mine].double() @ down.double().T @ up.double().T
        assert (every[mine] - truth).abs().max() <= (2**-5 if dtype == torch.bfloat16 else 1e-4)
    for rows in (torch.tensor([7]), torch.arange(40), torch.arange(3, ROWS, 11), torch.randperm(4096)):
        assert torch.equal(added(rows), every[rows.cuda()])


@pytest.fixture(scope="module", params=["llama_bias", "granite_moe_shared"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("adapted"))
    model = AutoModelForCausalLM.from_pretrained(path)
    write_adapter(path / "all", model, seed=1)
    write_adapter(path / "some", model, r".*(q|v)_proj", rank=40, seed=2)
    write_adapter(path / "late", model, seed=3, alora_invocation_tokens=INVOCATION)
    return path


def engine(folder: Path, **more: Any) -> LLM:
    modules = ",".join(f"{name}={folder / name}" for name in NAMES if name)
    given = dict(dtype="bfloat16", kv_cache_tokens=8192, max_sequences=4, attention_backend="triton")
    return LLM(str(folder), lora_modules=modules, **given | more)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


def prompts() -> list[list[int]]:
    tokens = torch.randint(10, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    return [tokens[:300], tokens[:150] + tokens[300:360], [*tokens[:200], *INVOCATION, *tokens[200:230]], tokens[:5]]


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    """Each prompt alone on an empty cache, launched."""
    return [launched(llm, [prompt], PARAMS, name)[0] for prompt, name in zip(prompts(), NAMES, strict=True)]


def test_a_batch_that_is_replayed(llm: LLM, truth: list[Trace]) -> None:
    before = llm.engine.stats().graphs.replayed
    same(run(llm, prompts(), PARAMS, NAMES), truth)
    assert llm.engine.stats().graphs.replayed > before
    same(run(llm, prompts(), PARAMS, NAMES), truth)


@pytest.mark.parametrize("settings", [dict(max_batch_tokens=96), dict(async_scheduling=False), dict(max_sequences=2)])
def test_slices_and_sequences_that_wait(settings: dict[str, Any], folder: Path, truth: list[Trace]) -> None:
    same(run(engine(folder, **settings), prompts(), PARAMS, NAMES), truth)


@pytest.mark.parametrize("mix", ["load", "project"])
def test_restored_from_the_host_tier(mix: str, folder: Path, truth: list[Trace]) -> None:
    llm = engine(folder, kv_offloading_size=0.05, kv_offload_activations="on")
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    same(watched(llm, prompts(), PARAMS, NAMES), truth)
    flush(llm)
    same(watched(llm, prompts(), PARAMS, NAMES), truth)
    llm.close()


@pytest.mark.parametrize("name", ["all", "some"])
def test_logits_are_those_of_the_adapter_multiplied_in(name: str, folder: Path) -> None:
    """In fp32."""
    tokens, traced = prompts()[0][:100], engine(folder, dtype="float32")
    [trace] = run(traced, [tokens], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), name)
    merged = with_adapter(AutoModelForCausalLM.from_pretrained(folder), folder / name)
    with torch.no_grad():
        expected = merged(torch.tensor([tokens])).logits[0, -1]
    ours = trace[len(tokens) - 1].cpu()
    assert (ours - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()) / 4)
