"""How one vector is made of a text. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolingKind = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model makes one vector of a text's hidden states: the last token's, their mean, or the first token's.

    `normalize`: to length 1. `sizes`: to which the vector may be cut (Matryoshka); (): any; None: none. `obstacle`: why
    there are no embeddings of this checkpoint. `labels`: of a checkpoint with a classifier's head, the names of its
    outputs, which are given in the vector's place.
    """

    kind: PoolingKind = "last"
    normalize: bool = True
    sizes: tuple[int, ...] | None = None
    obstacle: str = ""
    labels: tuple[str, ...] = ()
