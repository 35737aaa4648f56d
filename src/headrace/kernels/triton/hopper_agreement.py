"""Which kernels for Hopper give the bits of the portable ones: found on the GPU itself, on random numbers, before a
layer uses them. Latents' kernel has bits of its own: both of its ways must have them. See agreement, which asks the
same of products.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.errors import TritonError

from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import hopper, hopper_latents, tile_schedule
from headrace.kernels.triton.heads import Heads
from headrace.types import CHUNK

log = logging.getLogger(__name__)

SEQUENCES = ((1, 700), (3, 1210), (200, 1337), (130, 130), (30, 65))
"""Rows and keys of each: decoding, drafts, a piece of a prompt, and short ones from the first key or nearly so."""
WINDOW = 300
"""Of layers that have one: it begins within a chunk."""
NEAR = 0.05
"""How far kernels with bits of their own may be from the portable ones, on numbers of unit size."""
SHARED = 10
"""Chunks, not all of a span, that the first two sequences have in common."""


class Ways(NamedTuple):
    """Which kernels for Hopper are used."""

    flash: bool
    split: bool


PORTABLE = Ways(flash=False, split=False)


Attended = Callable[[Heads, Mask, Tensor, Pool, Ways, int, int], Tensor]
"""See attention._attended."""

_found: dict[tuple[Heads, torch.dtype, torch.device, bool, bool], Ways] = {}


def agreed(
    heads: Heads, dtype: torch.dtype, device: torch.device, attended: Attended, window: bool, sinks: bool
) -> Ways:
    """The kernels that a layer may use; those for windows and sinks are compiled apart, and asked apart. Asked first
    where a step is prepared or computed; while a graph is recorded nothing can be compared."""
    taken = hopper_latents.takes(device, dtype, heads) if heads.once else hopper.takes(device, dtype, *heads[:3])
    if not taken:
        return PORTABLE
    layer = heads, dtype, device, window, sinks
    if layer not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return PORTABLE
        _found[layer] = _compared(*layer, attended)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pool is sized by what is free
    return _found[layer]


def _compared(
    heads: Heads, dtype: torch.dtype, device: torch.device, window: bool, sinks: bool, attended: Attended
) -> Ways:
    items, positions = _plan()
    scores = torch.linspace(-1, 6, heads.heads, device=device) if sinks else None
    seen = WINDOW if window else None
    mask = Mask(torch.from_numpy(items), positions, window=seen, sinks=scores, scale=heads.dim**-0.5)

    def run(ways: Ways, states: int, lanes: int) -> Callable[[], Tensor]:
        def drawn() -> Tensor:
            pool, q = _drawn(heads, dtype, device, items)
            return attended(heads, mask, q, pool, ways, states, lanes)

        return drawn

    if heads.once:
        return _latents_compared(f"hopper_latent_kernels.walk_latents for {heads}, {dtype}", run)
    told = f"for {heads}, {dtype}" + ", a window" * window + ", sinks" * sinks
    names = [f"hopper_kernels.{way} {told}" for way in Ways._fields]
    # Windows are left to the portable flash.
    flash = not window and same(
        names[0], run(Ways(True, False), 0, hopper.FLASH_LANES), run(PORTABLE, 0, tile_schedule.LANES)
    )
    many = 1 << 20
    split = same(names[1], run(Ways(False, True), many, hopper.FLASH_LANES), run(PORTABLE, many, tile_schedule.LANES))
    return Ways(flash, split)


def _latents_compared(name: str, run: Callable[[Ways, int, int], Callable[[], Tensor]]) -> Ways:
    """Of latents' kernel: both ways by its own tasks, which must agree, or neither. Raises ValueError where memory does
    not suffice to compare them: the portable kernels have other bits, and which are used must follow from the GPU and
    the versions alone."""
    both = Ways(flash=True, split=True)
    flash, split, portable = (run(*each, tile_schedule.LANES) for each in ((both, 0), (both, 1 << 20), (PORTABLE, 0)))
    try:
        used = _same(f"{name}, span by span,", split, flash) and _same(name, flash, portable, within=NEAR)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"there is no GPU memory left to compare {name} with other kernels; free some: {error}"
        ) from None
    return Ways(flash=used, split=used)


def same(name: str, ours: Callable[[], Tensor], portable: Callable[[], Tensor]) -> bool:
    """Whether both give the same bits; if not, the log says that `ours` is not used."""
    try:
        return _same(name, ours, portable)
    except torch.OutOfMemoryError as error:
        _say_untried(name, error)
    return False


def _same(name: str, ours: Callable[[], Tensor], portable: Callable[[], Tensor], within: float = 0.0) -> bool:
    """The same, or whether numbers are less than `within` apart."""
    try:
        one, other = ours(), portable()
        if torch.equal(one, other) or float((one.float() - other.float()).abs().max()) < within:
            return True
        log.warning("%s has other bits than the portable kernels on this GPU, which are used instead", name)
    except TritonError as error:
        _say_untried(name, error)
    return False


def _say_untried(name: str, error: Exception) -> None:
    log.warning("%s cannot be compared with the portable kernels, which are used instead: %s", name, error)


def _plan() -> tuple[NDArray[np.int32], Tensor]:
    """Items and positions of the sequences."""
    items = [(chunk, CHUNK * chunk, 0, sum(rows for rows, _ in SEQUENCES[:2])) for chunk in range(SHARED)]
    positions, begin = [], 0
    for number, (rows, keys) in enumerate(SEQUENCES):
        for chunk in range(SHARED if number < 2 else 0, -(-keys // CHUNK)):
            items.append((len(items), CHUNK * chunk, begin, begin + rows))
        positions.append(torch.arange(keys - rows, keys))
        begin += rows
    return np.array(items, np.int32), torch.cat(positions)


def _drawn(heads: Heads, dtype: torch.dtype, device: torch.device, items: NDArray[np.int32]) -> tuple[Pool, Tensor]:
    """Keys and values, NaN where nobody has written them, and queries."""
    generator = torch.Generator(device).manual_seed(heads.dim)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return drawn(*shape)

    pool = Pool.make(len(items), heads.kv_heads, heads.dim, dtype, room, heads.once)
    begin = 0
    for rows, keys in SEQUENCES:
        newest = items[(items[:, 2] <= begin) & (begin < items[:, 3])][:, :2]
        slot, key = newest[newest[:, 1].argmax()].tolist()
        pool.k[slot, :, :, keys - key :] = float("nan")
        pool.v[slot, :, keys - key :] = float("nan")
        begin += rows
    return pool, drawn(begin, heads.heads, heads.dim)
