"""Saved sessions: an engine that loads one goes on with the bits of the one that saved it."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.engine import sessions
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, ReadSession, SaveSession
from headrace.engine.session_calls import sessions_of
from headrace.offload.sessions.names import DAMAGED, NOT_FOUND
from headrace.types import CHUNK, InvalidRequest, Request
from tests.support.checkpoints import make_checkpoint as make_latent
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.offloading import flush, watched
from tests.support.saved_sessions import PARAMS, ask, checked, computed, engine, file_of, refusal
from tests.support.traces import run, same, words

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """Models by what they have."""
    hybrid = make_checkpoint("3_5_ends_recurrent", tmp_path_factory.mktemp("hybrid"))
    return {
        "": "tiny",
        "states": hybrid,
        "latents": make_latent("deepseek_v3", tmp_path_factory.mktemp("latents")),
        "sparse": make_latent("glm_dsa", tmp_path_factory.mktemp("sparse")),
    }


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({}, ""),
        ({"kv_cache_dtype": "int8"}, ""),
        ({"quantization": "int8"}, ""),
        ({"kv_offloading_size": 0.05, "kv_offload_activations": "on"}, ""),
        ({"recurrent_states": 4}, "states"),
        ({}, "latents"),
        ({"kv_cache_dtype": "int8"}, "latents"),
        ({}, "sparse"),
    ],
    ids=["plain", "int8_kv", "int8_weights", "activations", "hybrid", "latents", "int8_latents", "sparse"],
)
def test_it_goes_on_with_the_same_bits(
    own: dict[str, Any], kind: str, tmp_path: Path, folders: dict[str, Path | str]
) -> None:
    settings = {**own, "model": folders[kind]}
    first = engine(tmp_path, **settings)
    session = words(first, 400, seed=1)
    more = session + words(first, 70, seed=2)
    computed(first, session)
    saved = ask(first, SaveSession("a", "", session))
    assert saved["saved_tokens"] == 384 and saved["tokens"] == 400
    checked(first)
    first.engine.cache.tree.clear()
    truth = watched(first, [more], PARAMS)

    other = engine(tmp_path, **settings)
    loaded = ask(other, LoadSession("a", ""))
    assert loaded["restored_tokens"] == 384 and not loaded["why"]
    checked(other)
    same(watched(other, [more], PARAMS), truth)
    assert other.engine.stats().tokens.cached == 384, "all of it was taken from the cache"


def test_nothing_is_told_under_another_salt(tmp_path: Path) -> None:
    """Neither its tokens nor whose it is."""
    llm = engine(tmp_path)
    session = words(llm, CHUNK, seed=1)
    computed(llm, session, "mine")
    ask(llm, SaveSession("a", "", session, "mine"))
    for salt in (None, "other"):
        assert refusal(llm, ReadSession("a", "", salt)).code == NOT_FOUND
    assert ask(llm, ReadSession("a", "", "mine"))["tokens"] == session


def test_every_whole_chunk_counts_and_the_file_is_safetensors(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    assert ask(llm, SaveSession("a", "", session))["saved_tokens"] == 3 * CHUNK
    found = load_file(file_of(tmp_path))
    assert found["tokens"].tolist() == session and len(found["chunks"]) == 3 and not len(found["state"])
    llm.engine.cache.tree.clear()
    assert ask(llm, LoadSession("a", ""))["restored_tokens"] == 3 * CHUNK
    assert ask(llm, ReadSession("a", "")) == {"tokens": session, "to": "file", "adapter": ""}
    assert ask(llm, LoadSession("a", ""))["restored_tokens"] == 3 * CHUNK, "what is there already stays"
    checked(llm)
    path = file_of(tmp_path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_offline_by_text(tmp_path: Path) -> None:
    text = "In the beginning there was a river, and a mill beside it. " * 12
    with engine(tmp_path) as llm:
        report = llm.save_session("mill", text)
        assert report.saved_tokens == report.tokens // CHUNK * CHUNK > 0
        truth = llm.generate(text, PARAMS)[0].token_ids
    with engine(tmp_path) as llm:
        assert llm.load_session("mill").restored_tokens == report.saved_tokens
        answer = llm.generate(text, PARAMS)[0]
    assert answer.token_ids == truth and answer.metrics.cached_tokens == (report.tokens - 1) // CHUNK * CHUNK


def test_offline_in_the_tiers(tmp_path: Path) -> None:
    text = "In the beginning there was a river, and a mill beside it. " * 12
    tier = str(tmp_path / "tier")
    with engine(tmp_path, kv_offload_path=tier) as llm:
        saved = llm.save_session("mill", text, to="tier").saved_tokens
    with engine(tmp_path, kv_offload_path=tier) as llm:
        assert llm.load_session("mill").restored_tokens == saved > 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"to": "moon"}, "to must be file or tier, got 'moon'"),
        ({"to": "tier"}, "set kv_offload_path or kv_remote_url"),
        ({"name": "../a"}, "name must have 1 to 100 letters"),
    ],
    ids=repr,
)
def test_what_cannot_be_saved_is_not_computed(wrong: dict[str, str], told: str, tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        with pytest.raises(InvalidRequest, match=told) as refused:
            llm.save_session(**{"name": "a", "prompt": "In the beginning", **wrong})
        assert [refused.value.param] == list(wrong) and not llm.stats().requests_finished


def test_no_other_call_comes_between_computing_and_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might evict what was computed, and less would be saved."""
    with engine(tmp_path) as llm:
        drain, tree = llm._drain, llm.engine.cache.tree

        def evict() -> None:
            with llm._turn:
                tree.clear()

        def drained(*given: Any) -> Any:
            answers = drain(*given)
            other = Thread(target=evict, daemon=True)
            other.start()
            other.join(0.2)
            return answers

        monkeypatch.setattr(llm, "_drain", drained)
        report = llm.save_session("mill", "In the beginning there was a river. " * 12)
        assert report.saved_tokens == report.tokens // CHUNK * CHUNK > 0


def test_tenants_and_salts_are_apart(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 200, seed=1)
    computed(llm, session, "ours")
    assert ask(llm, SaveSession("a", "acme", session, "ours"))["saved_tokens"] == 192
    for call in (LoadSession("a", "other", "ours"), ReadSession("a", "other"), DeleteSession("a", "other")):
        assert refusal(llm, call).code == NOT_FOUND
    assert ask(llm, ListSessions("other")) == [] and [each["name"] for each in ask(llm, ListSessions("acme"))] == ["a"]
    assert refusal(llm, LoadSession("a", "acme", "theirs")).code == NOT_FOUND
    assert refusal(llm, LoadSession("a", "acme")).code == NOT_FOUND
    content = file_of(tmp_path).read_bytes()
    assert b"ours" not in content and "acme" not in str(file_of(tmp_path))

    # Another tenant's file, put among this one's: its chunks have other names.
    stolen = sessions_of(llm.engine).folder.path("thief", "a")
    stolen.parent.mkdir(mode=0o700)
    stolen.write_bytes(content)
    llm.engine.cache.tree.clear()
    assert refusal(llm, LoadSession("a", "thief", "thieves")).code == NOT_FOUND
    own = sessions_of(llm.engine)
    theirs, ours = own._mark("ours"), own._mark("thieves")
    stolen.write_bytes(content.replace(theirs.encode(), ours.encode()))
    assert "digest" in str(refusal(llm, LoadSession("a", "thief", "thieves")))
    assert not llm.engine.cache.tree.nodes


def test_public_tokens_are_those_of_the_call(tmp_path: Path) -> None:
    """The file cannot make its chunks everybody's."""
    llm = engine(tmp_path)
    session = words(llm, 200, seed=1)
    computed(llm, session, "ours")
    ask(llm, SaveSession("a", "", session, "ours"))
    llm.engine.cache.tree.clear()
    assert refusal(llm, LoadSession("a", "", "ours", public_tokens=128)).code == DAMAGED
    assert not llm.engine.cache.tree.nodes


def test_half_of_it_evicted_and_half_of_it_there(tmp_path: Path) -> None:
    llm = engine(tmp_path, kv_cache_tokens=16 * CHUNK, max_model_len=12 * CHUNK)
    session = words(llm, 8 * CHUNK, seed=1)
    computed(llm, session)
    assert ask(llm, SaveSession("whole", "", session))["saved_tokens"] == 8 * CHUNK
    truth = run(llm, [[*session, 5]], PARAMS)
    llm.generate([words(llm, 11 * CHUNK, seed=2)], PARAMS)
    half = ask(llm, SaveSession("half", "", session))["saved_tokens"]
    assert 0 < half < 8 * CHUNK, "what is evicted is not saved"
    assert ask(llm, LoadSession("whole", ""))["restored_tokens"] == 8 * CHUNK, "the missing half comes back"
    checked(llm)
    same(run(llm, [[*session, 5]], PARAMS), truth)
    llm.engine.cache.tree.clear()
    assert ask(llm, LoadSession("half", ""))["restored_tokens"] == half
    same(run(llm, [[*session, 5]], PARAMS), truth)


def test_what_is_loaded_is_the_tenants(tmp_path: Path) -> None:
    """It counts for the tenant's share, and ends at its limit."""
    llm = engine(tmp_path, kv_cache_tokens=16 * CHUNK, max_model_len=12 * CHUNK)
    session = words(llm, 8 * CHUNK, seed=1)
    computed(llm, session, "acme")
    ask(llm, SaveSession("s", "acme", session, "acme"))
    for limit, chunks in ((1.0, 8), (0.25, 4)):
        llm.engine.cache.tree.clear()
        request = dict(tenant="acme", cache_salt="acme", kv_share=0.25, kv_limit=limit)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), **request)  # type: ignore[arg-type]
        assert ask(llm, LoadSession("s", "acme", "acme"))["restored_tokens"] == chunks * CHUNK
        checked(llm)
        accounts = llm.engine.cache.tree.accounts
        assert accounts is not None and accounts.named["acme"].owned == chunks


def test_as_many_from_the_beginning_as_fit(tmp_path: Path) -> None:
    big = engine(tmp_path)
    session = words(big, 10 * CHUNK, seed=1)
    computed(big, session)
    ask(big, SaveSession("a", "", session))
    small = engine(tmp_path, kv_cache_tokens=12 * CHUNK)
    small.engine.add(Request("r", words(small, 7 * CHUNK, seed=2), SamplingParams(max_tokens=32, ignore_eos=True)))
    while len(small.engine.scheduler.running) == 0 or small.engine.scheduler.running[0].n_output == 0:
        small.engine.step()
    told = ask(small, LoadSession("a", ""))
    assert told["restored_tokens"] == 5 * CHUNK and "kv_cache_tokens" in told["why"]
    while small.engine.has_work:
        small.engine.step()
    checked(small)


def test_others_are_answered_and_preempted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two pieces there is a step; what it computes has the bits that it has alone."""
    monkeypatch.setattr(sessions, "PIECE", 1)
    llm = engine(tmp_path, kv_cache_tokens=20 * CHUNK, max_model_len=12 * CHUNK)
    session, others = words(llm, 8 * CHUNK, seed=1), [words(llm, 3 * CHUNK, seed=n) for n in (2, 3, 4)]
    truth = [run(llm, [each], SamplingParams(temperature=0.0, max_tokens=130, ignore_eos=True))[0] for each in others]
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    calls, steps, answers = CallHandlers(llm.engine), llm.engine.step, []
    llm.engine.cache.tree.clear()

    def step() -> Any:
        if len(answers) < 6 and not calls.pending:
            calls.begin(1, LoadSession("a", "") if len(answers) % 2 else SaveSession("b", "", session))
        answers.extend(calls.advance())
        return steps()

    monkeypatch.setattr(llm.engine, "step", step)
    monkeypatch.setattr(llm.engine.scheduler, "check", lambda: None)
    long = SamplingParams(temperature=0.0, max_tokens=130, ignore_eos=True)
    while len(answers) < 6:  # as far as the thread has come meanwhile
        same(_run_beside(llm, others, long), truth)
    assert not any(each.refused for each in answers)
    while calls.pending:
        calls.advance()
    checked(llm)


def _run_beside(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """traces.run, where something else may hold chunks at the end."""
    traces: list[Any] = [{} for _ in prompts]
    first = llm._count + 1

    def keep(sequence: Any, position: int, logits: torch.Tensor) -> None:
        traces[int(sequence.request.request_id.rsplit("-", 1)[1]) - first][position + len(logits) - 1] = logits[-1]

    with llm._observed(keep):
        llm.generate(prompts, params)
    return traces


def test_an_engine_that_ends_leaves_no_half_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(tmp_path)
    session = words(llm, 8 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    own, before = sessions_of(llm.engine), file_of(tmp_path).read_bytes()
    assert own._codec is not None
    encode = own._codec.encode

    def ending(slot: int, *others: Any) -> Any:
        if slot == llm.engine.cache.tree.nodes[digest].slot:
            own._closing.set()
        return encode(slot, *others)

    digest = list(llm.engine.cache.tree.nodes)[4]
    monkeypatch.setattr(own._codec, "encode", ending)
    assert "ends" in str(refusal(llm, SaveSession("a", "", session)))
    assert [path.name for path in file_of(tmp_path).parent.iterdir()] == ["a.safetensors"]
    assert file_of(tmp_path).read_bytes() == before


def test_a_load_given_up_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PIECE", 2)
    llm = engine(tmp_path)
    session = words(llm, 8 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    llm.engine.cache.tree.clear()
    pieces = sessions_of(llm.engine).load(llm.engine, LoadSession("a", ""))
    while len(llm.engine.cache.tree.nodes) < 4:
        next(pieces)
    while not llm.engine.cache.loose:
        next(pieces)
    pieces.close()
    checked(llm)
    assert ask(llm, LoadSession("a", ""))["restored_tokens"] == 8 * CHUNK


def test_in_the_tiers(tmp_path: Path) -> None:
    own = {"kv_offload_path": str(tmp_path / "disk"), "kv_offload_write": "idle"}
    with engine(tmp_path / "sessions", **own) as llm:
        session = words(llm, 400, seed=1)
        computed(llm, session)
        assert llm.engine.offload is not None
        saved = ask(llm, SaveSession("a", "", session, to="tier"))
        assert saved["saved_tokens"] == 384 and saved["bytes"] < 4096, "its tokens alone"
        llm.engine.cache.check()
        truth = run_offloading(llm, [*session, 7])
    with engine(tmp_path / "sessions", **own) as llm:
        assert ask(llm, LoadSession("a", ""))["restored_tokens"] == 384
        assert ask(llm, ReadSession("a", ""))["tokens"] == session
        same(run_offloading(llm, [*session, 7]), truth)
        assert llm.engine.stats().tokens.cached == 384
    with engine(tmp_path / "sessions") as llm:
        told = refusal(llm, SaveSession("b", "", session, to="tier"))
        assert told.param == "to" and "kv_offload_path" in str(told)


def test_tiers_that_do_not_take_all_say_so(tmp_path: Path) -> None:
    """A disk with room for some chunks."""
    own = {"kv_offload_path": str(tmp_path / "disk"), "kv_offload_write": "idle", "kv_offload_disk_size": 3e-4}
    with engine(tmp_path / "sessions", **own) as llm:
        session = words(llm, 700, seed=1)
        computed(llm, session)
        for answer in (ask(llm, SaveSession("a", "", session, to="tier")), ask(llm, LoadSession("a", ""))):
            there = answer["restored_tokens"] // CHUNK
            assert there < 10 and answer["why"].startswith(f"the tiers have {there} of 10 chunks")


def run_offloading(llm: LLM, prompt: list[int]) -> Any:
    flush(llm)
    return watched(llm, [prompt])
