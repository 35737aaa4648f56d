"""Adapters in an engine: one model's weights and pool, answers of each adapter, and a context that all share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.driver import apart
from headrace.engine.footprint import Footprint
from headrace.engine.programs import InCpp
from headrace.engine.runner import Runner
from headrace.engine.streaming import StreamRunner
from headrace.kernels import cpu, dispatch
from headrace.models.config import read_config
from headrace.parallel.messages import StepPart
from headrace.types import CHUNK, Delta, InvalidRequest, UnsupportedModel
from tests.support.adapters import with_adapter, write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.gguf_families import write_family
from tests.support.greedy_answers import greedy_behind
from tests.support.hybrid_checkpoints import build_model as build_hybrid
from tests.support.hybrid_checkpoints import make_checkpoint as make_hybrid
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, counters, flush, forced, look_at_once, watched
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, random_tokens, run, same

HYBRIDS = [
    ("3_5", r".*(q_proj|o_proj|down_proj)"),
    ("3_5", r".*(in_proj_\w+|out_proj)"),
    ("next", r".*(in_proj_\w+|out_proj|k_proj)"),
    ("nemotron", r".*(q_proj|o_proj|up_proj|down_proj|in_proj|out_proj)"),
    ("granite", r".*(in_proj|out_proj|input_linear)"),
    ("lfm2", r".*(q_proj|out_proj|in_proj|w1|w2)"),
    ("lfm3", r".*(q_proj|o_proj|in_proj|w1|w2)"),
]
GEMMA4 = ["gemma4", "gemma4_small", "gemma4_experts"]
"""Layers that differ in their heads, with keys that are values or another layer's, inputs, or experts beside MLPs."""
KIMI = ("kimi", r".*(q_proj|k_proj|[.]b_proj|[fg]_[ab]_proj|o_proj|kv_a_proj_with_mqa|shared_experts[.]down_proj)")
FALCON = ("falcon_h1", r".*(q_proj|k_proj|v_proj|o_proj|in_proj|out_proj|gate_proj|down_proj)")
"""Multipliers are for what adapters add, too."""
pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

KIND = "llama"
BRIEF = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONTEXT = random_tokens(VOCAB, 5 * CHUNK, seed=1)
INVOCATION = [5, 6, 5]
"""Tokens that random_tokens never draws."""
MIDDLE = CONTEXT[: 3 * CHUNK + 10] + INVOCATION + CONTEXT[3 * CHUNK + 10 : 4 * CHUNK]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, theirs_of: TheirsOf) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one", theirs_of(KIND), seed=1)
    write_adapter(folder / "two", theirs_of(KIND), r".*(k|v)_proj", seed=2)
    for seed, name in ((3, "late"), (4, "later")):
        write_adapter(folder / name, theirs_of(KIND), seed=seed, alora_invocation_tokens=INVOCATION)
    return folder


def modules(folders: Path) -> str:
    return ",".join(f"{name}={folders / name}" for name in ("one", "two", "late", "later"))


@pytest.fixture
def llm(folders: Path, folder_of: FolderOf) -> Iterator[LLM]:
    with LLM(folder_of(KIND), kv_cache_tokens=64 * CHUNK, lora_modules=modules(folders)) as made:
        yield made


@pytest.mark.parametrize("name", ["one", "two"])
def test_answers_are_those_of_the_adapter_multiplied_in(
    llm: LLM, name: str, folders: Path, theirs_of: TheirsOf
) -> None:
    model, tokens = with_adapter(theirs_of(KIND), folders / name), CONTEXT[:100]
    [ours] = llm.generate([tokens], BRIEF, adapter=name)
    with torch.no_grad():
        theirs = model.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert ours.token_ids == theirs[0, len(tokens) :].tolist()


def test_each_meets_its_own_chunks(llm: LLM) -> None:
    """And never those of another, nor of the model."""
    names = ["", "one", "two"]
    alone = [run(llm, [CONTEXT], BRIEF, [name])[0] for name in names]
    outputs = llm.generate([CONTEXT] * 3, BRIEF, adapter=names)
    assert [output.metrics.cached_tokens for output in outputs] == [len(CONTEXT) - 1] * 3
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    same(run(llm, [CONTEXT] * 3, BRIEF, names), alone)


def test_salts_of_tenants_are_beside_it(llm: LLM) -> None:
    def cached(**sharing: object) -> int:
        [output] = llm.generate([CONTEXT], BRIEF, adapter="one", **sharing)  # type: ignore[arg-type]
        return output.metrics.cached_tokens

    assert [cached(cache_salt="a"), cached(), cached(cache_salt="b")] == [0, 0, 0]
    assert cached(cache_salt="a") == cached() == len(CONTEXT) - 1
    assert cached(cache_salt="c", public_prefix_tokens=2 * CHUNK) == 2 * CHUNK


def test_one_that_begins_late_shares_what_is_before_it(llm: LLM) -> None:
    """The whole chunks before its invocation are the model's own, and another adapter's too."""
    fresh = [run(llm, [MIDDLE], BRIEF, [name])[0] for name in ("late", "later")]
    llm.engine.cache.tree.clear()
    llm.generate([CONTEXT], BRIEF)
    cached = []
    for name in ("late", "later", "late"):
        [output] = llm.generate([MIDDLE], BRIEF, adapter=name)
        cached.append(output.metrics.cached_tokens)
    assert cached == [3 * CHUNK, 3 * CHUNK, 4 * CHUNK], "the chunk in which it begins is its own"
    same([run(llm, [MIDDLE], BRIEF, [name])[0] for name in ("late", "later")], fresh)


def test_it_begins_where_it_is_invoked_last(llm: LLM) -> None:
    """An earlier answer of an adapter, in a prompt that invokes it again, is the model's to read."""
    again = [*MIDDLE, *INVOCATION, 9]
    [first] = run(llm, [again], BRIEF, ["late"])
    llm.generate([[*MIDDLE, 9]], BRIEF, adapter="late")
    [output] = llm.generate([again], BRIEF, adapter="late")
    assert output.metrics.cached_tokens == 4 * CHUNK
    same(run(llm, [again], BRIEF, ["late"]), [first])


def test_its_first_rows_are_the_models(llm: LLM, folders: Path, theirs_of: TheirsOf) -> None:
    model = theirs_of(KIND)
    tokens, start = MIDDLE[3 * CHUNK :], 10
    with torch.no_grad():
        before = model(torch.tensor([tokens[:start]])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([tokens], params, adapter="late")
    [other] = llm.generate([tokens], params, adapter="later")
    assert output.prompt_logprobs is not None and other.prompt_logprobs is not None
    for place, (mine, its) in enumerate(zip(output.prompt_logprobs, other.prompt_logprobs, strict=True)):
        if mine is None or its is None:
            continue
        token = tokens[place]
        # A token's probability is that of the row before it.
        assert (mine[token].logprob == its[token].logprob) == (place <= start)
        if place <= start:
            assert abs(mine[token].logprob - float(before[place - 1, token])) < 1e-4


def test_what_cannot_be_asked(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="there is no adapter 'three'; this engine has 'one', 'two', 'late'"):
        llm.generate([CONTEXT], BRIEF, adapter="three")
    with pytest.raises(InvalidRequest, match=r"the prompt lacks \[5, 6, 5\], the invocation tokens at which 'late'"):
        llm.generate([CONTEXT], BRIEF, adapter="late")
    with pytest.raises(InvalidRequest, match="2 prompts but 1 in the list adapter"):
        llm.generate([CONTEXT, CONTEXT], BRIEF, adapter=["one"])
    with pytest.raises(InvalidRequest, match=r"adapter must be the name of one of lora_modules, .*got int"):
        llm.generate([CONTEXT], BRIEF, adapter=[1])  # type: ignore[list-item]
    assert llm.engine.cache.used == 0 and not llm.engine.has_work


def test_it_outlives_its_engine_on_disk(
    folders: Path, folder_of: FolderOf, tmp_path: Path, theirs_of: TheirsOf
) -> None:
    """Unless the folder holds another adapter by then."""
    settings = dict(kv_offload_path=str(tmp_path / "kv"), kv_offload_disk_size=0.1, kv_cache_tokens=64 * CHUNK)
    mine = write_adapter(tmp_path / "mine", theirs_of(KIND), seed=7)

    def restored(name: str) -> int:
        with LLM(folder_of(KIND), lora_modules=f"one={folders / 'one'},mine={mine}", **settings) as llm:  # type: ignore[arg-type]
            llm.engine.offload.choose = forced(*MIXES["load"])  # type: ignore[union-attr]
            look_at_once(llm)
            [output] = llm.generate([CONTEXT], BRIEF, adapter=name)
            return output.metrics.restored_tokens

    assert [restored("one"), restored("mine"), restored("")] == [0, 0, 0]
    assert [restored("one"), restored("mine"), restored("")] == [4 * CHUNK] * 3
    write_adapter(mine, theirs_of(KIND), seed=8)
    assert restored("mine") == 0


def same_one_at_a_time(folder: Path, lora_modules: str, prompts: list[list[int]], names: list[str]) -> None:
    """In bf16: pieces of prompts, and decoding past the end of a chunk, by one call of C++ a step and otherwise."""

    def traces(whole: bool) -> list[Trace]:
        settings = dict(dtype="bfloat16", kv_cache_tokens=32 * CHUNK, max_batch_tokens=96, lora_modules=lora_modules)
        with LLM(folder, **settings) as llm:  # type: ignore[arg-type]
            executor = llm.engine.loaded.executor
            assert isinstance(executor, Runner) and isinstance(executor.decoding, InCpp) == whole
            return run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True), names)

    fast = traces(True)
    with dispatch.force("ops"):
        same(fast, traces(False))


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
def test_whole_layers_have_the_bits_of_single_operations(folders: Path, folder_of: FolderOf) -> None:
    names = ["one", "", "two", "late"]
    prompts = [CONTEXT[:5], CONTEXT[:130], CONTEXT[:64], MIDDLE]
    same_one_at_a_time(folder_of(KIND), modules(folders), prompts, names)


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.parametrize(("kind", "targets"), [*HYBRIDS, FALCON])
def test_whole_layers_beside_recurrent_ones(kind: str, targets: str, tmp_path: Path) -> None:
    folder = make_hybrid(kind, tmp_path / "m")
    write_adapter(tmp_path / "a", build_hybrid(kind), targets, seed=1)
    same_one_at_a_time(folder, f"a={tmp_path / 'a'}", [CONTEXT[:5], CONTEXT[:130]], ["a", ""])


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
@pytest.mark.parametrize("kind", GEMMA4)
def test_whole_layers_that_differ(kind: str, tmp_path: Path, folder_of: FolderOf, theirs_of: TheirsOf) -> None:
    write_adapter(tmp_path / "a", theirs_of(kind), seed=1)
    write_adapter(tmp_path / "b", theirs_of(kind), r".*(q_proj|per_layer_input_gate|down_proj)", seed=2)
    given = f"a={tmp_path / 'a'},b={tmp_path / 'b'}"
    prompts = [CONTEXT[:5], CONTEXT[:130], CONTEXT[:64]]
    same_one_at_a_time(folder_of(kind), given, prompts, ["a", "", "b"])


@pytest.mark.parametrize("kind", GEMMA4)
def test_tensor_ranks_have_their_rows_of_layers_that_differ(
    kind: str, tmp_path: Path, folder_of: FolderOf, theirs_of: TheirsOf
) -> None:
    write_adapter(tmp_path / "a", theirs_of(kind), seed=1, size=1.5)
    as_one_rank(folder_of(kind), tmp_path / "a")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("way", ["restored", "streamed"])
def test_keys_are_projected_by_its_matrices(way: str, dtype: str, folders: Path, folder_of: FolderOf) -> None:
    """From activations: those of an adapter that begins inside a chunk, of one of all rows, and of the model itself."""
    prompts, names = [MIDDLE, CONTEXT, CONTEXT], ["late", "one", ""]
    settings: dict[str, Any] = dict(dtype=dtype, kv_cache_tokens=32 * CHUNK, lora_modules=modules(folders))
    with LLM(folder_of(KIND), **settings) as llm:
        expected = run(llm, prompts, BRIEF, names)
    settings |= dict(kv_offloading_size=0.02, kv_offload_activations="on")
    if way == "streamed":
        del settings["kv_cache_tokens"]
        settings |= dict(offload_schedule="row")
    with LLM(folder_of(KIND), **settings) as llm:
        same(watched(llm, prompts, BRIEF, names), expected)
        if way == "streamed":
            executor = llm.engine.loaded.executor
            assert isinstance(executor, StreamRunner)
            executor.streamer.options.share = 1.0
        else:
            assert llm.engine.offload is not None
            flush(llm)
            llm.engine.offload.choose = forced(0.0, 1.0)
            look_at_once(llm)
        outputs = llm.generate(prompts, BRIEF, adapter=names)
        assert [output.metrics.cached_tokens for output in outputs] == [4 * CHUNK] * 3
        same(watched(llm, prompts, BRIEF, names), expected)
        if way == "streamed":
            assert executor.streamer.transfers.totals.projected >= 9
        else:
            assert counters(llm).projected_tokens >= 9 * CHUNK and counters(llm).loaded_tokens == 0


@pytest.mark.parametrize(("kind", "targets"), [*HYBRIDS, KIMI, FALCON])
def test_layers_of_a_hybrid(kind: str, targets: str, tmp_path: Path) -> None:
    """Those with attention, MLPs, and all kinds of recurrent layers, the gates of which come of matrices of their own
    or of a part of one; states are kept by the adapters' own chunks."""
    model = build_hybrid(kind)
    folder = make_hybrid(kind, tmp_path / "m")
    write_adapter(tmp_path / "a", model, targets, seed=1, size=1.5)
    adapted, tokens = with_adapter(model, tmp_path / "a"), CONTEXT[:150]
    with LLM(folder, dtype="float32", kv_cache_tokens=32 * CHUNK, lora_modules=f"a={tmp_path / 'a'}") as llm:
        [plain] = llm.generate([tokens], BRIEF)
        for cached in (0, 2 * CHUNK):
            [ours] = llm.generate([tokens], replace(BRIEF, logprobs=0), adapter="a")
            assert ours.metrics.cached_tokens == cached
            with torch.no_grad():
                theirs = adapted.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False, eos_token_id=None)
                likely = adapted(theirs).logits[0, len(tokens) - 1 : -1].log_softmax(-1).max(-1).values
            assert ours.token_ids == theirs[0, len(tokens) :].tolist() != plain.token_ids
            assert ours.logprobs is not None
            told = [each[token].logprob for each, token in zip(ours.logprobs, ours.token_ids, strict=True)]
            torch.testing.assert_close(torch.tensor(told), likely, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "targets"), [HYBRIDS[1], HYBRIDS[4], HYBRIDS[5], KIMI, FALCON])
def test_tensor_ranks_have_their_rows_of_a_hybrids(kind: str, targets: str, tmp_path: Path) -> None:
    """Of each kind of recurrent layers: answers are those of one rank."""
    folder = make_hybrid(kind, tmp_path / "m")
    as_one_rank(folder, write_adapter(tmp_path / "a", build_hybrid(kind), targets, seed=1, size=1.5))


def as_one_rank(folder: Path, adapter: Path) -> None:
    given = dict(dtype="bfloat16", threads=1, kv_cache_tokens=32 * CHUNK, lora_modules=f"a={adapter}")
    prompts, names = [CONTEXT[:150], CONTEXT[:150]], ["a", ""]
    with LLM(folder, **given) as one:
        truth = run(one, prompts, BRIEF, names)
    with ranks_as_threads(), LLM(folder, **given, tensor_parallel_size=2) as llm:
        for _ in range(2):
            same(run(llm, prompts, BRIEF, names), truth)


@pytest.mark.parametrize("kind", ["qwen3_5_three_each", "granite4_hybrid"])
def test_recurrent_layers_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """Value heads of Qwen3.5 lie in another order there, the columns of out_proj too."""
    model, tokens = write_family(kind, tmp_path / "m.gguf", lambda _: Kind.F16), CONTEXT[:70]
    write_adapter(tmp_path / "a", model, r".*(in_proj\w*|out_proj|q_proj)", seed=1, size=2.0)
    modules = f"a={tmp_path / 'a'}"
    with LLM(tmp_path / "m.gguf", dtype="float32", kv_cache_tokens=32 * CHUNK, lora_modules=modules) as llm:
        ours, plain = (llm.generate([tokens], BRIEF, adapter=name)[0].token_ids for name in ("a", ""))
    assert ours == greedy_behind(with_adapter(model, tmp_path / "a"), tokens, ours) != plain


def test_a_file_that_is_multiplied_already_takes_no_adapters(tmp_path: Path) -> None:
    """It does not say by what, and that is for what adapters add, too."""
    write_family("falcon_h1", tmp_path / "m.gguf", lambda _: Kind.F16)
    write_adapter(tmp_path / "a", build_hybrid("falcon_h1"), r".*down_proj", seed=1)
    with pytest.raises(UnsupportedModel, match="the file does not say it; use the model's safetensors"):
        LLM(tmp_path / "m.gguf", kv_cache_tokens=32 * CHUNK, lora_modules=f"a={tmp_path / 'a'}")


def test_its_content_is_in_the_fingerprint(folders: Path, folder_of: FolderOf) -> None:
    def fingerprint(**settings: str) -> str:
        with LLM(folder_of(KIND), kv_cache_tokens=CHUNK, **settings) as llm:  # type: ignore[arg-type]
            return llm.capacity.fingerprint

    plain, one = fingerprint(), fingerprint(lora_modules=f"a={folders / 'one'}")
    assert plain != one != fingerprint(lora_modules=f"a={folders / 'two'}")


def test_pieces_of_a_part_keep_its_adapter() -> None:
    part = StepPart(list(range(200)), 0, [3, 4, 5, 6], [0, 64, 200], [0, 1], adapter=2, adapter_start=70)
    assert [(piece.start, piece.adapter, piece.adapter_start) for piece in apart(part)] == [(0, 2, 70), (64, 2, 70)]


def test_memory_of_adapters_is_counted(folders: Path, folder_of: FolderOf) -> None:
    def weights(**settings: str) -> int:
        config = EngineConfig(model=str(folder_of(KIND)), **settings)
        return Footprint.of(config, read_config(folder_of(KIND))).weights

    size = (folders / "one" / "adapter_model.safetensors").stat().st_size
    assert weights(lora_modules=f"a={folders / 'one'},b={folders / 'one'}") - weights() >= 2 * size


def test_a_conversation_names_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no variable of the chat template."""
    llm, rendered, asked = AsyncLLM(EngineConfig()), Mock(return_value="text"), Mock()
    llm.tokenizer = Mock(apply_chat=rendered)
    monkeypatch.setattr(llm, "_must_live", lambda: None)

    async def generate(*given: object, **named: object) -> AsyncIterator[Delta]:
        asked(*given, **named)
        yield Delta("r", 0, "answer")

    monkeypatch.setattr(llm, "generate", generate)

    async def ask() -> list[str]:
        return [delta.text async for delta in llm.chat([{"role": "user", "content": "a"}], adapter="one", tone="kind")]

    assert asyncio.run(ask()) == ["answer"]
    assert rendered.call_args.kwargs == {"tone": "kind"} and asked.call_args.kwargs["adapter"] == "one"
