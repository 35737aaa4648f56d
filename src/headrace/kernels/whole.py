"""A step from its tokens to its logits in one C++ call: what comes before the layers and after them goes with them.

T: rows; H: hidden size; V: vocabulary; N: elements of a head that are rotated. bf16, logits in fp32. The bits are those
of one call after another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.kernels import block
from headrace.kernels.extension import check, require
from headrace.kernels.ops import Weight
from headrace.kernels.step import StepOver


class Ends:
    """What a model has beside its layers: the table of tokens, embed [V, H], the final norm and the head [V, H].

    weights and matrices: by name, `embed.weight`, `final_norm.weight`, `final_norm.bias` and `head.weight` among them.
    Raises ValueError for those that do not fit layers of `shape`.
    """

    def __init__(self, shape: block.Shape, weights: Mapping[str, Tensor], matrices: Mapping[str, Weight]) -> None:
        embed, head = weights["embed.weight"], matrices["head.weight"]
        check("embed.weight", embed, torch.bfloat16, (len(embed), shape.hidden))
        norm, matrix = block.norm_of(shape, weights, "final_norm"), (head.shape[0], shape.hidden)
        self.width = head.shape[0]
        self._ends = require().Ends(
            embed.data_ptr(), len(embed), norm, shape.eps, block.matrix_of(weights, matrices, "head", matrix)
        )
        # The addresses are theirs.
        self._keep = (embed, head, *(weights.get(f"final_norm.{kind}") for kind in ("weight", "bias")))

    def run(self, blocks: block.Blocks, tokens: Tensor, turns: Tensor | None, over: StepOver) -> Tensor:
        """tokens int64 [T] -> logits fp32 [T, V], with these layers in between.

        turns [positions, N] fp32: the rotation of each position (see ops.rotary), None for none. Raises ValueError for
        tokens and positions that are in no table, and for a step of another model.
        """
        spec, (rows, heads, dim) = blocks.shape.attention, over.step.q_shape
        ours = (len(blocks.blocks), spec.heads, spec.kv_heads, spec.head_dim)
        theirs = (len(over.kinds), heads, over.step.kv_shape[1], dim)
        if ours != theirs:
            raise ValueError(f"the step is of (layers, heads, KV heads, head size) {theirs}, the model of {ours}")
        check("tokens", tokens, torch.int64, (rows,))
        count = 0 if turns is None else len(turns)
        table, width = blocks.turn_of(turns, count)
        scratch = torch.empty(require().whole_scratch(blocks.blocks[0], width, rows), dtype=torch.bfloat16)
        logits = torch.empty((rows, self.width))
        over.run_whole(self._ends, blocks.blocks, tokens, (table, count, width), scratch, logits)
        return logits
