"""Every pair of features: an engine that has both gives the bits of one rank with nothing stored.

Cases are a covering array of what config.combinations does not exclude (tests.support.feature_pairs). Of a lossy type
(K and V in int8, weights in int8 or int4) the truth is one rank with that type alone. All ranks are threads of this
process: what links them is tested in tests/processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.strategies import FALLBACK
from headrace.types import CHUNK
from tests.support.adapters import write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.drafting import answered, drafts_from, free_model
from tests.support.feature_pairs import OUTLIVING, PROJECTED, STORED, TIERS, cases, id_of
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import counters, flush, forced, look_at_once, projecting, watched
from tests.support.pairwise import Case, every_value
from tests.support.redis_servers import fake_server
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import Trace, random_tokens, run, same, words

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {"gqa": "llama_gqa", "mha": "llama", "window": "mistral_window", "alibi": "falcon_rw"}
BRIEF, LONG = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (8, 16))
MAIN, SHORT = 380, 125
"""Tokens of the prompt that is stored, and of those whose answers outgrow a tight pool. All end in another chunk."""
ROOM, TIGHT, TIGHT_RANKS = 40, 13, 7
"""Chunks of a pool; of one in which answers that grow preempt each other, and of each of several such."""
SIZE = 0.02
"""GiB of a tier."""
Truth = Callable[[Case], list[Trace]]
AdaptersOf = Callable[[Case], dict[str, str]]
"""The setting that names the adapters of a case's model, if it is to have some."""
INVOKING = 4
"""Number of the prompt whose adapter begins inside it."""


def prompts_of(llm: LLM) -> list[list[int]]:
    """The main prompt, one that shares its first chunks, and others, some for each chunk of the largest tight pool."""
    main = words(llm, MAIN, seed=1)
    return [main, main[:200] + words(llm, 60, seed=2), *(words(llm, SHORT, seed=3 + i) for i in range(16))]


def params_of(prompts: list[list[int]]) -> list[SamplingParams]:
    return [LONG if len(prompt) == SHORT else BRIEF for prompt in prompts]


def adapters_for(case: Case, numbers: Sequence[int]) -> list[str]:
    """Those of the prompts of these numbers: of the first two one that changes all, then others, and none."""
    if case["adapters"] == "no":
        return [""] * len(numbers)
    return ["all" if number < 2 else "late" if number == INVOKING else ("", "some")[number % 2] for number in numbers]


@pytest.fixture(scope="module")
def adapters_of(folder_of: FolderOf, theirs_of: TheirsOf, tmp_path_factory: pytest.TempPathFactory) -> AdaptersOf:
    @lru_cache(None)
    def modules(attention: str) -> str:
        kind, folder = KINDS[attention], tmp_path_factory.mktemp("adapters")
        invocation = random_tokens(VOCAB, SHORT, seed=INVOKING + 1)[70:72]
        write_adapter(folder / "all", theirs_of(kind), seed=1, size=0.1)
        write_adapter(folder / "some", theirs_of(kind), r".*(q_proj|query_key_value)", rank=9, seed=2)
        write_adapter(folder / "late", theirs_of(kind), seed=3, alora_invocation_tokens=invocation)
        return ",".join(f"{name}={folder / name}" for name in ("all", "some", "late"))

    return lambda case: {"lora_modules": modules(case["attention"])} if case["adapters"] == "yes" else {}


@pytest.fixture(scope="module")
def truth_of(folder_of: FolderOf, adapters_of: AdaptersOf) -> Truth:
    @lru_cache(None)
    def truth(attention: str, kv: str, weights: str, adapters: str) -> list[Trace]:
        case = {"attention": attention, "adapters": adapters}
        llm = LLM(folder_of(KINDS[attention]), dtype="bfloat16", kv_cache_tokens=64 * CHUNK, kv_cache_dtype=kv,
                  quantization=weights, enable_prefix_caching=False, **adapters_of(case))  # fmt: skip
        prompts = prompts_of(llm)
        return run(llm, prompts, params_of(prompts), adapters_for(case, range(len(prompts))))

    return lambda case: truth(case["attention"], case["kv"], case["weights"], case["adapters"])


@pytest.fixture(autouse=True)
def threads_for_ranks() -> Iterator[None]:
    with ranks_as_threads():
        yield


@pytest.fixture
def remote_url() -> Iterator[str]:
    with fake_server() as (host, port):
        yield f"redis://{host}:{port}/0"


def settings(case: Case, folder: Path, directory: Path, remote_url: str, adapters: Mapping[str, str]) -> dict[str, Any]:
    """Those of the engine that a case asks for."""
    ranks, tight, tiers = int(case["ranks"]), case["preempted"] == "yes", TIERS[case["tier"]]
    chunks = ROOM if not tight else TIGHT if ranks == 1 else TIGHT_RANKS
    given: dict[str, Any] = {
        "dtype": "bfloat16", "threads": 1, "context_parallel_size": ranks, "tensor_parallel_size": int(case["tensor"]),
        "prefill_strategy": case["strategy"] if ranks > 1 else "auto",
        "max_batch_tokens": 192 if not tight else 320 if case["strategy"] == "ring-q" else 1024,
        "kv_cache_dtype": case["kv"], "quantization": case["weights"],
        "enable_prefix_caching": case["prefixes"] == "shared",
        "speculative": {"no": "off", "yes": "ngram", "model": str(folder)}[case["drafts"]],
        **({} if case["drafts"] == "no" else {"num_speculative_tokens": 2}),
        "offload_schedule": case["schedule"], "weight_offload": case["outside"] == "weights",
        **({"kv_offloading_size": SIZE} if "host" in tiers else {}),
        **({"kv_offload_path": str(directory), "kv_offload_disk_size": SIZE} if "disk" in tiers else {}),
        **({"kv_remote_url": remote_url, "kv_offload_timeout_s": 20.0} if "remote" in tiers else {}),
        **({"kv_offload_activations": "on" if case["source"] in PROJECTED else "off"} if tiers else {}),
        **adapters,
    }  # fmt: skip
    if case["schedule"] == "off":
        return {**given, "kv_cache_tokens": chunks * CHUNK}
    place = "kv_offloading_size" if "host" in tiers else "kv_offload_disk_size"
    with LLM(folder, **given) as roomy:
        share = (chunks + 0.5) * CHUNK * ranks / roomy.capacity.kv_cache_tokens
    return {**given, place: SIZE * share}


def stored(llm: LLM, case: Case) -> None:
    """Stores what the case says of the main prompt, and leaves nothing of it in the pool."""
    main = prompts_of(llm)[0]
    with by_one_rank(llm) if case["source"] == "projected" else nullcontext():
        part = main if case["source"] in ("stored", "projected") else main[: 3 * CHUNK + 5]
        watched(llm, [part], BRIEF, adapters_for(case, [0]))
    flush(llm)
    for storage in storages(llm):
        for pool in storage.pools:
            for tensor in pool.tensors:
                tensor.fill_(7)


def storages(llm: LLM) -> list[Any]:
    """The pools of all ranks."""
    loaded = llm.engine.loaded
    if loaded.ranks is None:
        return [loaded.executor.storage]  # type: ignore[attr-defined]
    return [rank.storage for rank in (loaded.ranks.rank, *loaded.ranks.group.workers.made)]  # type: ignore[union-attr]


def streamed(llm: LLM) -> list[Any]:
    """Totals of streaming of all ranks."""
    if llm.engine.loaded.ranks is None:
        return [llm.engine.loaded.executor.streamer.transfers.totals]  # type: ignore[attr-defined]
    return [storage.totals for storage in storages(llm)]


def opened(case: Case, folder: Path, given: dict[str, Any]) -> LLM:
    """The engine of a case, with stored what is to be, by another engine where that outlives it."""
    stores = case["source"] in STORED and case["schedule"] == "off"
    if stores and case["tier"] in OUTLIVING:
        ranks = {"context_parallel_size": 1, "prefill_strategy": "auto"} if case["stored_by"] == "one" else {}
        with LLM(folder, **{**given, **ranks}) as before:
            stored(before, case)
    llm = LLM(folder, **given)
    if stores and case["tier"] not in OUTLIVING:
        stored(llm, case)
    if llm.engine.offload is not None:
        llm.engine.offload.choose = projecting if case["source"] in PROJECTED else forced(0.0, 0.0)
        look_at_once(llm)
    elif case["source"] in PROJECTED:
        project_some(llm, case)
    if "cached" in case["source"]:
        watched(llm, [prompts_of(llm)[0][: CHUNK + 5]], BRIEF, adapters_for(case, [0]))
    return llm


def project_some(llm: LLM, case: Case) -> None:
    """Has steps project a part of the chunks that have X, on all ranks. Of several one computes some first."""
    executor: Any = llm.engine.loaded.executor
    if llm.engine.loaded.ranks is None:
        executor.streamer.options.share = 0.4
        return
    for storage in storages(llm):
        storage.x.share = 0.4
    with by_one_rank(llm):
        watched(llm, [prompts_of(llm)[0][: 3 * CHUNK + 5]], BRIEF, adapters_for(case, [0]))


@contextmanager
def by_one_rank(llm: LLM) -> Iterator[None]:
    """Within, prompts are computed by one of several ranks: strategies that cut a short prompt leave none with all rows
    of a chunk, and so with none of its X."""
    if llm.engine.loaded.ranks is None:
        yield
        return
    executor: Any = llm.engine.loaded.executor
    allowed, executor.allowed = executor.allowed, ("single",)
    yield
    executor.allowed = allowed
    executor.counts.clear()


BROUGHT = {"stored": 5, "half": 3, "half+cached": 2}
"""Chunks that the main prompt brings from a tier, at least."""


def check_happened(llm: LLM, case: Case, loaded_before: int) -> None:
    """What the case says has happened."""
    stats = llm.engine.stats()
    if case["ranks"] != "1":
        assert stats.ranks.prefills.get(case["strategy"]), stats.ranks.prefills
        assert stats.ranks.prefills.keys() <= {case["strategy"], FALLBACK}
    assert (stats.speculation.accepted > 0) == (case["drafts"] != "no")
    assert (stats.scheduler.preemptions > 0) == (case["preempted"] == "yes")
    if "cached" in case["source"]:
        assert stats.tokens.cached >= CHUNK
    if case["schedule"] != "off":
        totals = streamed(llm)
        assert any(each.loaded for each in totals)
        assert any(each.projected for each in totals) == (case["source"] in PROJECTED)
    elif case["source"] in STORED:
        told = counters(llm)
        brought = told.loaded_tokens + told.projected_tokens - loaded_before
        assert told.failures == 0 and brought >= CHUNK * BROUGHT.get(case["source"], 1)
        assert bool(told.projected_tokens) == (case["source"] in PROJECTED)


def marked() -> list[Any]:
    """A few cases, which have every value, are tried by make test, the others by make test-matrix."""
    few = every_value(cases())
    marks = {id(case): () if any(case is each for each in few) else (pytest.mark.matrix,) for case in cases()}
    return [pytest.param(case, id=id_of(case), marks=marks[id(case)]) for case in cases()]


@pytest.mark.parametrize("case", marked())
def test_the_bits_of_one_rank(
    case: Case, folder_of: FolderOf, truth_of: Truth, adapters_of: AdaptersOf, remote_url: str, tmp_path: Path
) -> None:
    truth = truth_of(case)
    folder = folder_of(KINDS[case["attention"]])
    llm = opened(case, folder, settings(case, folder, tmp_path, remote_url, adapters_of(case)))
    before = 0 if llm.engine.offload is None else counters(llm).loaded_tokens
    # Those beside the main prompt fill the pool of a case that is to preempt.
    asked = [0, *range(2, 1 + llm.capacity.kv_cache_tokens // CHUNK // 2)] if case["preempted"] == "yes" else [0, 1]
    if case["adapters"] == "yes" and INVOKING not in asked:
        asked += [INVOKING - 1, INVOKING]
    prompts = [prompts_of(llm)[number] for number in asked]
    if case["drafts"] == "yes":
        drafts_from(llm, [answered(prompts_of(llm)[number], truth[number]) for number in asked])
    if case["drafts"] == "model":
        free_model(llm)
    try:
        adapters = adapters_for(case, asked)
        same(watched(llm, prompts, params_of(prompts), adapters), [truth[number] for number in asked])
        check_happened(llm, case, before)
    finally:
        llm.close()
