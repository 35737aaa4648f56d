"""Rotary positions: cos and sin by absolute position. T: rows, N: elements that are rotated, of all kinds together.

The frequencies are transformers' own (ROPE_INIT_FUNCTIONS), but for the two simplest kinds. Tables are filled in blocks
of fixed shape, each always computed whole: the cosine of one position then has the same bits whenever and for whomever
it is computed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headrace.models.spec import LENGTH_DEPENDENT, RopeKind, RopeSpec

BLOCK = 64
"""Positions in a block of the table."""
OWN: tuple[RopeKind, ...] = ("default", "proportional")
"""Kinds that are computed here, and need no configuration."""
CACHED_BLOCKS = 1024
"""Blocks kept for dynamic NTK, whose table differs by sequence length."""


class Rope:
    """Table of rotations of one model: rows of (cos, sin), those of queries behind where a factor of their position is
    in them, or that factor alone, and those of layers that rotate otherwise (`local`) behind that.

    With dynamic NTK the frequencies depend on the length of the sequence. As transformers computes it, a token at
    position i of a request with prompt length L is rotated for length max(L, i + 1), or the model's own length if that
    is greater; callers pass max(L, i + 1) as `lengths`, so that the rotation does not depend on the schedule. longrope
    has two sets of frequencies, one for lengths beyond the model's own.
    """

    def __init__(
        self, spec: RopeSpec, head_dim: int, local: RopeSpec | None = None, local_dim: int | None = None
    ) -> None:
        self.spec = spec
        self.head_dim = head_dim
        self.by_length = spec.kind in LENGTH_DEPENDENT
        self.local = None if local is None else Rope(local, local_dim or head_dim)
        self.width: int = spec.columns(head_dim) + (0 if self.local is None else self.local.width)
        self._carrier = None if spec.kind in OWN else _carrier(spec, head_dim)
        self._table = torch.empty(0, self.width)
        self._frequencies = lru_cache(CACHED_BLOCKS)(self._compute_frequencies)
        self._block = lru_cache(CACHED_BLOCKS)(self._compute_block)

    def at(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """(cos, sin) [T, N] fp32 of positions [T]; `lengths` [T] is needed where rotations depend on them."""
        if not self.by_length:
            return self.table(positions)[positions]
        if lengths is None:
            raise ValueError("rope_lengths is needed: this model's rotation depends on the sequence length")
        if not len(positions):
            return self._table
        own = self.spec.original_length
        length = lengths.clamp(min=own, max=own + 1 if self.spec.kind == "longrope" else None)
        wanted, row_block = torch.unique(torch.stack((length, positions // BLOCK), dim=1), dim=0, return_inverse=True)
        table = torch.stack([self._block(length, index) for length, index in wanted.tolist()])
        return table[row_block, positions % BLOCK]

    def table(self, positions: Tensor) -> Tensor:
        """(cos, sin) [at least max(positions) + 1, N] fp32 by position, where they depend on nothing else."""
        if not len(positions):
            return self._table
        return self._grown(int(positions.numpy().max() if positions.is_cpu else positions.max()) + 1)

    def _grown(self, rows: int) -> Tensor:
        """A table of at least so many rows; several threads may ask at once."""
        table = self._table
        have = len(table) // BLOCK
        if rows > have * BLOCK:
            need = max(-(-rows // BLOCK), 2 * have)
            blocks = [self._compute_block(self.spec.original_length, index) for index in range(have, need)]
            self._table = table = torch.cat((table, *blocks))
        return table

    def _compute_block(self, length: int, index: int) -> Tensor:
        """(cos, sin) [BLOCK, N] of positions index * BLOCK onwards, in a sequence of `length`."""
        inverse, factor = self._frequencies(length)
        positions = torch.arange(index * BLOCK, (index + 1) * BLOCK).float()
        angles = positions[:, None] * inverse
        turns = [torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)]
        if self.spec.query_beta:
            factors = self._query_factors(positions)[:, None]
            turns.append(factors if self.spec.factor_alone else turns[0] * factors)
        if self.local is not None:
            turns.append(self.local._compute_block(length, index))
        return torch.cat(turns, dim=-1)

    def _query_factors(self, positions: Tensor) -> Tensor:
        """What queries at positions [BLOCK] are multiplied by (see RopeSpec)."""
        periods = torch.floor(
            (positions + self.spec.query_ahead) / dict(self.spec.parameters)["original_max_position_embeddings"]
        )
        return 1 + self.spec.query_beta * torch.log(1 + periods)

    def _compute_frequencies(self, length: int) -> tuple[Tensor, float]:
        """Angle per position, one for two elements that are rotated, and the factor on cos and sin."""
        parameters, width = dict(self.spec.parameters), self.spec.width(self.head_dim)
        if self.spec.kind in OWN:
            inverse = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
            if self.spec.kind == "proportional":
                inverse[int(parameters.get("partial_rotary_factor", 1.0) * width // 2) :] = 0.0
                inverse /= parameters.get("factor", 1.0)
            return inverse, 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # transformers passes the length as a tensor once it exceeds the model's own: the arithmetic is then fp32
        given = torch.tensor(length) if length > self.spec.original_length else None
        return ROPE_INIT_FUNCTIONS[self.spec.kind](self._carrier, seq_len=given)


def _carrier(spec: RopeSpec, head_dim: int) -> Any:
    """A transformers configuration that holds nothing but what its rope functions read."""
    from headrace.models.families.llama_config import LlamaConfig

    return LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=spec.original_length,
        rope_parameters={name: list(x) if isinstance(x, tuple) else x for name, x in spec.parameters},
    )
