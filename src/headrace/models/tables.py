"""Embedding tables, whose rows are looked up and not multiplied by: of tokens, of positions, of what tokens add to
layers. Tied embeddings (a head that is the table of tokens) are held once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.kernels import cpu, ops
from headrace.models.layers import Matrices, Weights
from headrace.models.sizes import EMBED, HEAD, LOOKED_UP
from headrace.models.weights import StoredMatrix


def is_tied(weights: Mapping[str, Tensor]) -> bool:
    """Whether the head is the table of tokens, both being numbers."""
    return HEAD in weights and weights[HEAD] is weights.get(EMBED)


def take_tables(
    weights: Weights, stored: Mapping[str, StoredMatrix], matrices: Matrices, tied: bool
) -> dict[str, ops.Table]:
    """The tables [V, H] of a decoder whose matrices are packed. Those that a file has as codes stay codes. A head that
    is the table too is both, unless it was rounded: its numbers leave `weights`. tied: whether it is, where those of
    the file are numbers."""
    tables: dict[str, ops.Table] = {name: weights[name] for name in LOOKED_UP if name in weights}
    found = matrices.get(HEAD)
    head = found if found is not None and ops.has_rows(found) else None
    if tied and isinstance(head, cpu.Packed):
        tables[EMBED] = head
        del weights[EMBED]
    for name, matrix in stored.items():
        if name in LOOKED_UP:
            both = name == EMBED and matrix is stored.get(HEAD)
            tables[name] = head if both and head is not None else ops.pack_table(matrix.read())
    return tables
