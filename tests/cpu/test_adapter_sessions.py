"""Sessions of adapters: what one has computed comes back under its own names, and under nobody else's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace import LLM, SamplingParams
from headrace.engine.calls import LoadSession, ReadSession, SaveSession
from headrace.offload.sessions.names import DAMAGED
from headrace.types import CHUNK, InvalidRequest
from tests.support.adapters import write_adapter
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import MIXES, forced, look_at_once, watched
from tests.support.saved_sessions import ask, checked, engine, file_of, refusal
from tests.support.traces import random_tokens, same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

KIND = "llama"
BRIEF = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
INVOCATION = [5, 6, 5]
"""Tokens that random_tokens never draws."""
TEXT = random_tokens(VOCAB, 4 * CHUNK, seed=1)
SESSION = TEXT[: 2 * CHUNK + 7] + INVOCATION + TEXT[2 * CHUNK + 7 :]
MORE = [*SESSION, 9, 8, 7]


@pytest.fixture
def adapters(tmp_path: Path, theirs_of: TheirsOf) -> Path:
    """Two of all modules: of all rows, and from its invocation on."""
    write_adapter(tmp_path / "one", theirs_of(KIND), seed=1)
    write_adapter(tmp_path / "late", theirs_of(KIND), seed=2, alora_invocation_tokens=INVOCATION)
    return tmp_path


def opened(adapters: Path, model: Path, *names: str, **settings: Any) -> LLM:
    modules = ",".join(f"{name}={adapters / name}" for name in names or ("one", "late"))
    return engine(adapters / "saved", model, lora_modules=modules, **settings)


@pytest.mark.parametrize(("name", "shared"), [("one", 0), ("late", 2 * CHUNK)])
@pytest.mark.parametrize("to", ["file", "tier"])
def test_it_goes_on_with_the_same_bits(to: str, name: str, shared: int, adapters: Path, folder_of: FolderOf) -> None:
    """The model itself finds what lies before an invocation, and nothing else of it."""
    disk = dict(kv_offload_path=str(adapters / "kv"), kv_offload_disk_size=0.1) if to == "tier" else {}
    first = opened(adapters, folder_of(KIND), **disk)
    truth = watched(first, [MORE], BRIEF, name)
    first.engine.cache.tree.clear()
    if to == "file":
        assert first.save_session("a", SESSION, adapter=name).saved_tokens == 4 * CHUNK
    else:
        first.generate([SESSION], BRIEF, adapter=name)
        assert ask(first, SaveSession("a", "", SESSION, to="tier", adapter=name))["saved_tokens"] == 4 * CHUNK
    checked(first)
    first.close()
    other = opened(adapters, folder_of(KIND), **disk)
    if other.engine.offload is not None:  # it may be as fast to compute a chunk again
        other.engine.offload.choose = forced(*MIXES["load"])
        look_at_once(other)
    assert ask(other, ReadSession("a", "")) == {"tokens": SESSION, "to": to, "adapter": name}
    assert ask(other, LoadSession("a", ""))["restored_tokens"] == 4 * CHUNK
    checked(other)
    for adapter, found in (("", shared), (name, 4 * CHUNK)):
        [output] = other.generate([MORE], SamplingParams(max_tokens=1), adapter=adapter)
        assert output.metrics.cached_tokens == found
    same(watched(other, [MORE], BRIEF, name), truth)
    other.close()


def test_the_session_of_another_adapter(adapters: Path, folder_of: FolderOf, theirs_of: TheirsOf) -> None:
    """One that an engine does not have, and one that has become another one."""
    opened(adapters, folder_of(KIND)).save_session("a", SESSION, adapter="one")
    told = refusal(opened(adapters, folder_of(KIND), "late"), LoadSession("a", ""))
    assert told.code == DAMAGED and "is of the adapter 'one', which this engine does not have; name it" in str(told)
    write_adapter(adapters / "one", theirs_of(KIND), seed=3)
    told = refusal(opened(adapters, folder_of(KIND)), LoadSession("a", ""))
    assert told.code == DAMAGED and "is of the adapter 'one' as other files made it; save it again" in str(told)


def test_tokens_that_do_not_invoke_it(adapters: Path, folder_of: FolderOf) -> None:
    """Asked for, and in a file that somebody has changed."""
    llm = opened(adapters, folder_of(KIND))
    with pytest.raises(InvalidRequest, match="the prompt lacks"):
        llm.save_session("a", TEXT, adapter="late")
    assert refusal(llm, SaveSession("a", "", TEXT, adapter="late")).param == "adapter"
    assert not list((adapters / "saved").glob("*/*"))
    llm.save_session("a", TEXT, adapter="one")
    digests = {each.name: each.digest for each in llm.capacity.adapters}
    rewritten(file_of(adapters / "saved"), adapter="late", adapter_digest=digests["late"])
    told = refusal(llm, LoadSession("a", ""))
    assert told.code == DAMAGED and "is of the adapter 'late', which none of its tokens invokes" in str(told)


def test_chunks_of_one_adapter_are_not_anothers(adapters: Path, folder_of: FolderOf) -> None:
    """Whatever the file says: each chunk carries its name."""
    shutil.copytree(adapters / "one", adapters / "other")
    config = adapters / "other" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 3}))
    llm = opened(adapters, folder_of(KIND), "one", "other")
    llm.save_session("a", SESSION, adapter="one")
    digests = {each.name: each.digest for each in llm.capacity.adapters}
    for name, digest in (("other", digests["other"]), ("", "")):
        rewritten(file_of(adapters / "saved"), adapter=name, adapter_digest=digest)
        llm.engine.cache.tree.clear()
        assert "is damaged or of other tokens: chunk 0" in str(refusal(llm, LoadSession("a", "")))


def test_a_file_that_knows_of_no_adapters(adapters: Path, folder_of: FolderOf) -> None:
    """As they were written before there were any: it is of the model."""
    llm = opened(adapters, folder_of(KIND))
    llm.save_session("a", SESSION)
    rewritten(file_of(adapters / "saved"), adapter=None, adapter_digest=None)
    llm.engine.cache.tree.clear()
    assert llm.load_session("a").restored_tokens == 4 * CHUNK
    assert load_file(file_of(adapters / "saved"))["tokens"].tolist() == SESSION


def rewritten(file: Path, **metadata: str | None) -> None:
    """Puts others in the place of what the header says, or nothing."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    found = header["__metadata__"] | metadata
    header["__metadata__"] = {name: value for name, value in found.items() if value is not None}
    body = json.dumps(header).encode()
    file.write_bytes(len(body).to_bytes(8, "little") + body + data[end:])
