"""Ranks that found other files, or compute by other instructions, than rank 0."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine import rank_agreement
from headrace.engine.rank_agreement import check_alike
from headrace.kernels import cpu
from headrace.offload.identity import SAMPLE, SAMPLES, model_sample
from tests.support.adapters import write_adapter
from tests.support.checkpoint_files import copy_of
from tests.support.checkpoints import FolderOf, TheirsOf
from tests.support.thread_group import ThreadStore

pytestmark = pytest.mark.cpu

KIND = "llama"


def checked(*settings: dict[str, str]) -> list[str]:
    """What each rank raises, which has these settings, "" for nothing."""
    store, found = ThreadStore(), [""] * len(settings)

    def check(rank: int) -> None:
        group: Any = SimpleNamespace(rank=rank, size=len(settings), store=store)
        try:
            check_alike(EngineConfig(**settings[rank]), group)  # type: ignore[arg-type]
        except ValueError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,), name=f"rank {rank}") for rank in range(len(settings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def changed(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_copies_of_a_model_are_alike(folder_of: FolderOf, tmp_path: Path) -> None:
    folder, copy = folder_of(KIND), copy_of(folder_of(KIND), tmp_path / "copy")
    assert checked({"model": str(folder)}, {"model": str(copy)}, {"model": str(folder)}) == [""] * 3
    changed(copy / "model.safetensors", -1)
    told = "rank 1 has other files than rank 0 of the model"
    errors = checked({"model": str(folder)}, {"model": str(copy)}, {"model": str(folder)})
    assert all(error.startswith(told) and error.endswith("copy its folder to every host") for error in errors)
    errors = checked({"model": str(copy)}, {"model": str(folder)}, {"model": str(folder)})
    assert all(error.startswith("ranks 1, 2 have other files than rank 0") for error in errors)


def test_adapters_of_one_name(folder_of: FolderOf, theirs_of: TheirsOf, tmp_path: Path) -> None:
    model = str(folder_of(KIND))
    folders = [write_adapter(tmp_path / name, theirs_of(KIND), seed=seed) for seed, name in enumerate("abc")]
    copy = copy_of(folders[1], tmp_path / "copy")
    mine, same, other = (f"one={folders[0]},two={folder}" for folder in (folders[1], copy, folders[2]))
    assert checked(*({"model": model, "lora_modules": each} for each in (mine, same))) == [""] * 2
    errors = checked(*({"model": model, "lora_modules": each} for each in (mine, other)))
    assert all(error.startswith("rank 1 has other files than rank 0 of the adapter 'two', ") for error in errors)


@pytest.mark.parametrize("place", [0, 1, SAMPLE, -1])
def test_pieces_of_large_files(place: int, folder_of: FolderOf, tmp_path: Path) -> None:
    """Of a file beyond all samples together its beginning and its end are looked at, and its size."""
    folder = copy_of(folder_of(KIND), tmp_path / "large")
    weights = folder / "model.safetensors"
    with weights.open("ab") as file:
        file.truncate(2 * SAMPLES * SAMPLE)
    before = model_sample(folder)
    changed(weights, place)
    assert (model_sample(folder) != before) == (place != SAMPLE), "what lies between two samples is not read"
    with weights.open("ab") as file:
        file.truncate(2 * SAMPLES * SAMPLE + 1)
    assert model_sample(folder) != before


def test_other_instructions_are_told(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By rank 0 alone; they are no error."""
    isas = {"rank 0": "amx", "rank 1": "avx2", "rank 2": "avx2"}
    monkeypatch.setattr(rank_agreement, "cpu", SimpleNamespace(available=lambda: True, isa=cpu.isa))
    settings = {"model": str(folder_of(KIND))}
    caplog.set_level(logging.WARNING, rank_agreement.__name__)
    assert checked(settings, settings) == [""] * 2 and not caplog.records
    monkeypatch.setattr(rank_agreement.cpu, "isa", lambda: isas[threading.current_thread().name])
    assert checked(settings, settings, settings) == [""] * 3
    [record] = caplog.records
    assert record.getMessage().startswith("ranks 1, 2 compute by other instructions or another version than rank 0 (a")
