"""Blocks of every type of GGUF stand for the numbers that ggml's own package finds in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from headrace.kernels import quantized
from headrace.kernels.formats import CODES, FORMATS
from headrace.kernels.quantized import Quantized
from headrace.models.gguf import blocks
from headrace.models.gguf.blocks import coded
from headrace.models.gguf.types import OTHERS, TYPES, TensorType
from tests.support.gguf_files import meaning

pytestmark = pytest.mark.cpu
QUANTISED = [each for each in TYPES.values() if not each.plain]
MOST = 1e4
"""Scales of random bits that are larger, or no number, are drawn again."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def random_rows(kind: TensorType, rows: int = 9, numbers: int = 768) -> np.ndarray:
    """uint8 [rows, bytes] of random bits."""
    made = np.random.default_rng(3)
    blocks = made.integers(0, 256, (rows * numbers // kind.block, kind.size), dtype=np.uint8)
    if kind.name == "NVFP4":
        blocks[:, :4] &= 127  # scales have no sign
    with np.errstate(all="ignore"):
        while (bad := ~(np.abs(meaning(blocks, Kind[kind.name])) < MOST).all(-1)).any():
            blocks[bad] = made.integers(0, 256, (bad.sum(), kind.size), dtype=np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(kind: TensorType) -> None:
    """To the bit, of random bits."""
    rows = random_rows(kind)
    found = coded(kind.name, torch.from_numpy(rows))
    assert np.array_equal(found.dequantised().numpy(), meaning(rows, Kind[kind.name]))
    table = found.format.codes.table
    if table and found.format.codes.name != "e2m1":
        used = set(found.codes.unique().tolist())
        assert used == {code for code, value in enumerate(table) if value}, "every number but the zeros of no file"


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_slices_of_rows_make_the_whole(kind: TensorType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken apart and packed slice by slice, the last ones smaller."""
    rows = torch.from_numpy(random_rows(kind, rows=330))
    whole = Quantized(coded(kind.name, rows))
    monkeypatch.setattr(blocks, "SLICE", 100)
    monkeypatch.setattr(quantized, "SLICE", 128)
    found = Quantized(coded(kind.name, rows))
    assert torch.equal(found.codes, whole.codes) and torch.equal(found.scales, whole.scales)


def test_a_scale_of_nvfp4_that_is_no_number_is_refused() -> None:
    rows = torch.from_numpy(random_rows(TYPES[40]))
    rows[3, 37] = 0xFF
    with pytest.raises(ValueError, match="a scale is NaN"):
        coded("NVFP4", rows)


def test_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        assert (Kind(number).name, *GGML_QUANT_SIZES[Kind(number)]) == (kind.name, kind.block, kind.size)
        assert kind.held == (kind.size * 8 if kind.plain else FORMATS[kind.name].bits)
    known = {each.value: each.name for each in Kind}
    assert all(known[number] == name for number, name in OTHERS.items())


def test_tables_in_whole_numbers() -> None:
    """As a GPU has them, in a byte each."""
    for codes in CODES.values():
        if codes.table and codes.name not in ("e2m1", "nf4"):
            table, unit = codes.whole()
            assert (table.float() / unit).tolist() == list(codes.table)
