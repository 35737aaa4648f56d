"""Experts in a file: the bits of a model that lies in memory, in much less memory, the most used kept."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine import preflight
from headrace.engine.footprint import PROCESS_BYTES, Footprint
from headrace.engine.outside import ExpertsOutside
from headrace.host import GIB
from headrace.kernels import cpu, experts
from headrace.kernels.experts import OutsideColumn
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from headrace.models.sizes import expert_bytes
from headrace.offload.weights.experts import ExpertFile
from headrace.offload.weights.read_rate import read_rate
from tests.support.checkpoints import FolderOf, make_checkpoint
from tests.support.streamed_ranks import close, streamed_ranks
from tests.support.traces import Trace, run, same, words

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 4096, **settings})


def prompts_of(llm: LLM) -> list[list[int]]:
    base = words(llm, 130, seed=9)
    return [words(llm, 3, seed=1), base, base + words(llm, 30, seed=2)]


def file_of(llm: LLM) -> ExpertFile:
    file = llm.engine.loaded.decoder.outside
    assert isinstance(file, ExpertFile)
    return file


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe_mixed", {}),
    ("qwen3_moe_mixed", {"quantization": "int4"}),
    ("qwen3_moe", {"quantization": "w8a8"}),
    ("olmoe", {"dtype": "float32"}),
    ("mixtral", {"attention_backend": "reference"}),
    ("granite_moe_shared", {}),
    ("glm4_moe_groups", {}),
    ("qwen3_moe_mixed", {"weight_offload": True, "offload_schedule": "row", "kv_offload_disk_size": 0.05}),
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_the_bits_of_memory(kind: str, settings: dict[str, Any], folder_of: FolderOf, tmp_path: Path) -> None:
    """Also while what is kept changes, and with the weights beside them streamed from a file of their own."""
    plain = {name: settings[name] for name in ("quantization", "dtype", "attention_backend") if name in settings}
    resident = engine(folder_of(kind), **plain)
    truth = run(resident, prompts_of(resident), SHORT)
    folder = {"kv_offload_path" if "offload_schedule" in settings else "expert_offload_path": str(tmp_path)}
    llm = engine(folder_of(kind), expert_memory_size=6 * kept_bytes(kind, folder_of) / GIB, **folder, **settings)
    for _ in range(2):
        same(run(llm, prompts_of(llm), SHORT), truth)
        file_of(llm).turn()
    told = llm.engine.stats().experts
    assert 0 < told.hits < told.met and 0 < told.kept_bytes < told.outside_bytes


def kept_bytes(kind: str, folder_of: FolderOf) -> int:
    """Of one expert in bf16, in whole pages, roughly."""
    model = plain_config(folder_of(kind))
    assert model.experts is not None
    return expert_bytes(model, "bfloat16") // (model.experts.count * sum(model.experts.layers))


@pytest.mark.parametrize(("context", "tensor"), [(1, 2), (2, 1)])
def test_on_ranks(context: int, tensor: int, tmp_path: Path) -> None:
    """Each has a file of its share."""
    folder = make_checkpoint("qwen3_moe_mixed", tmp_path / "model", moe_intermediate_size=128)
    resident = engine(folder)
    truth = run(resident, prompts_of(resident), SHORT)
    llm = streamed_ranks(
        context, tensor, model=str(folder), max_model_len=512, kv_offload_path=str(tmp_path / "kv"),
        offload_schedule="column", weight_offload=True,
    )  # fmt: skip
    same(run(llm, prompts_of(llm), SHORT), truth)
    sizes = {rank.decoder.outside.stats().outside_bytes for rank in llm.ranks}  # type: ignore[attr-defined]
    assert len(sizes) == 1 and sizes.pop() > 0
    close(llm)


def test_both_ways_count_the_same(folder_of: FolderOf, tmp_path: Path) -> None:
    """All layers in C++, and one operation at a time."""
    counts = []
    for backend in ("cpu", "reference"):
        llm = engine(folder_of("qwen3_moe_mixed"), expert_offload_path=str(tmp_path), attention_backend=backend)
        llm.generate([words(llm, 40, seed=3)], SamplingParams(temperature=0.0, max_tokens=1))
        counts.append([table[:, OutsideColumn.met] for table in tables(llm)])
    assert any(count.any() for count in counts[0])
    assert all(torch.equal(*pair) for pair in zip(*counts, strict=True))


def tables(llm: LLM) -> list[Tensor]:
    weights = llm.engine.loaded.decoder.weights
    return [weights[name] for name in sorted(weights) if name.endswith(experts.OUTSIDE)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB of experts in bf16, in which a layer's smallest pieces do not count."""
    return make_checkpoint(
        "qwen3_moe", tmp_path_factory.mktemp("large"), dtype=torch.bfloat16, hidden_size=256,
        moe_intermediate_size=512, num_experts=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64,
    )  # fmt: skip


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def own_pages(file: ExpertFile) -> int:
    """Bytes of the mapping of the file that are this process's own."""
    begin = f"{file._address(0):x}-"
    text = Path("/proc/self/smaps").read_text()
    entry = text[text.index(f"\n{begin}") :]
    found = re.search(r"Anonymous:\s+(\d+) kB", entry)
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The most memory that no file backs, as each matrix is placed."""
    gc.collect()
    seen = [anonymous()]
    place = ExpertFile.place

    def watched(self: ExpertFile, name: str, weight: Any) -> Any:
        seen.append(anonymous())
        return place(self, name, weight)

    monkeypatch.setattr(ExpertFile, "place", watched)
    yield lambda: max(seen) - seen[0]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts pages as Linux tells them")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_loading_takes_less_memory_than_the_experts(
    quantization: Any, large: Path, tmp_path: Path, peak: Callable[[], int]
) -> None:
    model = plain_config(large)
    size = expert_bytes(model, "bfloat16", quantization)
    budget = size // 4
    file = ExpertFile(str(tmp_path), model, budget)
    decoder = load_decoder(large, "bfloat16", quantization=quantization, outside=file)
    assert decoder.outside is file and file.stats().outside_bytes >= size
    assert 0 < peak() < expert_bytes(model, "bfloat16") // 2, "some matrices at a time, in all forms they pass through"
    kept = file.stats().kept_bytes
    assert budget * 0.9 < kept <= budget
    assert own_pages(file) == kept
    for table in file._tables.values():
        table[5, OutsideColumn.met] += 100  # the fifth of each layer, beyond those that are kept at first
    assert file.turn() == 2 and own_pages(file) == kept == file.stats().kept_bytes


def test_what_a_page_holds_does_not_change(large: Path, tmp_path: Path) -> None:
    file = ExpertFile(str(tmp_path), plain_config(large), 1 << 30)
    decoder = load_decoder(large, "bfloat16", outside=file)
    resident = load_decoder(large, "bfloat16")
    names = [name for name in decoder.matrices if ".experts." in name]

    def equal() -> bool:
        pairs = [(decoder.matrices[name], resident.matrices[name]) for name in names]
        assert all(isinstance(weight, cpu.Packed) for pair in pairs for weight in pair)
        return all(torch.equal(one.blocks, other.blocks) for one, other in pairs)  # type: ignore[union-attr]

    assert file.stats().kept_bytes == file.bytes and equal(), "all of them fit"
    for index in range(64):
        file._give_up(index)
    assert not file.stats().kept_bytes and equal()


def test_a_file_is_gone_with_its_engine(folder_of: FolderOf, tmp_path: Path) -> None:
    engine(folder_of("mixtral"), expert_offload_path=str(tmp_path))
    assert not list(tmp_path.iterdir()), "it has no name, so nothing is left whatever ends the process"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"expert_offload_path": "DIR"}, "has no experts; leave it out"),
    ("mixtral", {"expert_memory_size": 1}, "experts in a file: set expert_offload_path"),
    ("mixtral", {"expert_offload_path": "DIR/file/x"}, "a part of the path is a file|nothing can be written there"),
    ("mixtral", {"expert_offload_path": " "}, "must name a directory"),
]


@pytest.mark.parametrize(("kind", "settings", "told"), REFUSED)
def test_refusals(kind: str, settings: dict[str, Any], told: str, folder_of: FolderOf, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = {n: v.replace("DIR", str(tmp_path)) if isinstance(v, str) else v for n, v in settings.items()}
    with pytest.raises(ValueError, match=told):
        engine(folder_of(kind), **given)
    with pytest.raises(ValueError, match=told):
        preflight.check(EngineConfig(model=str(folder_of(kind)), **given))


def test_a_model_larger_than_memory_is_let_in(folder_of: FolderOf, tmp_path: Path) -> None:
    """Refused with the flag that lets it in; with that, a part of what is free is for the most used experts."""
    folder = str(folder_of("qwen3_moe"))
    model = plain_config(Path(folder))
    assert model.experts is not None
    model = replace(model, experts=replace(model.experts, count=64, inner=64 * 4096))
    with pytest.raises(ValueError, match="or leave its experts in a file: --expert-offload-path"):
        Footprint.of(EngineConfig(model=folder), model, 2 * GIB).check()
    asked = EngineConfig(model=folder, expert_offload_path=str(tmp_path))
    taken = Footprint.of(asked, model, 2 * GIB)
    taken.check()
    assert taken.kept_experts() == (2 * GIB - taken.rest - PROCESS_BYTES) // 2
    with pytest.raises(ValueError, match=r"expert_memory_size 3\.0 GiB is too much: 2\.0 GiB are free"):
        Footprint.of(asked.replace(expert_memory_size=3), model, 2 * GIB).check()


def test_the_speed_to_expect() -> None:
    """8 GiB of experts of which a token meets an eighth, 2 GiB in memory: three quarters of a GiB from the disk."""
    asked = ExpertsOutside("DIR", 9 * GIB, 8 * GIB, 2 * GIB, 1 / 8)
    assert asked.token_bytes == GIB and asked.hits == 0.25
    assert asked.seconds(2.0 * GIB) == pytest.approx(0.375)
    assert asked.told(2.0 * GIB).startswith(
        "9.0 GiB of weights; 8.0 GiB of them are experts in a file in DIR, of which"
    )
    assert asked.told(2.0 * GIB).endswith(
        "keeps 2.0 GiB; a token meets 1.000 GiB, 25% of it in memory, at 2.15 GB/s from the disk: at least 2.67 "
        "tokens/s of one sequence"
    )
    assert replace(asked, kept=8 * GIB).told(1e9).endswith("100% of it in memory, at 1.00 GB/s from the disk: "
                                                           "no reads while decoding")  # fmt: skip


def test_the_read_rate_is_of_all_that_was_written(tmp_path: Path) -> None:
    assert read_rate(str(tmp_path / "new"), 8 << 20) > 0
    assert not list((tmp_path / "new").iterdir())


def test_loading_says_it(folder_of: FolderOf, tmp_path: Path) -> None:
    llm = engine(folder_of("mixtral"), expert_offload_path=str(tmp_path), expert_memory_size=0)
    assert "experts in a file" in llm.capacity.experts and "tokens/s" in llm.capacity.experts
    assert not engine(folder_of("mixtral")).capacity.experts
    _: list[Trace] = run(llm, prompts_of(llm), SHORT)
    told = llm.engine.stats().experts
    assert told.met and not told.hits and not told.kept_bytes
