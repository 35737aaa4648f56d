"""Tables that are looked up: rows of packed weights are, to the bit, those of the table multiplied out.

V: rows of a table, H: their width.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from headrace.kernels import cpu, dispatch, ops, quantized
from headrace.kernels.formats import FORMATS
from headrace.kernels.quantized import Quantized, Rounded
from headrace.models.config import read_config
from headrace.models.decoder import Decoder, load_decoder
from headrace.models.shards import Unsent
from headrace.models.sizes import EMBED, HEAD, weight_bytes
from headrace.models.weights import StoredMatrix, load_weights
from tests.support.checkpoints import FolderOf
from tests.support.coded_weights import coded
from tests.support.gguf_files import theirs, tokens_of, write_gguf
from tests.support.naive_attention import prompt_logits

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason())),
]

DTYPES = [torch.float32, torch.bfloat16]
GROUPED = {name: form for name, form in FORMATS.items() if form.block} | {
    "W4 wide": FORMATS["W4 zeros"].grouped(48, "fp16"),
}
VECTORS = 20_000
"""More bytes than all norms of a model take here."""
INDEX = torch.tensor([129, 0, 63, 64, 7, 7, 127, 31])


def bits(x: Tensor) -> Tensor:
    """Whole numbers that differ wherever bits do, those of zeros too."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_rows_of_codes(isa: str, dtype: torch.dtype, name: str) -> None:
    """Of blocks that the 256 inputs that are widened together do not end with, too."""
    for blocks in (1, -(-300 // GROUPED[name].block)):
        weight = coded(GROUPED[name], 130, blocks)
        found = ops.look_up(Quantized(weight), INDEX, dtype)
        assert torch.equal(bits(found), bits(weight.dequantised(dtype)[INDEX]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_numbers(isa: str, dtype: torch.dtype) -> None:
    for width in (70, 71):
        numbers = torch.randn(130, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(ops.look_up(cpu.Packed(numbers), INDEX, dtype), numbers[INDEX])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_under_one_scale_each(isa: str, dtype: torch.dtype) -> None:
    """Codes for rows that are rounded are those of rows that are not."""
    weight = Rounded(torch.randn(130, 36, generator=torch.Generator().manual_seed(1)), "w8a8")
    table = ops.pack_table([weight])
    assert table.format.name == "int8" and not ops.has_rows(Quantized(weight))
    assert torch.equal(bits(ops.look_up(table, INDEX, dtype)), bits(weight.dequantised(dtype)[INDEX]))


def test_inputs_in_another_order(isa: str) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3)).int()
    weight = coded(FORMATS["W4 zeros"], 130, 2, order=order)
    assert torch.equal(ops.look_up(Quantized(weight), INDEX, torch.float32), weight.dequantised()[INDEX])


@pytest.mark.parametrize("number", [-1, 130])
def test_a_number_of_no_row_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"token of row 1 is {number}, of 130"):
        ops.look_up(Quantized(coded(FORMATS["Q4_K"], 130, 1)), torch.tensor([0, number]), torch.bfloat16)


def test_a_gated_weight_has_no_rows() -> None:
    gated = Quantized(coded(FORMATS["Q4_K"], 128, 1), gated=True)
    assert not ops.has_rows(gated)
    with pytest.raises(ValueError, match="rows of a table cannot be read"):
        cpu.packed_rows(gated, torch.tensor([0]), torch.bfloat16)


def multiplied_out(path: Path, dtype: torch.dtype) -> Decoder:
    """The model with a table of numbers, beside the same matrices."""
    stored: dict[str, StoredMatrix] = {}
    config = read_config(path)
    weights = load_weights(path, config, dtype, stored=stored)
    return Decoder(config, weights, stored=stored)


def held(decoder: Decoder) -> int:
    """Bytes of matrices and tables."""
    return sum({id(each): each.nbytes for each in (*decoder.matrices.values(), *decoder.tables.values())}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_file_of_codes(tied: bool, dtype: str, tmp_path: Path) -> None:
    """A head that is the table is held once, and logits have the bits that they have with a table multiplied out."""
    path = write_gguf(theirs("llama_tied" if tied else "llama"), tmp_path / "m.gguf", lambda _: Kind.Q5_0, tied=tied)
    decoder = load_decoder(path, dtype)  # type: ignore[arg-type]
    apart, tokens = multiplied_out(path, decoder.dtype), tokens_of(100)
    assert isinstance(decoder.tables[EMBED], quantized.Quantized) and isinstance(apart.tables[EMBED], Tensor)
    assert (decoder.tables[EMBED] is decoder.matrices[HEAD]) == tied and EMBED not in decoder.weights
    assert decoder.runs_whole == (dtype == "bfloat16")
    assert torch.equal(prompt_logits(decoder, tokens), prompt_logits(apart, tokens))


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_memory_is_told(tied: bool, kind: Kind, tmp_path: Path) -> None:
    """Tables that are multiplied out, as they are on a GPU, take more than those of codes."""
    model = theirs("llama_tied" if tied else "llama")
    path = write_gguf(model, tmp_path / "m.gguf", lambda name: kind if "embd" in name else Kind.Q4_0, tied=tied)
    decoder = load_decoder(path, "bfloat16")
    assert held(decoder) == pytest.approx(weight_bytes(decoder.config, "bfloat16"), abs=VECTORS)
    if kind is Kind.Q6_K:
        told = weight_bytes(decoder.config, "bfloat16", on_gpu=True)
        assert held(multiplied_out(path, torch.bfloat16)) == pytest.approx(told, abs=VECTORS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_memory_of_tensor_ranks_is_told(tied: bool, rank: int, tmp_path: Path) -> None:
    """Each has the whole table, and the first the head."""
    path = write_gguf(theirs("llama_tied" if tied else "llama"), tmp_path / "m.gguf", lambda _: Kind.Q4_0, tied=tied)
    decoder = load_decoder(path, "bfloat16", tensor=Unsent(rank, 2))
    told = weight_bytes(decoder.config, "bfloat16", rank=rank, ranks=2)
    assert held(decoder) == pytest.approx(told, abs=VECTORS)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_progress_counts_what_is_kept(tied: bool, tmp_path: Path) -> None:
    path = write_gguf(theirs("llama_tied" if tied else "llama"), tmp_path / "m.gguf", lambda _: Kind.Q4_0, tied=tied)
    told: list[tuple[int, int]] = []
    decoder = load_decoder(path, "bfloat16", lambda *each: told.append(each))
    assert told[-1][0] == told[-1][1] == pytest.approx(held(decoder), abs=VECTORS)


@pytest.mark.parametrize("kind", ["llama_tied", "gemma3"])
def test_a_folder_of_numbers(kind: str, folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of(kind), "bfloat16")
    assert decoder.tables[EMBED] is decoder.matrices[HEAD] and EMBED not in decoder.weights
    with dispatch.force("torch"):
        plain = load_decoder(folder_of(kind), "bfloat16")
        want = plain.embed(INDEX, INDEX)
    assert isinstance(plain.tables[EMBED], Tensor)
    assert torch.equal(decoder.embed(INDEX, INDEX), want)


def test_a_rounded_head_is_no_table(folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of("llama_tied"), "bfloat16", quantization="int8")
    assert decoder.tables[EMBED] is decoder.weights[EMBED] and isinstance(decoder.matrices[HEAD], Quantized)
