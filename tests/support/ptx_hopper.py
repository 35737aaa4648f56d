"""Kernels for Hopper GPUs alone, compiled and executed on the CPU (ptx_launch): what the GPU copies by itself among it.

    python -m tests.support.ptx_hopper [whole]

Prints as JSON how far latents' attention is from plain torch, whether its two ways agree on rows of several sequences
that share a chunk, and the launches and races of all that; whole: of DeepSeek's size, too, which takes minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from headrace.kernels.triton import attention, hopper, hopper_agreement, layer_check
from headrace.kernels.triton.hopper_agreement import Ways
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


if __name__ == "__main__":
    whole = {"latents of 576": latents(20, 576)} if "whole" in sys.argv else {}
    print(json.dumps({"latents of 320": latents(3, 320)} | whole))
