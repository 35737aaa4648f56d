"""Latent attention on a GPU, compiled: attention and products by head at DeepSeek's sizes, and engines near
transformers whose every schedule has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.kernels import latents
from headrace.kernels.triton import backend
from headrace.models.layer_parts import LatentSpec
from tests.support.attention_testbed import TREES, PoolTestbed, ends
from tests.support.checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, answer, flush, forced
from tests.support.small_gpu_engines import force, launched
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PUBLISHED: dict[str, Any] = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts() -> list[list[int]]:
    tokens = torch.randint(0, VOCAB, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    return [tokens[:300], tokens[:150] + tokens[300:360], tokens[200:264], tokens[5:10]]


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"dtype": "bfloat16", "kv_cache_tokens": 8192, "max_sequences": 4, **settings}
    return LLM(str(folder), attention_backend="triton", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("latents"), **PUBLISHED)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[Trace]:
    """Each prompt alone on an empty cache, launched."""
    return [launched(llm, [prompt], PARAMS)[0] for prompt in prompts()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [128, 16, 20], ids=str)
def test_attention_is_that_of_plain_torch(heads: int, dtype: torch.dtype) -> None:
    """V3's heads, V2-Lite's and GLM-4.7-Flash's."""
    from headrace.kernels.triton import layer_check
    from headrace.kernels.triton.walk_options import heads_of

    place = torch.device("cuda", 0)
    each = heads_of((heads, 1, 576), True, place)
    layer_check.check(layer_check.Variant(each, dtype, dtype, None, None, False, 192**-0.5), place)


@pytest.mark.parametrize("tree", ["shared", "none", "few"])
@pytest.mark.parametrize(
    ("shape", "portable"), [((16, 1, 576), False), ((16, 1, 576), True), ((32, 1, 320), False), ((3, 1, 80), True)],
    ids=str,
)  # fmt: skip
def test_both_ways_the_same_bits(
    shape: tuple[int, int, int], portable: bool, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels that are used on this device, and by the portable ones."""
    if portable:
        monkeypatch.setattr("headrace.kernels.triton.hopper.present", lambda place: False)
    testbed, found = PoolTestbed(TREES[tree], shape, torch.bfloat16, apart=False, once=True), []
    for way in ("flash", "split"):
        with pytest.MonkeyPatch.context() as patch:
            force(way, patch)
            found += [testbed.attend(ends(testbed, count), backend, "cuda") for count in (1, 40)]
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(128, 1, 576), (20, 1, 576), (32, 1, 320)], ids=str)
def test_the_kernel_for_hopper_is_used(shape: tuple[int, int, int]) -> None:
    """Both of its ways have the same bits on this device, near the portable kernels'."""
    from headrace.kernels.triton import attention, hopper
    from headrace.kernels.triton.hopper_agreement import Ways
    from headrace.kernels.triton.walk_options import heads_of

    place = torch.device("cuda", 0)
    if not hopper.present(place):
        pytest.skip("needs a Hopper GPU")
    for dtype in (torch.bfloat16, torch.float16):
        assert attention.agreed(heads_of(shape, True, place), dtype, place) == Ways(flash=True, split=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_around_attention(dtype: torch.dtype) -> None:
    """GLM-4.7-Flash's heads: those of a CPU, and of 70 rows the bits that each has alone."""
    spec, generator, heads = (
        LatentSpec(rank=512, rotated=64, plain=192, value=256),
        torch.Generator().manual_seed(1),
        20,
    )

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    given = numbers(70, heads, 256), numbers(70, 576), numbers(70, heads, 576), numbers(heads * 448, 512) / 16
    turns, norm = torch.randn(70, 64, generator=generator), numbers(512)
    parts = [rows.split((192, 256)) for rows in given[3].split(448)]
    of_heads = latents.OfHeads([keys.t().contiguous() for keys, _ in parts], [each for _, each in parts])
    theirs = [
        latents.queries(given[0], turns, spec, of_heads),
        latents.keys(given[1], norm, turns, spec, on_gpu=False),
        latents.values(given[2], spec, of_heads),
    ]

    def ours(rows: slice) -> list[Tensor]:
        whole = latents.OfHeads((), (), given[3].cuda())
        return [
            latents.queries(given[0][rows].cuda(), turns[rows].cuda(), spec, whole),
            latents.keys(given[1][rows].cuda(), norm.cuda(), turns[rows].cuda(), spec, on_gpu=True),
            latents.values(given[2][rows].cuda(), spec, whole),
        ]

    together = ours(slice(0, 70))
    for one, other in zip(together, theirs, strict=True):
        assert (one.cpu().float() - other.float()).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)
    for row in (0, 33, 69):
        for one, other in zip(ours(slice(row, row + 1)), together, strict=True):
            assert torch.equal(one, other[row : row + 1])


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v2_lora", "deepseek_v3", "glm_lite"])
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    path, prompt = make_checkpoint(kind, tmp_path), prompts()[1]
    model = engine(path, dtype="float32", max_sequences=1)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([prompt])).logits[0]
    assert (model.logits(prompt) - theirs).abs().max() <= 1e-4


def test_a_batch_that_is_replayed(llm: LLM, truth: list[Trace]) -> None:
    before = llm.engine.stats().graphs.replayed
    same(run(llm, prompts(), PARAMS), truth)
    assert llm.engine.stats().graphs.replayed > before


def test_cached_prompts(llm: LLM, truth: list[Trace]) -> None:
    run(llm, prompts(), PARAMS)
    same([run(llm, [prompt], PARAMS)[0] for prompt in prompts()], truth)
    assert llm.engine.stats().tokens.cached > 0


@pytest.mark.parametrize("settings", [dict(max_batch_tokens=96), dict(kv_cache_tokens=448, max_model_len=448)])
def test_slices_and_preempted_sequences(settings: dict[str, int], folder: Path, llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    truth = [launched(llm, [prompt], long)[0] for prompt in prompts()]
    same(run(engine(folder, **settings), prompts(), long), truth)


@pytest.mark.parametrize("mix", ["load", "project"])
def test_restored_from_the_host_tier(mix: str, folder: Path, truth: list[Trace]) -> None:
    llm = engine(folder, kv_offloading_size=0.05, kv_offload_activations="on")
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(*MIXES[mix])
    same(answer(llm, prompts(), PARAMS), truth)
    flush(llm)
    same(answer(llm, prompts(), PARAMS), truth)
    llm.close()


def test_decoded_is_the_same_as_prefilled(llm: LLM, truth: list[Trace]) -> None:
    answer = [int(truth[0][position].argmax()) for position in sorted(truth[0])]
    logits = llm.logits(prompts()[0] + answer[:-1])
    for position, row in truth[0].items():
        assert torch.equal(logits[position], row)
