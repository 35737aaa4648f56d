"""The contract of an attention backend: what it declares, and the calls that it takes.

A backend is a module with these functions, named in kernels.registry. R, T: rows; Hq, Hkv: query and KV heads; D: head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import AttentionSpec, RecurrentSpec
from headrace.kernels.cpu_step import Pools, StepOver
from headrace.kernels.indexer import IndexQueries
from headrace.kernels.records import Layout, Mask, Pool, QKRotary, StepInputs
from headrace.kernels.registry import BACKENDS
from headrace.kernels.state import AttnState, Partial, RunningState, StateRows
from headrace.types import BLOCK_CHUNKS

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
DEVICES = {"cpu": "the CPU", "cuda": "a CUDA device"}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. kernels: what a sentence calls it, for `it` or `they`.

    devices: types of torch devices, none: any; dtypes: those computed in, none: any; int8: whether keys and values may
    be stored so; capped: whether scores may be capped, or have sinks; pieces: whether it is a PiecewiseBackend, whose
    canonical order merges chunks left to right inside blocks of `block_chunks` chunks, and these left to right; sparse:
    whether it is a SparseBackend; prepared_step: whether `prepare` gives a step, for pools of the rows' own type,
    prepared_int8, whether for those of int8, and all_layers, whether it has `over`; graphs: whether steps are recorded
    as CUDA graphs; automatic: whether 'auto' may choose it.
    """

    name: str
    kernels: str
    spoken_of: Literal["it", "they"]
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    int8: bool = False
    capped: bool = False
    pieces: bool = False
    block_chunks: int = BLOCK_CHUNKS
    sparse: bool = False
    prepared_step: bool = False
    prepared_int8: bool = False
    all_layers: bool = False
    graphs: bool = False
    largest_head: int | None = None
    automatic: bool = False

    def obstacle(self, dtype: torch.dtype, device: str, head_dim: int, capped: bool = False) -> str | None:
        """Why the backend does not take this type, type of device, head size and whether scores are capped; None where
        it does."""
        if self.devices and device not in self.devices:
            return f"{self._does('run')} on {listed([DEVICES[each] for each in self.devices])}, not on {device}"
        if self.dtypes and dtype not in self.dtypes:
            known = listed([str(each).removeprefix("torch.") for each in self.dtypes])
            return f"{self._does('compute')} in {known}, not {dtype}"
        if self.largest_head is not None and head_dim > self.largest_head:
            return f"{self._does('take')} heads of up to {self.largest_head}, the model's are {head_dim}"
        if capped and not self.capped:
            return f"{self._does('know')} neither soft caps on scores nor sinks, which the model has"
        return None

    def _does(self, verb: str) -> str:
        return f"it {verb}s" if self.spoken_of == "it" else f"they {verb}"


def listed(words: list[str], last: str = "and") -> str:
    """'a, b and c'."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


class Attend(Protocol):
    """Attention of one step, as a model calls it once per layer.

    Stores the new keys and values (already rotated) in the cache, then attends: q [T, Hq, D], k and v [T, Hkv, D]
    -> [T, Hq, D] in q's dtype. T counts the rows of all sequences of the step. The next layer writes its q, k and v
    over these: whoever needs them after returning copies them.

    rows, int64 [n], ascending: of these rows alone the result is wanted, [n, Hq, D]; keys and values are stored of all.

    prepared: attention of all layers as C++ can run it without calling this, where that is possible.
    """

    prepared: StepOver | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor: ...

    def stored(self, layer: int, q: Tensor, rows: Tensor | None = None) -> Tensor:
        """The same of a layer that attends to the keys and values of another, where `prepared` has stored those."""
        raise ValueError("keys and values of another layer are not stored here: hand them over again")

    def sparse(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: IndexQueries | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Attention of a model whose rows choose keys (AttentionSpec.index), by `index` if the layer has an indexer: q
        [T, Hq, D - I] and the result are without the I numbers of its key, which come first in k and v [T, Hkv, D].
        Raises ValueError where it is not known."""
        raise ValueError(
            "rows of sparse attention choose among all keys of a pool, and here they are in several places"
        )

    def projected(self, layer: int, heads: Tensor, rotary: QKRotary, rows: Tensor | None = None) -> Tensor:
        """The same from projected heads [T, Hq + 2 Hkv, D], which `rotary` norms and rotates; to the same bits."""
        q, k, v = rotary(heads)
        return self(layer, q, k, v) if rows is None else self(layer, q, k, v, rows)


class LayerStep(Protocol):
    """append and attend of one engine step, in one call for each layer."""

    def __call__(
        self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k, v [T, Hkv, D] in the pool, then attends: q [T, Hq, D] -> [T, Hq, D], in new memory."""

    def projected(
        self, pool: Pool, heads: Tensor, rotary: QKRotary, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The same from projected heads: see Attend.projected."""


class PreparedStep(LayerStep, Protocol):
    """A step whose index data was checked when it was made."""

    def go_on(self, positions: Tensor, offsets: Tensor) -> None:
        """Other positions and offsets for the rows of the same items. Raises ValueError, with nothing changed, where
        they do not fit."""

    def over(self, pools: Pools, windows: Sequence[int | None], sinks: Sequence[Tensor] | None = None) -> StepOver:
        """The step in layers with these pools, windows and sinks, from a backend that declares all_layers."""


class GraphSizes(NamedTuple):
    """What steps that replay graphs have at most: rows, all of which tokens are drawn from, and positions below
    `length`; and what layers with heads of one shape have in common.

    prompt_rows: of steps with prompts in them, `rows` of which tokens are drawn from. windows: of the layers; heads:
    Hq; shape: (slots, Hkv, D) of the pools, whose type is `dtype`; computed: the type of rows; scale, cap: see Mask;
    once: see Pool.
    """

    rows: int
    prompt_rows: int
    length: int
    windows: frozenset[int | None]
    heads: int
    shape: tuple[int, int, int]
    dtype: torch.dtype
    computed: torch.dtype
    scale: float
    cap: float | None = None
    once: bool = False


class GraphStep(Protocol):
    """append and attend of steps whose index data lies in fixed memory on the device, for graphs (device.Graph).

    tokens, positions, adapters: int32 [rows], of the step that was sent; rows that it does not have: token 0, position
    -1, adapter -1, which is none.
    chosen: int32 [rows that tokens are drawn from], filled by whoever computes the step: the token that follows each of
    them, for the step behind.
    drawn: int32, the rows that tokens are drawn from, and 0; empty: all are.
    """

    tokens: Tensor
    positions: Tensor
    adapters: Tensor
    chosen: Tensor

    def known(self, rows: int) -> Tensor:
        """Tokens int32 [rows] of the step that was sent; one below 0, -1 - n, is what row n of the step before has
        chosen."""

    drawn: Tensor

    def prompts(self) -> GraphStep:
        """For steps with prompts in them. It shares memory, `chosen` too: the steps of both are computed one after
        another."""

    def fill(self, items: Mapping[int | None, Int32], positions: Int64, slots: Int32) -> int | None:
        """Takes the items of a step by window, and its rows: the rounds of launches that it needs. None: there is no
        room for it, and no step can be sent until one is filled."""

    def grow(self, rows: Int64, slots: Int32, positions: Int64) -> bool:
        """Goes on from the step that was sent last to one in which each of these rows, at `positions`, begins a chunk
        of its own. False: there is no room, and the step is to be filled."""

    def send(
        self,
        tokens: list[int],
        positions: Int64,
        offsets: Int32,
        drawn: Sequence[int] = (),
        adapters: Int64 | None = None,
    ) -> None:
        """Carries the step to the device: the one that was filled or grown, or a later one of the same items, as
        PreparedStep.go_on. adapters: numbers of the rows' adapters, int64 [rows of the step]; None: no row has one."""

    def keep(self, pools: Sequence[Tensor], layer: int, x: Tensor) -> None:
        """Writes what enters a layer, x [T, H], to the places of the step's rows in pools[layer] [slots, 64, H]."""

    def layers(self, rounds: int, rows: int) -> LayerStep:
        """What is recorded: for T = `rows`, at least those of a step, and at least its rounds. Rows of padding are not
        stored, and what they give is finite. A result is valid until the next call."""


class Backend(Protocol):
    """A module that attends over chunks. Every function raises ValueError for tensors that it does not take."""

    @property
    def capabilities(self) -> Capabilities: ...

    def missing(self) -> str | None:
        """Why the backend cannot be used on this machine; None where it can."""

    def described(self, device: torch.device) -> str:
        """The kernels in use on a device, or why they are, for the log."""

    def layout(self, dtype: torch.dtype, dim: int) -> Layout:
        """How pools must lie where rows have this type and head size."""

    def append(self, pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
        """Writes row t of k_new, v_new [T, Hkv, D] into the pool at key offsets[t] of chunk slots[t], int32 [T] each.

        Into int8 goes x / scale, rounded to even, with scale = (greatest |x| of the D elements) / 127.
        """

    def attend(self, q: Tensor, pool: Pool, mask: Mask) -> Tensor:
        """Attention of rows q [R, Hq, D] over the chunks of the mask's items: [R, Hq, D] in q's type, zeros for rows
        that see no key. A row's items come in ascending key_start; otherwise any order gives the same bits."""

    def prepare(self, step: StepInputs) -> PreparedStep | None:
        """append and attend in one call for each layer; None from a backend that declares no prepared step."""


class GraphBackend(Backend, Protocol):
    """A backend whose steps can be recorded, as its capabilities say."""

    def graph_step(self, kinds: Sequence[GraphSizes], bias: Tensor | None = None) -> GraphStep:
        """kinds: of layers, by the shape of their heads. bias: see Mask, on the device."""

    def verify(self, spec: AttentionSpec, computed: torch.dtype, stored: torch.dtype) -> None:
        """Compares what only some models' attention has with plain torch on the device. Raises ValueError where it is
        wrong there."""

    def verify_recurrent(self, spec: RecurrentSpec, computed: torch.dtype) -> None:
        """The same of recurrent layers, and whether their bits depend on how sequences are cut."""


class SparseBackend(Backend, Protocol):
    """A backend with which rows choose the keys that they attend to: kernels.indexer."""

    def index_scores(self, index: IndexQueries, pool: Pool, items: Tensor, positions: Tensor, keys: int) -> Tensor:
        """By which rows choose among the first `keys` keys: fp32 [R, keys]."""

    def block_scores(self, q: Tensor, pool: Pool, items: Tensor, positions: Tensor, chunks: int) -> Tensor:
        """By which rows choose among blocks of the first `chunks` chunks: fp32 [R, Hkv, chunks]."""

    def gather(self, pool: Pool, tables: Tensor, chosen: Tensor, first: int, dtype: torch.dtype) -> Pool:
        """What rows have chosen, in chunks of their own."""


class PiecewiseBackend(Backend, Protocol):
    """A backend that also attends in pieces: docs/attention.md. For the meaning see kernels.state."""

    def empty_running(self, rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> RunningState:
        """The state of rows that have met no chunk, for kernels that compute in `dtype`."""

    def partial(self, q: Tensor, pool: Pool, mask: Mask, state: RunningState | None = None) -> RunningState:
        """Merges the mask's chunks for q [R, Hq, D] on from `state` (None: from nothing): a new state.

        A row's items come in ascending key_start from call to call too. However they are cut into calls, `finish` gives
        the bits of one `attend`.
        """

    def finish(self, state: RunningState, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
        """The attention of what was merged: [R, Hq, D] in `dtype`, zeros for rows that saw no key. sinks (see Mask) are
        no part of the state, and join it here alone."""

    def states_of(self, state: RunningState) -> AttnState:
        """The same as a value that merges: fp32, natural logarithms."""

    def merge_blocks(self, left: RunningState, right: RunningState) -> RunningState:
        """The merge of `left` continued by a block that was merged elsewhere."""

    def merge_into(self, total: Partial, blocks: Sequence[StateRows], unit: float) -> None:
        """The rows of each block in total [R, Hq, D] become the merge of themselves and then that block, one block
        after the other, in place; all count in `unit`."""

    def merge_states(self, left: AttnState, right: AttnState) -> AttnState:
        """Attention over the union of two disjoint segments. Two EMPTY give EMPTY."""


@cache
def backend_of(name: str) -> Backend:
    """The backend of that name. Raises ValueError for any other name."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return cast(Backend, import_module(BACKENDS[name].module))


def recorded(kernels: Backend) -> GraphBackend:
    """The same backend, which must be one whose steps can be recorded: ValueError otherwise."""
    if not kernels.capabilities.graphs:
        raise ValueError(f"attention backend {kernels.capabilities.name!r} has no graphs; use 'triton'")
    return cast(GraphBackend, kernels)


def verify(kernels: Backend, spec: AttentionSpec, computed: torch.dtype, stored: torch.dtype) -> None:
    """GraphBackend.verify, of kernels that run on a device."""
    if kernels.capabilities.graphs:
        recorded(kernels).verify(spec, computed, stored)


def choosing(kernels: Backend) -> SparseBackend:
    """The same backend, with which rows must be able to choose keys: ValueError otherwise."""
    if not kernels.capabilities.sparse:
        raise ValueError(f"attention backend {kernels.capabilities.name!r} has no indexer; use 'cpu'")
    return cast(SparseBackend, kernels)


def in_pieces(kernels: Backend) -> PiecewiseBackend:
    """The same backend, which must be able to attend in pieces: ValueError otherwise."""
    if not kernels.capabilities.pieces:
        raise ValueError(f"attention backend {kernels.capabilities.name!r} cannot attend in pieces; use 'cpu'")
    return cast(PiecewiseBackend, kernels)
