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
from headrace.kernels.triton.weights import GpuWeight


class Greatest(NamedTuple):
    """The greatest logit of each row, and the first token that has it. NaN is above all."""

    values: list[float]
    tokens: list[int]

    def of(self, rows: Sequence[int]) -> Greatest:
        """Those of some rows."""
        return Greatest([self.values[row] for row in rows], [self.tokens[row] for row in rows])


class InputsEnds:
    """What makes the inputs of all layers (models.mixed_layers.layer_inputs): table [V, L P] of tokens, `projection`
    [L P, H] and norm [P] of what enters the first layer, and what each and their sum are multiplied by. Raises
    ValueError for those that do not fit."""

    def __init__(
        self, table: Table, projection: Weight, norm: Tensor, eps: float, scales: tuple[float, float, float]
    ) -> None:
        rows, width = table.shape
        check("norm of inputs", norm, torch.bfloat16, (len(norm),))
        if isinstance(projection, Tensor | GpuWeight) or projection.shape[0] != width:
            raise ValueError(f"layer_inputs.weight must be packed and of {width} outputs, got {list(projection.shape)}")
        if isinstance(table, Tensor):
            check("layer_embed.weight", table, torch.bfloat16, (rows, width))
        own, projected, summed = scales
        self.handle = require().InputsTable(
            table=table.data_ptr() if isinstance(table, Tensor) else 0, vocabulary=rows,
            packed=None if isinstance(table, Tensor) else table.matrix(0), projection=projection.matrix(0),
            norm=norm.data_ptr(), width=len(norm), eps=eps, table_scale=own, projected_scale=projected,
            sum_scale=summed,
        )  # fmt: skip
        self._keep = (table, projection, norm)


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
        inputs: InputsEnds | None = None,
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
            inputs=None if inputs is None else inputs.handle,
        )  # fmt: skip
        # The addresses are theirs.
        self._keep = (embed, head, inputs, *(weights.get(f"final_norm.{kind}") for kind in ("weight", "bias")))


class ModelStep:
    """A step from its tokens to its logits, and the steps behind it in which every row goes on by one position.

    turns [positions, N] fp32: the rotation of each position (see ops.rotary), None for none. Raises ValueError for a
    step of another model.
    """

    def __init__(self, ends: Ends, blocks: block.Blocks, over: StepOver, turns: Tensor | None) -> None:
        rows, layers = over.rows, len(blocks.heads)
        blocks.check_heads(over)
        if len(over.layers) != layers:
            raise ValueError(f"the step has attention in {len(over.layers)} layers, the model in {layers}")
        count = 0 if turns is None else len(turns)
        table, width = blocks.turn_of(turns, count)
        self._over = over
        self._whole = require().ModelStep(
            ends.handle, blocks.blocks, over.steps[0].handle, over.layers, turns=table, turn_rows=count, rotary=width,
            adapted=block.numbers_of(blocks.adapted, rows),
        )  # fmt: skip
        self._keep = (ends, blocks, turns)  # what the C++ object refers to
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
        self._over.go_on_by_one()
        return self.run(tokens, recurrence)
