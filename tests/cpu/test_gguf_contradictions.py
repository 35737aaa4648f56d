"""GGUF files whose metadata and tensors contradict each other, or say something of another kind than is read: one error
that names file and key, before anything is made in a size that they claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from headrace.models.config import read_config
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from tests.support.gguf_families import write_family
from tests.support.gguf_files import theirs, write_gguf

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def f16(_: str) -> Kind:
    return Kind.F16


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("block_count", r"blk\.1\..* is of no layer: llama\.block_count is 1, with 1 layers"),
        ("nextn_predict_layers", r"blk\.1\..* is of no layer: llama\.block_count is 2, with 1 layers"),
    ],
)
def test_layers_that_would_be_left_out(key: str, words: str, tmp_path: Path) -> None:
    path = write_gguf(theirs(), tmp_path / "m.gguf", f16, claims={f"llama.{key}": 1})
    with pytest.raises(ValueError, match=rf"m\.gguf: {words}"):
        load_decoder(path)


@pytest.mark.parametrize(("block", "kind"), [(7, "attn_norm"), (2, "nextn.enorm")])
def test_further_blocks_are_those_that_guess(block: int, kind: str, tmp_path: Path) -> None:
    """A file may have blocks for that which block_count does not count; others are of no layer."""

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor(f"blk.{block}.{kind}.weight", np.zeros(256, np.float32))
        if "nextn" in kind:
            writer.add_tensor(f"blk.{block}.attn_norm.weight", np.zeros(256, np.float32))

    write_family("granite", tmp_path / "m.gguf", f16, add)
    if "nextn" in kind:
        assert load_decoder(tmp_path / "m.gguf").config.layers == 2
        return
    with pytest.raises(ValueError, match=r"m\.gguf: blk\.7\.attn_norm\.weight is of no layer"):
        load_decoder(tmp_path / "m.gguf")


def test_blocks_that_are_counted_alone_take_no_memory(tmp_path: Path) -> None:
    claims = {"llama.block_count": 2 + 4_000_000_000, "llama.nextn_predict_layers": 4_000_000_000}
    path = write_gguf(theirs(), tmp_path / "m.gguf", f16, claims=claims)
    assert load_decoder(path).config.layers == 2


def test_a_gate_of_two_rows(tmp_path: Path) -> None:
    """A gate of shared experts is a vector in the file."""

    def change(writer: GGUFWriter) -> None:
        (info,) = (each["blk.0.ffn_gate_inp_shexp.weight"] for each in writer.tensors)
        info.tensor, info.shape, info.nbytes = np.concatenate([info.tensor] * 2), (2, 256), 2 * info.nbytes

    write_family("qwen2_moe", tmp_path / "m.gguf", f16, change)
    with pytest.raises(ValueError, match=r"m\.gguf: .*shared_expert_gate\.weight of shape \[2, 256\]") as told:
        load_decoder(tmp_path / "m.gguf")
    assert "do not match its metadata" in str(told.value) and "config.json" not in str(told.value)


CASES: dict[str, tuple[str, Callable[[GGUFWriter], object], str]] = {
    "granite's positions by a number": (
        "granite", lambda w: w.add_uint32("granite.rope.scaling.finetuned", 0), "finetuned is neither true nor false"
    ),
    "positions of Mamba-2 models by a number": (
        "granite4_hybrid", lambda w: w.add_uint32("granitehybrid.rope.scaling.finetuned", 0), "finetuned is neither"
    ),
    "windows of fewer layers": (
        "gemma2", lambda w: w.add_sliding_window_pattern([True]), r"gemma2\.attention\.sliding_window_pattern does not"
    ),
    "windows of more layers": (
        "exaone4", lambda w: w.add_sliding_window_pattern([True] * 9), r"sliding_window_pattern does not"
    ),
    "windows by a flag": (
        "gemma2", lambda w: w.add_bool("gemma2.attention.sliding_window_pattern", True), "window_pattern is True"
    ),
    "indexers of fewer layers": (
        "glm_dsa", lambda w: w.add_array("glm-dsa.attention.indexer.types", [True, False]), r"indexer\.types does not"
    ),
    "indexers by name": (
        "glm_dsa", lambda w: w.add_array("glm-dsa.attention.indexer.types", ["full"] * 3), r"indexer\.types does not"
    ),
    "recurrent layers of a longer model": (
        "qwen3_5", lambda w: w.add_array("qwen35.attention.recurrent_layers", [True] * 6), "recurrent_layers does not"
    ),
    "recurrent layers by a flag": (
        "qwen3_5", lambda w: w.add_bool("qwen35.attention.recurrent_layers", True), "recurrent_layers does not"
    ),
    "fewer blocks than layers": (
        "gemma4_small", lambda w: w.add_block_count(1), r"sliding_window_pattern does not .*block_count says 1\)"
    ),
    "more blocks than layers": (
        "gemma4_small", lambda w: w.add_block_count(5), r"sliding_window_pattern does not .*block_count says 5\)"
    ),
    "more layers that share than there are": (
        "gemma4_small", lambda w: w.add_shared_kv_layers(5), "shared_kv_layers is 5 of 4 layers"
    ),
    "layers that share beyond all memory": (
        "gemma4_small", lambda w: w.add_uint64("gemma4.attention.shared_kv_layers", 2**63), "shared_kv_layers is 9223"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_named_by_file_and_key(case: str, tmp_path: Path) -> None:
    kind, change, words = CASES[case]
    write_family(kind, tmp_path / "m.gguf", f16, change)
    for read in (read_config, plain_config):
        with pytest.raises(ValueError, match=rf"m\.gguf: .*{words}"):
            read(tmp_path / "m.gguf")
