"""Saved sessions: an engine that loads one goes on with the bits of the one that saved it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.engine import sessions
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import DeleteSession, EngineCall, ListSessions, LoadSession, ReadSession, SaveSession
from headrace.engine.session_calls import sessions_of
from headrace.offload.sessions.names import DAMAGED, FULL, NO_STORAGE, NOT_FOUND
from headrace.types import CHUNK, InvalidRequest, Request
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.offloading import flush, watched
from tests.support.traces import run, same, words

pytestmark = pytest.mark.cpu

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TINY = {"dtype": "bfloat16", "kv_cache_tokens": 4096, "max_batch_tokens": 256}


def engine(folder: Path, model: str | Path = "tiny", **settings: Any) -> LLM:
    return LLM(str(model), sessions_dir=str(folder), **{**TINY, **settings})


def ask(llm: LLM, call: EngineCall) -> Any:
    return CallHandlers(llm.engine).ask(call)


def checked(llm: LLM) -> None:
    """Nothing is held, and nothing is lost."""
    if llm.engine.offload is not None:
        assert llm.engine.offload.writeback.wait(20)
    cache = llm.engine.cache
    cache.check()
    assert not cache.tables and not cache.parked and not cache.loose


def computed(llm: LLM, tokens: list[int], salt: str | None = None) -> None:
    llm.generate([tokens], SamplingParams(max_tokens=1), cache_salt=salt)


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("*/*.safetensors")
    return found


def refusal(llm: LLM, call: EngineCall) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as told:
        ask(llm, call)
    checked(llm)
    return told.value


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("3_5_ends_recurrent", tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize(
    ("own", "on_hybrid"),
    [
        ({}, False),
        ({"kv_cache_dtype": "int8"}, False),
        ({"quantization": "int8"}, False),
        ({"kv_offloading_size": 0.05, "kv_offload_activations": "on"}, False),
        ({"recurrent_states": 4}, True),
    ],
    ids=["plain", "int8_kv", "int8_weights", "activations", "hybrid"],
)
def test_it_goes_on_with_the_same_bits(own: dict[str, Any], on_hybrid: bool, tmp_path: Path, hybrid: Path) -> None:
    settings = {**own, **({"model": hybrid} if on_hybrid else {})}
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


def test_every_whole_chunk_counts_and_the_file_is_safetensors(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    assert ask(llm, SaveSession("a", "", session))["saved_tokens"] == 3 * CHUNK
    found = load_file(file_of(tmp_path))
    assert found["tokens"].tolist() == session and len(found["chunks"]) == 3 and not len(found["state"])
    llm.engine.cache.tree.clear()
    assert ask(llm, LoadSession("a", ""))["restored_tokens"] == 3 * CHUNK
    assert ask(llm, ReadSession("a", "")) == {"tokens": session, "to": "file"}
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


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(tmp_path)
    session = words(llm, 4 * CHUNK, seed=1)
    computed(llm, session)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headrace.offload.sessions.session_folder.os.fsync", full)
    told = refusal(llm, SaveSession("a", "", session))
    assert told.code == NO_STORAGE and "No space left" in str(told)
    assert not [path for path in tmp_path.glob("*/*")] and not [path for path in tmp_path.glob("*/.*")]


def test_bounds(tmp_path: Path) -> None:
    llm = engine(tmp_path, sessions_per_tenant=2)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    size = ask(llm, SaveSession("a", "", session))["bytes"]
    ask(llm, SaveSession("b", "", session))
    assert refusal(llm, SaveSession("c", "", session)).code == FULL
    ask(llm, SaveSession("a", "", session))
    ask(llm, SaveSession("c", "acme", session))
    ask(llm, DeleteSession("a", ""))
    assert refusal(llm, DeleteSession("a", "")).code == NOT_FOUND
    gib = 2.4 * size / 2**30
    part = engine(tmp_path, sessions_size=2 * gib, sessions_tenant_share=0.5)
    computed(part, session)
    ask(part, SaveSession("d", "", session))
    assert "sessions_tenant_share" in str(refusal(part, SaveSession("e", "", session)))
    ask(part, SaveSession("d", "acme", session))
    assert "sessions_size" in str(refusal(part, SaveSession("e", "third", session)))


def test_names_that_are_none(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, CHUNK, seed=1)
    for name in ("", "../a", "a/b", ".a", "a\0", "a" * 101, "a\n", "ä"):
        for call in (SaveSession(name, "", session), LoadSession(name, ""), DeleteSession(name, "")):
            assert refusal(llm, call).param == "name"
    assert [path.name for path in tmp_path.iterdir()] == ["models.json"], "the digests of the weights"


def test_links_and_folders_are_not_followed(tmp_path: Path) -> None:
    llm = engine(tmp_path / "own")
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    path = file_of(tmp_path / "own")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in str(refusal(llm, LoadSession("a", "")))
    assert ask(llm, ListSessions("")) == []
    path.unlink()
    path.mkdir()
    assert refusal(llm, LoadSession("a", "")).code == NO_STORAGE
    path.rmdir()
    path.parent.rename(tmp_path / "other")
    path.parent.symlink_to(tmp_path / "other")
    for call in (SaveSession("a", "", session), LoadSession("a", ""), ListSessions("")):
        assert "not followed" in str(refusal(llm, call))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    left = file_of(tmp_path).with_name(".b.safetensors.0.part")
    left.write_bytes(b"half")
    ask(llm, SaveSession("b", "", session))
    assert not left.exists()


def test_another_engine_s_file_is_refused(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    for settings_ in ({"kv_cache_dtype": "int8"}, {"dtype": "float32"}, {"quantization": "int8"}):
        told = refusal(engine(tmp_path, **settings_), LoadSession("a", ""))
        assert told.code == DAMAGED and "another model" in str(told)


@pytest.mark.parametrize("settings_", [{}, {"enable_prefix_caching": False, "sessions_dir": "DIR"}])
def test_where_nothing_is_saved(settings_: dict[str, Any], tmp_path: Path) -> None:
    given_ = {name: str(tmp_path) if value == "DIR" else value for name, value in settings_.items()}
    llm = LLM("tiny", **TINY, **given_)
    for work in (lambda: llm.save_session("a", "text"), lambda: llm.load_session("a")):
        with pytest.raises(InvalidRequest, match=r"sessions_dir|enable_prefix_caching"):
            work()


def test_a_directory_that_cannot_be_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"sessions_dir .*name another directory"):
        engine(tmp_path / "file")


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


def run_offloading(llm: LLM, prompt: list[int]) -> Any:
    flush(llm)
    return watched(llm, [prompt])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path, bytes]]:
    folder = tmp_path_factory.mktemp("hostile")
    llm = engine(folder)
    session = words(llm, 5 * CHUNK + 3, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    path = file_of(folder)
    yield llm, path, path.read_bytes()


def attacked(stored: tuple[LLM, Path, bytes], content: bytes) -> dict[str, Any] | None:
    """What loading the content came to; None for a refusal. Nothing may be leaked."""
    llm, path, _ = stored
    path.write_bytes(content)
    llm.engine.cache.tree.clear()
    try:
        answer: dict[str, Any] = ask(llm, LoadSession("a", ""))
    except InvalidRequest as error:
        assert error.code in (DAMAGED, NOT_FOUND) or error.param == "name", error
        return None
    finally:
        checked(llm)
    return answer


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_seen(stored: tuple[LLM, Path, bytes], data: st.DataObject) -> None:
    """Any byte: in the header, of a chunk, of the tokens. (Spaces that fill the header are none of these.)"""
    sound = stored[2]
    end = 8 + int.from_bytes(sound[:8], "little")
    body = len(sound[:end].rstrip(b" "))
    at = data.draw(st.one_of(st.integers(0, body - 1), st.integers(end, len(sound) - 1)))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(sound)
    changed[at] ^= 1 << bit
    assert attacked(stored, bytes(changed)) is None, f"byte {at}"
    again = attacked(stored, sound)
    assert again is not None and again["restored_tokens"] == 5 * CHUNK


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.floats(0, 1), tail=st.binary(max_size=20))
def test_cut_and_lengthened_files_are_refused(stored: tuple[LLM, Path, bytes], length: float, tail: bytes) -> None:
    sound = stored[2]
    content = sound[: int(length * len(sound))] + tail
    if content != sound:
        assert attacked(stored, content) is None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), numbers=st.lists(st.integers(-(2**70), 2**70), min_size=9, max_size=9))
def test_headers_of_any_numbers_are_refused(stored: tuple[LLM, Path, bytes], seed: int, numbers: list[int]) -> None:
    sound, rng = stored[2], random.Random(seed)
    end = 8 + int.from_bytes(sound[:8], "little")
    meta = sound[8:end].rstrip(b" ").decode().partition(',"chunks"')[0]
    n = [each if rng.random() < 0.5 else rng.choice([0, 1, 5, 2**31, 2**63, len(sound)]) for each in numbers]
    told = (
        f'{meta},"chunks":{{"dtype":"U8","shape":[{n[0]},{n[1]}],"data_offsets":[{n[2]},{n[3]}]}},'
        f'"state":{{"dtype":"U8","shape":[{n[4]}],"data_offsets":[{n[5]},{n[6]}]}},'
        f'"tokens":{{"dtype":"I32","shape":[{n[7]}],"data_offsets":[{n[8]},{n[0]}]}}}}'
    ).encode()
    assert attacked(stored, len(told).to_bytes(8, "little") + told + sound[end:]) is None
