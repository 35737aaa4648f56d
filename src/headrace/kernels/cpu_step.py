"""Attention of one engine step over the local pools: `cpu.append` and `cpu.attend` in one call for each layer, or as
a part of all layers at once (kernels.block).

T: rows; Hq, Hkv: query and KV heads; D: head size. Index data is checked once for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.config import AttentionSpec
from headrace.kernels.cpu_attention import check_pool, keys_at
from headrace.kernels.extension import TYPES, address, check, require, supports
from headrace.kernels.records import Pool, QKRotary, StepInputs
from headrace.kernels.recurrent_step import NO_RECURRENCE, PreparedRecurrence

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native

Heads = tuple[int, int, int]
"""Query heads, KV heads and their size."""


class Pools:
    """The pools of all layers, checked once. shapes: (slots, Hkv, D) of each; None: all have that of the first. Raises
    ValueError where they have others."""

    def __init__(self, pools: Sequence[Pool], shapes: Sequence[tuple[int, int, int]] | None = None) -> None:
        self.layers = pools
        self.shapes = [pools[0].shape] * len(pools) if shapes is None else list(shapes)
        self.dtype = pools[0].k.dtype
        for each, shape in zip(pools, self.shapes, strict=True):
            check_pool(each, self.dtype, shape)
        self.addresses = [(keys_at(each), each.v.data_ptr()) for each in pools]


class Step:
    """A step prepared from its inputs, whose tensors it keeps. Raises ValueError for what does not fit the pools."""

    def __init__(self, step: StepInputs) -> None:
        if not supports(step.dtype):
            raise ValueError(f"the C++ kernels take bfloat16 or float32, got {step.dtype}")
        positions, slots, offsets, bias, heads = step.positions, step.slots, step.offsets, step.bias, step.heads
        rows, (slot_count, kv_heads, dim) = len(positions), step.shape
        self.dtype, self.shape = step.dtype, step.shape
        self.q_shape, self.kv_shape = (rows, heads, dim), (rows, kv_heads, dim)
        self._keep = (step.items, slots, bias)  # the C++ step holds their addresses
        check("positions", positions, torch.int64, (rows,))
        check("slots", slots, torch.int32, (rows,))
        check("offsets", offsets, torch.int32, (rows,))
        if bias is not None:
            check("bias", bias, torch.float32, (heads, bias.shape[-1]))
        self.handle = require().AttentionStep(
            TYPES[step.dtype], positions.data_ptr(), slots.data_ptr(), offsets.data_ptr(), address(bias),
            bias_len=0 if bias is None else bias.shape[-1], rows=rows, heads=heads, kv_heads=kv_heads, dim=dim,
            slot_count=slot_count, scale=step.scale, cap=step.cap or 0.0, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._kinds = {window: self._add(window, each) for window, each in step.items.items()}

    def go_on(self, positions: Tensor, offsets: Tensor) -> None:
        """Other positions and offsets for the rows of the same items. Raises ValueError, with nothing changed, where
        they do not fit."""
        rows = self.q_shape[0]
        check("positions", positions, torch.int64, (rows,))
        check("offsets", offsets, torch.int32, (rows,))
        self.handle.go_on(positions.data_ptr(), offsets.data_ptr(), torch.get_num_threads())

    def _add(self, window: int | None, items: Tensor) -> int:
        check("items", items, torch.int32, (items.shape[0], 4))
        return self.handle.add_items(items.data_ptr(), items.shape[0], window or 0)

    def __call__(
        self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k, v [T, Hkv, D] in the pool, then attends: q [T, Hq, D] -> [T, Hq, D], in new memory.

        Rows of q, k and v must be contiguous each, but may lie apart. sinks: see Mask.
        """
        check_pool(pool, self.dtype, self.shape)
        q_stride = self._row_stride("q", q, self.q_shape)
        k_stride, v_stride = self._row_stride("k", k, self.kv_shape), self._row_stride("v", v, self.kv_shape)
        out = torch.empty(self.q_shape, dtype=self.dtype)
        layer = self.layer((keys_at(pool), pool.v.data_ptr()), window, sinks)
        layer.run(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q_stride=q_stride, k_stride=k_stride,
            v_stride=v_stride,
        )  # fmt: skip
        return out

    def layer(
        self, pool: tuple[int, int], window: int | None, sinks: Tensor | None = None, stores: bool = True
    ) -> native.StepLayer:
        """A layer with its pool at these addresses. stores: as of over_layers."""
        if sinks is not None:
            check("sinks", sinks, torch.float32, self.q_shape[1:2])
        return require().StepLayer(self.handle, self._kinds[window], *pool, address(sinks), stores=stores)

    def projected(
        self, pool: Pool, heads: Tensor, rotary: QKRotary, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The same from projected heads [T, Hq + 2 Hkv, D]."""
        return self(pool, *rotary(heads), window, sinks)

    def over(self, pools: Pools, windows: Sequence[int | None], sinks: Sequence[Tensor] | None = None) -> StepOver:
        """The step in layers with these pools, windows and sinks. Raises ValueError for what does not fit."""
        if (pools.shapes[0], pools.dtype) != (self.shape, self.dtype) or len(windows) != len(pools.layers):
            raise ValueError(
                f"{len(windows)} layers need pools of {self.shape} in {self.dtype}, "
                f"got {len(pools.layers)} of {pools.shapes[0]} in {pools.dtype}"
            )
        each = [None] * len(windows) if sinks is None else sinks
        places = zip(pools.addresses, windows, each, strict=True)
        return StepOver([self], pools, [self.layer(*place) for place in places], (self._heads,) * len(windows))

    @property
    def _heads(self) -> Heads:
        return self.q_shape[1], *self.kv_shape[1:]

    def _row_stride(self, name: str, x: Tensor, shape: tuple[int, int, int]) -> int:
        """Elements from row to row of x."""
        if x.shape != shape or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(f"{name} must be {list(shape)} of {self.dtype}, got {list(x.shape)} of {x.dtype}")
        row, head, one = x.stride()
        if one != 1 or (head != shape[2] and shape[1] != 1):
            raise ValueError(f"{name}: each row must be contiguous, got strides {x.stride()}")
        return row


def over_layers(
    steps: Mapping[tuple[int, int], Step], pools: Pools, spec: AttentionSpec, sinks: Sequence[Tensor] | None = None
) -> StepOver:
    """A step in the layers of a model that differ in their heads, or some of which attend to the keys and values of
    another and store none: `steps` by (Hkv, D), of the same rows."""
    layers = []
    for index in range(spec.layers):
        source = spec.source(index)
        step = steps[spec.shape(index)]
        own = None if sinks is None else sinks[index]
        layers.append(step.layer(pools.addresses[source], spec.windows[index], own, stores=source == index))
    heads = tuple((spec.heads, *spec.shape(index)) for index in range(spec.layers))
    return StepOver(list(steps.values()), pools, layers, heads)


class StepOver:
    """A step's attention in the layers of a model, made by Step.over or over_layers. heads: of each layer."""

    def __init__(
        self, steps: Sequence[Step], pools: Pools, layers: list[native.StepLayer], heads: tuple[Heads, ...]
    ) -> None:
        self.steps, self.pools, self.layers, self.heads = steps, pools, layers, heads

    @property
    def rows(self) -> int:
        return self.steps[0].q_shape[0]

    def go_on_by_one(self) -> None:
        """Every row at its next position, in the chunk in which it is. Raises ValueError, with nothing changed, where
        one is full."""
        threads = torch.get_num_threads()
        for step in self.steps:  # of the same rows: the first is refused, or none
            step.handle.go_on_by_one(threads)

    def run(
        self,
        blocks: Sequence[native.Block],
        x: Tensor,
        turn: tuple[int, int],
        qkv: Tensor,
        attended: Tensor,
        scratch: Tensor,
        threads: int,
        recurrence: PreparedRecurrence | None = None,
        adapted: int = 0,
        inputs: tuple[int, int] = (0, 0),
    ) -> None:
        """The first layers, whose C++ blocks these are: x [T, H] becomes what the last of them leaves.

        qkv, attended and scratch are overwritten: they have room for any of the blocks (Block.mixed_size,
        attended_size and scratch). turn: address of the rotations and the number of elements that they turn
        (Block.before). recurrence: of recurrent layers. adapted: address of the numbers of the rows' adapters, int64
        [T]; 0 for none. inputs: address of what enters each layer beside x, [T, L, P], and the length of its rows.
        """
        check("x", x, self.steps[0].dtype, (self.rows, x.shape[-1]))
        require().run_blocks(
            list(blocks), self.layers, x.data_ptr(), qkv.data_ptr(), attended.data_ptr(), scratch.data_ptr(),
            *(NO_RECURRENCE if recurrence is None else recurrence.arguments), cos_sin=turn[0], rotary=turn[1],
            rows=self.rows, threads=threads, adapted=adapted, inputs=inputs[0], inputs_stride=inputs[1],
        )  # fmt: skip
