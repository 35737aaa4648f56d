"""The kernels of latent attention, of DeepSeek-V3's sizes and GLM-4.7-Flash's: for compile_triton."""

from __future__ import annotations

from collections.abc import Iterator

from triton.experimental.gluon.language import NVMMASharedLayout

from headrace.kernels.triton import (
    attention_kernels,
    hopper_latent_kernels,
    hopper_latents,
    latent_kernels,
    latent_row_kernels,
    latents,
    piece_kernels,
)
from headrace.kernels.triton.tile_schedule import SPAN
from headrace.kernels.triton.walk_options import latent_chosen, latent_parts
from tests.support import compiled_pieces
from tests.support.compiled_rows import Compiled

DIM = 576
PARTS = dict(zip("PR", latent_parts(DIM), strict=True))
TYPES = dict.fromkeys(("items", "tasks", "positions", "slots", "offsets", "count", "bases", "merged"), "*i32")
TYPES |= dict.fromkeys(("acc_of", "m_of", "z_of", "totals", "sinks", "cos_sin"), "*fp32")
TYPES |= dict.fromkeys(("q_stride", "v_stride", "stride", "turn_stride", "rows", "window"), "i32") | {"factor": "fp32"}
STRIDES = dict.fromkeys(("x_row", "x_head", "w_head", "w_out", "w_in", "out_row", "out_head"), "i32")


def walks(architecture: int) -> Iterator[Compiled]:
    """Tasks of 128 query heads."""
    for way, split, resumed in (("flash", False, False), ("split", True, False), ("resumed", True, True)):
        lanes, warps, stages, columns, keys = latent_chosen(architecture // 10, DIM, flash=not split)
        part = min(64, latent_chosen(architecture // 10, DIM).lanes)
        sizes = {"HEADS": 128, "PART": part, "D": DIM, "V": columns, "K": keys, "LANES": lanes, "SPAN": SPAN} | PARTS
        constants = sizes | {"SPLIT": split, "RESUME": resumed, "PRECISION": "ieee"}
        options = {"num_warps": warps, "num_stages": stages}
        yield Compiled(f"{way} {DIM}, latents", latent_kernels.walk, constants, options, TYPES)


def hopper_walks() -> Iterator[Compiled]:
    """The same on a Hopper GPU, and of Mistral Small 4's 32 heads."""
    block = repr(NVMMASharedLayout(128, 16, 2))
    for (first, rest), heads in zip(hopper_latents.PARTS, (32, 128), strict=True):
        names = {"v_desc": first, "r_desc": rest}
        types = TYPES | {name: f"tensordesc<bf16[64, {columns}],{block}>" for name, columns in names.items()}
        sizes = {"HEADS": heads, "PART": min(64, heads), "P": first, "R": rest, "SPAN": SPAN}
        for way, split, resumed in (("flash", False, False), ("split", True, False), ("resumed", True, True)):
            constants = sizes | {"SPLIT": split, "RESUME": resumed}
            name, options = f"hopper {way} {first + rest}, latents", {"num_warps": 8}
            yield Compiled(name, hopper_latent_kernels.walk_latents, constants, options, types)


def cases(architecture: int) -> Iterator[Compiled]:
    yield from walks(architecture)
    if architecture == 90:
        yield from hopper_walks()
    states = {"HEADS": 128, "D": DIM, "P": 1024}
    merge = states | {"SPAN": SPAN, "WINDOW": False, "SINKS": False}
    yield Compiled(f"merge_spans {DIM}", attention_kernels.merge_spans, merge, {"num_warps": 1}, TYPES)
    for kernel, more in ((piece_kernels.begin, {}), (piece_kernels.fold, {"BEGUN": True}), (piece_kernels.merge, {})):
        name = f"piece {kernel.fn.__name__} {DIM}"
        yield Compiled(name, kernel, states | more, {"num_warps": 1}, compiled_pieces.TYPES)
    store = {"D": DIM, "P": 1024}
    yield Compiled("store latents", latent_kernels.store, store, {"num_warps": 1}, TYPES)
    turn = {"HEADS": 128, "QUERY": 192, "D": DIM, "TURNED": 64, "P": 64, "TOGETHER": 16}
    yield Compiled("turn_queries", latent_row_kernels.turn_queries, turn, {"num_warps": 4}, TYPES | {"heads": "*bf16"})
    make = {"RANK": 512, "TURNED": 64, "P": 512, "R": 64}
    yield Compiled("make_keys", latent_row_kernels.make_keys, make, {"num_warps": 4}, TYPES)
    for tile, inputs, outputs, along in ((latents.EXACT, 192, 512, "w_out"), (latents.FEW, 512, 256, "w_in")):
        shape = {"INPUTS": inputs, "OUTPUTS": outputs, "ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": tile.step}
        shape[along] = 1
        name, options = f"multiply_heads {tile.columns} x {tile.rows}", {"num_warps": 4, "num_stages": 3}
        constants = shape | {"PRECISION": "ieee"}
        yield Compiled(name, latent_row_kernels.multiply_heads, constants, options, TYPES | STRIDES)
