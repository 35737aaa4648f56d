"""Kernels for Hopper GPUs alone, compiled and executed on the CPU (ptx_launch): what the GPU copies by itself among it.

    python -m tests.support.ptx_hopper [whole]

Prints as JSON how far latents' attention is from plain torch, whether its two ways agree on rows of several sequences
that share a chunk, the launches and races of that, and whether products of blocks have the bits of others; whole: by
all tiles, and of DeepSeek's size, which takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from headrace.kernels.triton import attention, hopper, hopper_agreement, layer_check, rows
from headrace.kernels.triton.hopper_agreement import Ways
from headrace.kernels.triton.products import FEW, GATED, MANY, NARROW
from headrace.kernels.triton.tiles import EXACT, Tile, product
from headrace.kernels.triton.walk_options import heads_of
from tests.support.ptx_launch import Launches, executed

CPU = torch.device("cpu")
SEQUENCES = ((1, 100), (2, 140), (17, 530))
"""Rows and keys of each, of which the first two have a chunk in common: tasks that go on from states, keys that nobody
has written, two spans."""


@contextmanager
def as_on_hopper() -> Iterator[Launches]:
    """Layers whose types and sizes fit take the kernels for Hopper, without being asked for their bits before."""
    with ExitStack() as stack:
        launches = stack.enter_context(executed())
        stack.enter_context(patch.object(hopper, "present", lambda place: True))
        stack.enter_context(patch.multiple(hopper_agreement, _found={}, SEQUENCES=SEQUENCES, SHARED=1))
        stack.enter_context(patch.object(layer_check, "SEQUENCES", ((2, 100),)))
        yield launches


def latents(heads: int, dim: int) -> dict[str, Any]:
    """Of latents of this size."""
    sizes = heads_of((heads, 1, dim), True, CPU)
    variant = layer_check.Variant(sizes, torch.bfloat16, torch.bfloat16, None, None, False, 192**-0.5)
    with as_on_hopper() as launches:
        used = attention.agreed(sizes, torch.bfloat16, CPU) == Ways(flash=True, split=True)
        found = dict(layer_check.differences(variant, CPU))
    return {
        "used": used,
        "differences": {how: difference for how, difference in found.items() if "Hopper" in how},
        "launches": launches.launched["walk_latents"],
        "races": sorted(launches.races),
    }


def products_by_blocks(whole: bool) -> dict[str, bool]:
    """Whether products of blocks that the GPU copies have the bits of other tiles: with a last step, a last row and a
    last column that are not whole, and of gates with what they let through. whole: by all tiles, not the largest."""
    ways = {"": (*NARROW, *FEW, *MANY), "silu": (*NARROW, *GATED)}
    asked = [(tile, kind) for kind, tiles in ways.items() for tile in tiles if tile.way != "plain"]
    with executed() as launches:
        some = asked if whole else [(NARROW[-1], "silu"), (FEW[2], ""), (MANY[0], "")]
        found = {f"{tile} {kind}": _same_product(tile, kind, gated=bool(kind)) for tile, kind in some}
    return found | {"no races": not launches.races}


def _same_product(tile: Tile, kind: str, gated: bool) -> bool:
    generator = torch.Generator().manual_seed(tile.rows)
    count, outputs = (tile.rows - 3, 72) if tile.way == "few" else (tile.rows + 9, tile.columns + 8)
    x, w = (torch.randn(each, 328, generator=generator).bfloat16() for each in (count, outputs * (1 + gated)))
    exact, ours = torch.empty(count, len(w)).bfloat16(), torch.empty(count, outputs).bfloat16()
    product(EXACT, x, w, None, exact)
    if kind:
        exact = rows.gated(exact, kind) if gated else rows.activate(exact, kind)
    product(tile, x, w, None, ours, kind, gated)
    return torch.equal(ours, exact)


if __name__ == "__main__":
    whole = "whole" in sys.argv
    told = {"latents of 320": latents(3, 320), "products": products_by_blocks(whole)}
    print(json.dumps(told | ({"latents of 576": latents(20, 576)} if whole else {})))
