"""Tokens chosen on a GPU, from logits that stay there: in fixed memory, without waiting, as CUDA graphs need it.

R: rows of the choice, V: vocabulary. What is chosen is what the host's sampler (engine.sampler) chooses from the same
logits, or the row is said not to be sure, and the host chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.triton import draw_kernels
from headrace.kernels.triton import sample_kernels as kernels
from headrace.kernels.triton.launching import direct
from headrace.types import MAX_LISTED

BLOCK = 2048
"""Logits of a row that one program takes, and PIECE of them at a time: part of the order of a row's sums."""
PIECE = 128
WARPS = 4
_PARAMETERS, _FINDINGS = kernels.PARAMETERS.value, kernels.FINDINGS.value
TOKEN, SURE, NORM = kernels.TOKEN.value, kernels.SURE.value, kernels.NORM.value
LOGIT, ABOVE, STRAY = kernels.LOGIT.value, kernels.ABOVE.value, kernels.STRAY.value
ASKED, CHANGES = kernels.LISTED.value + 1, kernels.CHANGES.value
LARGEST = 1 << 19
"""Tokens in a vocabulary, for which draw_kernels.MARGIN is wide enough."""
MOST_LEADERS = kernels.LEADERS.value
_PLACES = draw_kernels.PLACES.value
_SHIFTS = (24, 20, 16, 12, 8, 4, 0)
"""Of the digits of a key after the first."""


_Given = tuple[Tensor, int, Tensor, int, Tensor]
"""Logits and their row stride, masks and the words of a row, what is asked."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of a choice need together: launches that none of them needs are left out.

    reports: log probabilities. leaders: of so many most likely tokens. listed: of at most so many listed tokens.
    changed: some row's logits are (sample_kernels.CHANGES). draws: some row is not greedy. top_k, top_p: some row draws
    with that filter. watched: some row is watched (sample_kernels.WATCH).
    """

    reports: bool = False
    leaders: int = 0
    listed: int = 0
    changed: bool = False
    draws: bool = False
    top_k: bool = False
    top_p: bool = False
    watched: bool = False


class Chooser:
    """The choice from logits of up to `rows` rows of `width`, and the memory that it is made in.

    Fill `request` [rows, 14] int64, of which `asked` [rows, 9] fp64 and `counters` [rows, 5] are the parts (both at
    sample_kernels.SOURCE), `masks` [rows, ceil(width / 32)] int32 (bit i % 32 of word i // 32: whether token i is
    allowed) where there are some, and the first n * Needs.listed of `listed` int32 with the listed tokens of n rows,
    then call `choose`; read `tokens` [rows] int32, `found` [rows, 9] fp64 (columns: sample_kernels.TOKEN and those
    after it), `leaders` (leaders_of), and `ranked` fp64, the logit of each listed token and how many are above it.
    Raises ValueError for no rows, an empty vocabulary or one above LARGEST.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        if rows < 1 or not 1 <= width <= LARGEST:
            raise ValueError(f"a choice is from 1 to {LARGEST} tokens in a row or more, got {rows} rows of {width}")
        self.rows, self.width, self.device = rows, width, device
        self.blocks = -(-width // BLOCK)
        self.words = -(-width // 32)
        self._room = 1 << (self.blocks - 1).bit_length()
        self.request = torch.zeros(rows, _PARAMETERS, dtype=torch.int64, device=device)
        self.asked, self.counters = self.request[:, :ASKED].view(torch.float64), self.request[:, ASKED:]
        self.masks = torch.full((rows, self.words), -1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.found = self._memory(rows, _FINDINGS)
        self.listed = torch.zeros(rows * MAX_LISTED, dtype=torch.int32, device=device)
        self.ranked = self._memory(rows * MAX_LISTED, 2)
        empty = torch.full((rows, self.blocks + 1, MOST_LEADERS), -1, dtype=torch.int64, device=device)
        self.leaders, self._leading = empty[:, 0].clone(), empty[:, 1:].clone()
        self._peaks = self._memory(rows, self.blocks, 4)
        self._kept = self._memory(rows, self.blocks, 2)
        self._strays = self._memory(rows, self.blocks, 3)
        self._limits = self._memory(rows, draw_kernels.LIMITS.value)
        # The first pass is where every search begins; the others take turns in two pieces of memory.
        self._first = self._memory(rows, self.blocks, 2, _PLACES)
        self._bins = self._memory(2, rows, self.blocks, 2, _PLACES)
        self._states = self._memory(rows, draw_kernels.STATE.value)

    def _memory(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def choose(self, logits: Tensor, rows: int, needs: Needs) -> None:
        """Launches the choice of the first `rows` rows that are asked for, from logits [any, V] fp32. Raises ValueError
        for logits or rows that do not fit."""
        self._check(logits, rows)
        given = (logits, logits.stride(0), self.masks, self.words, self.asked)
        direct(kernels.greatest_of_blocks)[self.blocks, rows](
            *given, self._peaks, self.width, self.blocks, CHANGED=needs.changed, BLOCK=BLOCK, num_warps=WARPS
        )
        direct(kernels.greatest)[rows,](
            self.asked, self._peaks, self.tokens, self.found, self.blocks, BLOCKS=self._room
        )
        if needs.draws:
            self._draw(given, rows, needs)
        if needs.reports:
            self._report(logits, rows, needs.leaders, needs.listed)

    def _report(self, logits: Tensor, rows: int, count: int, listed: int) -> None:
        """Of the logits as they are, not as they are changed."""
        raw, grid = (logits, logits.stride(0), self.asked), (self.blocks, rows)
        direct(kernels.rank)[grid](*raw, self.tokens, self.found, self.width, BLOCK=BLOCK, num_warps=WARPS)
        if count:
            direct(kernels.leaders_of_blocks)[grid](
                *raw, self._leading, self.width, self.blocks, count, BLOCK=BLOCK, num_warps=WARPS
            )
            direct(kernels.leaders_of_rows)[rows,](
                self.asked, self._leading, self.leaders, self.blocks, count, SIZE=self._room * MOST_LEADERS,
                num_warps=WARPS,
            )  # fmt: skip
        if listed:
            direct(kernels.listed_logits)[rows,](*raw, self.listed, self.ranked, listed, SIZE=MAX_LISTED)
            direct(kernels.rank_listed)[grid](*raw, self.ranked, self.width, listed, BLOCK=BLOCK, num_warps=WARPS)

    def _check(self, logits: Tensor, rows: int) -> None:
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] != self.width or logits.stride(1) != 1:
            told, wanted = f"{list(logits.shape)} of {logits.dtype}", f"[R, {self.width}] row by row"
            raise ValueError(f"a choice among {self.width} tokens needs fp32 logits {wanted}, got {told}")
        if not 0 < rows <= self.rows:
            raise ValueError(f"a choice of 1 to {self.rows} rows was prepared, got {rows}")

    def _draw(self, given: _Given, rows: int, needs: Needs) -> None:
        found, limits, sizes = self.found, self._limits, (self.width, self.blocks)
        changed = needs.changed
        direct(draw_kernels.weigh)[self.blocks, rows](
            *given, found, self._first, self._kept, *sizes,
            CHANGED=changed, BLOCK=BLOCK, PIECE=PIECE, num_warps=WARPS,
        )  # fmt: skip
        direct(draw_kernels.limit)[rows,](
            self.asked, self.counters, self._first, self._kept, found, limits, self.blocks, BLOCKS=self._room
        )
        for stage, needed in ((draw_kernels.BY_TOP_K, needs.top_k), (draw_kernels.BY_TOP_P, needs.top_p)):
            if needed:
                self._search(given, rows, stage, changed)
                direct(draw_kernels.cut)[rows,](
                    self.asked, found, limits, self._states, self.width, CHANGED=changed, STAGE=stage
                )
        if needs.watched:
            self._watch(given, rows, changed)
        bins = self._search(given, rows, draw_kernels.DRAW, changed)
        direct(draw_kernels.pick)[rows,](
            *given,
            self.tokens,
            found,
            limits,
            bins,
            self._states,
            *sizes,
            CHANGED=changed,
            BLOCKS=self._room,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )

    def _watch(self, given: _Given, rows: int, changed: bool) -> None:
        strays, sizes = self._strays, (self.width, self.blocks)
        options = {"CHANGED": changed, "BLOCK": BLOCK, "num_warps": WARPS}
        grid, room = (self.blocks, rows), self._room
        direct(draw_kernels.strays_of_blocks)[grid](*given, strays, *sizes, **options)
        direct(draw_kernels.weigh_before_stray)[grid](*given, self.found, strays, *sizes, BLOCKS=room, **options)
        direct(draw_kernels.judge_stray)[rows,](self.asked, self.found, self._limits, strays, self.blocks, BLOCKS=room)

    def _search(self, given: _Given, rows: int, stage: object, changed: bool) -> Tensor:
        """All passes of a stage but the first, and what `states` says then; the last pass's bins."""
        bins, sizes = self._first, (self.width, self.blocks)
        options = {"STAGE": stage, "BLOCKS": self._room}
        for number, shift in enumerate(_SHIFTS):
            direct(draw_kernels.descend)[rows,](
                self.asked, self._limits, bins, self._states, *sizes, FIRST=number == 0, **options
            )
            direct(draw_kernels.narrow)[self.blocks, rows](
                *given, self.found, bins, self._states, self._bins[number % 2], *sizes, shift,
                CHANGED=changed, STAGE=stage, BLOCK=BLOCK, PIECE=PIECE, num_warps=WARPS,
            )  # fmt: skip
            bins = self._bins[number % 2]
        direct(draw_kernels.descend)[rows,](
            self.asked, self._limits, bins, self._states, *sizes, FIRST=False, **options
        )
        return bins


def leaders_of(row: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens of a row of Chooser.leaders and their logits, greatest first, equals by id; no
    impossible ones."""
    numbers = np.array([number for number in row[:count] if number >= 0], np.int64)
    keys = (numbers >> 31) - (1 << 31)
    bits = np.where(keys < 0, keys ^ 0x7FFFFFFF, keys).astype(np.int32)
    logits, ids = bits.view(np.float32), (1 << 31) - 1 - (numbers & (1 << 31) - 1)
    return [(int(i), float(x)) for i, x in zip(ids, logits, strict=True) if x > -np.inf]
