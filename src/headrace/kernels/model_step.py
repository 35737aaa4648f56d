"""A step from its tokens to its logits in one C++ call: what comes before the layers and after them goes with them.

T: rows; H: hidden size; V: vocabulary; N: elements of a head that are rotated. bf16, logits in fp32. The bits are those
of one call after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import block
from headrace.kernels.cpu_step import StepOver
from headrace.kernels.extension import check, require
from headrace.kernels.layer_shape import LayerShape
from headrace.kernels.native_weights import matrix_of, norm_of
from headrace.kernels.ops import Table, Weight
from headrace.kernels.recurrent_step import NO_RECURRENCE, PreparedRecurrence


class Greatest(NamedTuple):
    """The greatest logit of each row, and the first token that has it. NaN is above all."""

    values: list[float]
    tokens: list[int]

    def of(self, rows: Sequence[int]) -> Greatest:
        """Those of some rows."""
        return Greatest([self.values[row] for row in rows], [self.tokens[row] for row in rows])


class Ends:
    """What a model has beside its layers: the table of tokens, embed [V, H], the final norm and the head [V, H].

    weights and matrices: by name, `final_norm.weight`, `final_norm.bias` and `head.weight` among them. embed_scale, of
    a bf16 number, multiplies embeddings; logit_scale and logit_cap: see ops.soft_cap. Raises ValueError for those that
    do not fit layers of `shape`.
    """

    def __init__(
        self,
        shape: LayerShape,
        embed: Table,
        weights: Mapping[str, Tensor],
        matrices: Mapping[str, Weight],
        embed_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_cap: float | None = None,
    ) -> None:
        head, rows = matrices["head.weight"], embed.shape[0]
        if isinstance(embed, Tensor):
            check("embed.weight", embed, torch.bfloat16, (rows, shape.hidden))
        elif embed.shape[1] != shape.hidden:
            raise ValueError(f"embed.weight must be [{rows}, {shape.hidden}], got {list(embed.shape)}")
        norm, matrix = norm_of(shape, weights, "final_norm"), (head.shape[0], shape.hidden)
        self.width = head.shape[0]
        self.handle = require().Ends(
            embed.data_ptr() if isinstance(embed, Tensor) else 0, rows, norm, shape.eps,
            matrix_of(weights, matrices, "head", matrix), embed_scale=embed_scale, logit_scale=logit_scale,
            logit_cap=logit_cap or 0.0, packed=None if isinstance(embed, Tensor) else embed.matrix(0),
        )  # fmt: skip
        # The addresses are theirs.
        self._keep = (embed, head, *(weights.get(f"final_norm.{kind}") for kind in ("weight", "bias")))


class ModelStep:
    """A step from its tokens to its logits, and the steps behind it in which every row goes on by one position.

    turns [positions, N] fp32: the rotation of each position (see ops.rotary), None for none. Raises ValueError for a
    step of another model.
    """

    def __init__(self, ends: Ends, blocks: block.Blocks, over: StepOver, turns: Tensor | None) -> None:
        rows, layers = over.step.q_shape[0], sum(layer.net is None for layer in blocks.layers)
        blocks.check_heads(over)
        if len(over.layers) != layers:
            raise ValueError(f"the step has attention in {len(over.layers)} layers, the model in {layers}")
        count = 0 if turns is None else len(turns)
        table, width = blocks.turn_of(turns, count)
        self._step = over.step.handle
        self._whole = require().ModelStep(
            ends.handle, blocks.blocks, self._step, over.layers, turns=table, turn_rows=count, rotary=width,
            adapted=block.numbers_of(blocks.adapted, rows),
        )  # fmt: skip
        self._keep = (ends, blocks, over, turns)  # what the C++ object refers to
        self.logits = torch.empty((rows, ends.width))
        self._scratch = torch.empty(self._whole.scratch(), dtype=torch.bfloat16)
        self._addresses = (self._scratch.data_ptr(), self.logits.data_ptr())

    def run(self, tokens: list[int], recurrence: PreparedRecurrence | None = None) -> Greatest:
        """tokens [T] -> the greatest of what is in `logits` [T, V] then, until the next call. recurrence: of a model
        with recurrent layers. Raises ValueError for tokens and positions that are in no table, and for segments that
        do not fit."""
        states = NO_RECURRENCE if recurrence is None else recurrence.arguments
        return Greatest(*self._whole.run(tokens, *self._addresses, torch.get_num_threads(), *states))

    def run_next(self, tokens: list[int], recurrence: PreparedRecurrence | None = None) -> Greatest:
        """`run` with every row at its next position, in the chunk in which it is. Raises ValueError too where one is
        full. After any error begin with a new step: rows may have gone on."""
        self._step.go_on_by_one(torch.get_num_threads())
        return self.run(tokens, recurrence)
