"""Files of sessions: bounds, a full disk, links, and files that lie."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.engine.calls import DeleteSession, ListSessions, LoadSession, SaveSession
from headrace.offload.sessions.names import DAMAGED, FULL, NO_STORAGE, NOT_FOUND
from headrace.offload.sessions.session_folder import SessionFolder
from headrace.types import CHUNK, InvalidRequest
from tests.support.saved_sessions import TINY, ask, checked, computed, engine, file_of, refusal
from tests.support.traces import words

pytestmark = pytest.mark.cpu


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
    left.write_bytes(b"half")
    ask(llm, SaveSession("b", "acme", session))
    assert not left.exists(), "it is outside all bounds until it goes, and its tenant may not come again"


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flock, made = SessionFolder(tmp_path, 100, 100, 1), fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        made.extend(tmp_path.glob("*/*.part"))
        if len(made) == 1:
            made[0].unlink()  # another engine found it unlocked
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder.writing("", "a", 4) as file:
        file.write(b"told")
    assert len(made) == 2 and file_of(tmp_path).read_bytes() == b"told"


def test_another_engine_s_file_is_refused(tmp_path: Path) -> None:
    llm = engine(tmp_path)
    session = words(llm, 3 * CHUNK, seed=1)
    computed(llm, session)
    ask(llm, SaveSession("a", "", session))
    for settings_ in ({"kv_cache_dtype": "int8"}, {"dtype": "float32"}, {"quantization": "int8"}):
        told = refusal(engine(tmp_path, **settings_), LoadSession("a", ""))
        assert told.code == DAMAGED and "another model" in str(told)


def test_where_nothing_is_saved(tmp_path: Path) -> None:
    llm = LLM("tiny", **TINY)
    for work in (lambda: llm.save_session("a", "text"), lambda: llm.load_session("a")):
        with pytest.raises(InvalidRequest, match="sessions_dir"):
            work()
    with pytest.raises(ValueError, match="sessions_dir needs enable_prefix_caching"):
        LLM("tiny", **TINY, enable_prefix_caching=False, sessions_dir=str(tmp_path))


def test_a_directory_that_cannot_be_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"sessions_dir .*name another directory"):
        engine(tmp_path / "file")


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
