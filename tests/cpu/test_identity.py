"""The identity of stored chunks: the model's content and nothing of where it lies, and all that the bits depend on."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.engine.capacity import SHIPPED
from headrace.kernels import cpu, dispatch
from headrace.offload import identity
from headrace.offload.identity import MEMO, chunk_identity, model_identity

WEIGHTS = "model.safetensors"
FACTS: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "quantization": "none", "backend": "cpu"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two shards with invented weights."""
    monkeypatch.setattr(identity, "SETTLED_NS", 0)
    monkeypatch.setattr(identity, "BLOCK", 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for number, name in enumerate(names.values()):
        (folder / name).write_bytes(bytes(range(number, 200 + number)) * 17)
    return folder


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content is read from now on."""
    seen: list[str] = []
    whole = identity.content
    monkeypatch.setattr(identity, "content", lambda path: (seen.append(path.name), whole(path))[1])
    return seen


def test_folder_and_times_are_no_part_of_it(model: Path, tmp_path: Path) -> None:
    found = model_identity(model)
    other = shutil.copytree(model, tmp_path / "elsewhere" / "deep", copy_function=shutil.copyfile)
    os.utime(other / "model-1.safetensors", (1, 1))
    assert model_identity(other) == found and len(found) == 32


@pytest.mark.parametrize("place", [0, 999, 1000, 1700, 3399])
@pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors"])
def test_any_byte_of_the_weights_changes_it(model: Path, name: str, place: int) -> None:
    found, data = model_identity(model), bytearray((model / name).read_bytes())
    data[place] ^= 1
    (model / name).write_bytes(data)
    assert model_identity(model) != found


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"hidden_size": 9}'),
        lambda folder: (folder / "model-2.safetensors").write_bytes((folder / "model-2.safetensors").read_bytes()[:-1]),
        lambda folder: (folder / "model-1.safetensors").replace(folder / WEIGHTS),
        lambda folder: swap(folder / "model-1.safetensors", folder / "model-2.safetensors"),
    ],
    ids=["config", "cut short", "one shard only", "shards exchanged"],
)
def test_other_models_differ(model: Path, change: Callable[[Path], object]) -> None:
    found = model_identity(model)
    change(model)
    assert model_identity(model) != found


def swap(one: Path, other: Path) -> None:
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def test_weights_are_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, memo = reads(monkeypatch), tmp_path / "kv"
    found = model_identity(model, memo)
    assert seen == ["model-1.safetensors", "model-2.safetensors"]
    assert stat.S_IMODE((memo / MEMO).stat().st_mode) == 0o600 and stat.S_IMODE(memo.stat().st_mode) == 0o700
    seen.clear()
    assert model_identity(model, memo) == found and seen == []
    assert [path.name for path in memo.iterdir()] == [MEMO], "a temporary file was left"
    (model / "model-2.safetensors").write_bytes(bytes(3400))
    changed = model_identity(model, memo)
    assert seen == ["model-2.safetensors"] and changed != found and changed == model_identity(model)


def test_a_change_behind_equal_size_and_mtime_is_seen(model: Path, tmp_path: Path) -> None:
    found, path = model_identity(model, tmp_path), model / "model-1.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=times)
    assert model_identity(model, tmp_path) != found


def test_files_that_have_just_changed_are_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "SETTLED_NS", 3600 * 10**9)
    seen = reads(monkeypatch)
    for _ in range(2):
        model_identity(model, tmp_path / "kv")
    assert len(seen) == 4 and not (tmp_path / "kv").exists()


def damage(kind: str, memo: Path) -> None:
    text = memo.read_text()
    known = json.loads(text)
    entry = next(iter(known.values()))
    if kind == "wrong digest":
        entry["digest"] = "00" * 16
    elif kind == "no hexadecimal":
        entry["digest"] = "zz"
    elif kind == "entries of another kind":
        known = dict.fromkeys(known, 3)
    elif kind == "another object":
        known = [1, 2]  # type: ignore[assignment]
    damaged = {"cut short": text[:-20], "not JSON": "\x00\xff", "empty": ""}
    memo.write_text(damaged.get(kind) if kind in damaged else json.dumps(known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind",
    ["wrong digest", "no hexadecimal", "entries of another kind", "another object", "cut short", "not JSON", "empty"],
)
def test_a_damaged_memo_is_done_without_and_mended(
    model: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = model_identity(model, tmp_path)
    damage(kind, tmp_path / MEMO)
    seen = reads(monkeypatch)
    assert model_identity(model, tmp_path) == found and seen
    seen.clear()
    assert model_identity(model, tmp_path) == found and seen == []


def test_a_memo_that_cannot_be_kept_is_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert model_identity(model, tmp_path / "file") == model_identity(model)
    (tmp_path / "kv" / MEMO).mkdir(parents=True)
    assert model_identity(model, tmp_path / "kv") == model_identity(model)
    assert caplog.text.count("cannot be kept") == 2
    assert [path.name for path in (tmp_path / "kv").iterdir()] == [MEMO]


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_identity(tmp_path)
    with pytest.raises(ValueError, match="holds no weights"):
        (tmp_path / "config.json").write_text("{}")
        model_identity(tmp_path)


def test_chunks_differ_by_all_that_their_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bytes(32)
    found = [chunk_identity(model, **FACTS), chunk_identity(bytes(31) + b"\1", **FACTS)]
    others = {"dtype": "float32", "kv_dtype": "int8", "quantization": "int8", "backend": "reference"}
    found += [chunk_identity(model, **{**FACTS, name: value}) for name, value in others.items()]
    found += [chunk_identity(model, **FACTS, formats=formats) for formats in (("raw", "int8"), ("int4", "raw"))]
    assert chunk_identity(model, **FACTS, formats=("int8", "raw", "raw")) in found
    if cpu.available():
        before = cpu.isa()
        cpu.use_isa("portable")
        found.append(chunk_identity(model, **FACTS))
        cpu.use_isa(before)
    with dispatch.force("torch"):
        threads = torch.get_num_threads()
        for count in (threads, threads + 1):
            torch.set_num_threads(count)
            found.append(chunk_identity(model, **FACTS))
        torch.set_num_threads(threads)
    for name, value in (("VERSION", identity.VERSION + 1), ("LAYOUT", "other"), ("__version__", "9")):
        with monkeypatch.context() as patch:
            patch.setattr(identity, name, value)
            found.append(chunk_identity(model, **FACTS))
    assert len(set(found)) == len(found) and {len(one) for one in found} == {32}
    assert chunk_identity(model, **FACTS) == found[0]


def test_what_one_gpu_has_stored_another_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the same one with another Triton. On a CPU neither counts."""
    triton = pytest.importorskip("triton", reason="Triton is built for Linux only")
    facts = FACTS | {"backend": "triton"}
    found, marks, cpus = [], [], []
    for name, version in (("NVIDIA H100", "3.6.0"), ("NVIDIA A100", "3.6.0"), ("NVIDIA H100", "3.9.0")):
        monkeypatch.setattr(identity, "current", partial(SimpleNamespace, name=name))
        monkeypatch.setattr(triton, "__version__", version)
        found.append(chunk_identity(bytes(32), **facts))
        marks.append(identity.fingerprint(bytes(32), "triton"))
        cpus.append(chunk_identity(bytes(32), **FACTS))
    assert len(set(found)) == len(set(marks)) == 3 and len(set(cpus)) == 1


def test_the_shipped_model(tmp_path: Path) -> None:
    assert model_identity(SHIPPED["tiny"], tmp_path) == model_identity(SHIPPED["tiny"], tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_memo_that_is_no_file_holds_up_nothing(make: Callable[[Path], None], model: Path, tmp_path: Path) -> None:
    """A pipe is not waited for, a link not followed; the content is read."""
    cache = tmp_path / "cache"
    cache.mkdir()
    make(cache / MEMO)
    assert model_identity(model, cache) == model_identity(model)
