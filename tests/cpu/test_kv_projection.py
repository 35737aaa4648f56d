"""Keys and values from activations: the bits that the forward pass hands to attention, for every family and kernel.

T, n: rows; H: hidden size; Hkv: KV heads; D: head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.attention import plan as planning
from headrace.attention.execute import KeepActivations
from headrace.attention.steps import attention_of
from headrace.config import Quantization
from headrace.kernels import chunk_formats, cpu, dispatch, ops, quantized
from headrace.kernels.backend import Attend, backend_of
from headrace.kernels.block import Blocks
from headrace.kernels.indexer import IndexQueries
from headrace.kv.storage import KVStorage
from headrace.models.decoder import Decoder, TokenBatch, load_decoder
from headrace.models.layers import OneByOne
from headrace.types import CHUNK, chunks_for
from tests.support.checkpoints import EVERY_KIND, FolderOf
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import BatchAttend, NaiveAttend, batch_of, join, naive

pytestmark = pytest.mark.cpu

LENGTHS = (75, 1, 140)
needs_extension = pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))


@pytest.fixture(autouse=True, scope="module")
def _one(one_thread: None) -> None: ...


@dataclass
class Seen(Attend):
    """An Attend and a watch that keep, by layer, what goes into the layer and what comes to attention."""

    attend: Any
    x: list[Tensor] = field(default_factory=list)
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None) -> Tensor:
        assert layer == len(self.kv)
        self.kv.append((k.clone(), v.clone()))
        out: Tensor = self.attend(layer, q, k, v)
        return out if rows is None else out[rows]

    def sparse(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, index: IndexQueries | None, rows: Tensor | None = None
    ) -> Tensor:
        assert layer == len(self.kv)
        self.kv.append((k.clone(), v.clone()))
        out: Tensor = self.attend.sparse(layer, q, k, v, index)
        return out if rows is None else out[rows]

    def watch(self, layer: int, x: Tensor) -> None:
        assert layer == len(self.x) == len(self.kv)
        self.x.append(x.clone())


def sequences(decoder: Decoder) -> tuple[TokenBatch, Any]:
    """Several sequences in one step, and their attention."""
    g = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (length,), generator=g).tolist() for length in LENGTHS]
    batch = join([batch_of(each, 0, len(each)) for each in tokens])
    alone: list[NaiveAttend] = [naive(decoder) for _ in tokens]
    return batch, BatchAttend(alone, [len(each) for each in tokens])


def seen(decoder: Decoder, rows: Tensor | None = None) -> tuple[TokenBatch, Seen]:
    batch, attend = sequences(decoder)
    found = Seen(attend)
    decoder.forward(batch, found, rows, found.watch)
    assert len(found.x) == decoder.config.attention.stored and len(found.kv) == decoder.config.layers
    return batch, found


def projects(decoder: Decoder) -> None:
    """All rows at once, some, one, and none: the bits that attention had."""
    batch, found = seen(decoder)
    total = sum(LENGTHS)
    picks = [slice(0, total), slice(70, 80), slice(3, 4), slice(total - 1, total), slice(5, 5)]
    assert batch.rope_lengths is not None
    for layer, (x, (k, v)) in enumerate(zip(found.x, found.kv[: len(found.x)], strict=True)):
        assert x.float().std() > 0.01 and k.isfinite().all()
        for pick in picks:
            got = decoder.project(layer, x[pick], batch.positions[pick], batch.rope_lengths[pick])
            assert torch.equal(got[0], k[pick]) and torch.equal(got[1], v[pick]), (layer, pick)


WAYS: dict[str, tuple[str, Any]] = {
    "bfloat16": ("bfloat16", nullcontext),
    "bfloat16 op by op": ("bfloat16", lambda: dispatch.force("ops")),
    "bfloat16 torch": ("bfloat16", lambda: dispatch.force("torch")),
    "float32": ("float32", nullcontext),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_bits_of_the_forward_pass(kind: str, way: str, folder_of: FolderOf) -> None:
    dtype, forced = WAYS[way]
    context: AbstractContextManager[Any] = forced()
    with context:
        projects(load_decoder(folder_of(kind), dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
@pytest.mark.parametrize("kind", ["llama_gqa", "qwen3", "opt350", "falcon7", "falcon_rw_odd"])
def test_the_bits_of_rounded_weights(kind: str, quantization: Quantization, dtype: Any, folder_of: FolderOf) -> None:
    projects(load_decoder(folder_of(kind), dtype, quantization=quantization))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_every_instruction_set(isa: str, quantization: Quantization, dtype: Any, folder_of: FolderOf) -> None:
    projects(load_decoder(folder_of("qwen2"), dtype, quantization=quantization))


@needs_extension
def test_which_way_is_taken(folder_of: FolderOf) -> None:
    """Queries that fill blocks of 64 outputs are not multiplied."""
    whole = load_decoder(folder_of("llama_gqa"), "bfloat16")
    assert isinstance(whole.layers, Blocks) and whole.layers.without_queries is not None
    with dispatch.force("ops"):
        assert isinstance(load_decoder(folder_of("llama_gqa"), "bfloat16").layers, OneByOne)


@needs_extension
def test_queries_that_fill_no_block(folder_of: FolderOf) -> None:
    """Then all are multiplied, and the queries thrown away: as if these heads did not fill blocks of 64."""
    decoder = load_decoder(folder_of("llama_gqa"), "bfloat16")
    assert isinstance(decoder.layers, Blocks)
    batch, found = seen(decoder)
    decoder.layers.without_queries = None
    k, v = decoder.project(1, found.x[1], batch.positions)
    assert torch.equal(k, found.kv[1][0]) and torch.equal(v, found.kv[1][1])
    with pytest.raises(ValueError, match="x must be"):
        decoder.project(0, found.x[0].float(), batch.positions)


@needs_extension
def test_the_tail_of_a_weight_is_a_view() -> None:
    g = torch.Generator().manual_seed(0)
    weight, x = torch.randn(200, 128, generator=g).bfloat16(), torch.randn(9, 128, generator=g).bfloat16()
    forms: list[Any] = [quantized.Quantized(quantized.Rounded(weight, scheme)) for scheme in ("int8", "int4", "w8a8")]
    for form in [*forms, cpu.Packed(weight), cpu.Packed(weight.float())]:
        x = x.to(form.blocks.dtype) if isinstance(form, cpu.Packed) else x
        tail: Any = ops.outputs_from(form, 128)
        assert tail.shape == (72, 128)
        assert torch.equal(ops.linear(x, tail), ops.linear(x, form)[:, 128:])
        own, whole = (y.blocks if isinstance(form, cpu.Packed) else y.codes for y in (tail, form))
        assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        some: Any = ops.outputs_from(form, 64, 40)
        assert some.shape == (40, 128)
        assert torch.equal(ops.linear(x, some), ops.linear(x, form)[:, 64:104])
        assert ops.outputs_from(form, 72) is None
        with pytest.raises(ValueError, match="whole blocks of 64"):
            form.outputs_from(72)
    assert ops.outputs_from(weight, 128) is None


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_are_watched_where_some_are_wanted(way: str, folder_of: FolderOf) -> None:
    dtype, forced = WAYS[way]
    with forced():
        decoder = load_decoder(folder_of("opt350"), dtype)
        _, every = seen(decoder)
        for rows in (torch.tensor([2, 80]), torch.empty(0, dtype=torch.int64)):
            _, some = seen(decoder, rows)
            assert all(torch.equal(a, b) for a, b in zip(some.x, every.x, strict=True))


def test_lengths_are_needed_where_rotation_depends_on_them(folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of("llama_dynamic"), "float32")
    with pytest.raises(ValueError, match="rope_lengths is needed"):
        decoder.project(0, torch.zeros(1, 128), torch.zeros(1, dtype=torch.int64))


STEPS = (
    [(0, 0, 100)],
    [(0, 100, 100)],
    [(0, 200, 30), (1, 128, 33)],
    *([(0, 230 + i, 1), (1, 161 + i, 1)] for i in range(40)),
)
"""Steps of two sequences that share two chunks, in pieces, then token by token: (sequence, first token, tokens)."""
SLOTS = ((5, 1, 0, 2, 6), (5, 1, 7, 4))


@pytest.mark.parametrize(("kind", "dtype"), [("llama_gqa", "bfloat16"), ("falcon40", "bfloat16"), ("opt", "float32")])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_pool_holds_the_activations(kind: str, dtype: Any, backend: str, folder_of: FolderOf) -> None:
    """Prefilled in pieces and decoded together, they are those of the same rows computed at once."""
    if backend == "cpu" and not cpu.available():
        pytest.skip(str(cpu.unavailable_reason()))
    decoder = load_decoder(folder_of(kind), dtype)
    g = torch.Generator().manual_seed(2)
    first = torch.randint(0, VOCAB, (270,), generator=g).tolist()
    tokens = [first, first[:128] + first[5:78]]
    pieces = store_of(decoder)
    for step in STEPS:
        step_of(decoder, pieces, backend, tokens, step)
    at_once = store_of(decoder)
    for sequence in range(2):
        step_of(decoder, at_once, backend, tokens, [(sequence, 0, len(tokens[sequence]))])
    assert pieces.x is not None and at_once.x is not None
    for layer, (got, want) in enumerate(zip(pieces.x, at_once.x, strict=True)):
        assert torch.equal(got, want) and got[list(SLOTS[1])].flatten(0, 1)[:201].abs().sum(-1).min() > 0
        assert not got[3].any() and not got[6, 14:].any()
        for sequence, slots in enumerate(SLOTS):
            length = len(tokens[sequence]) // CHUNK * CHUNK
            x = got[list(slots)].flatten(0, 1)[:length]
            k, v = decoder.project(layer, x, torch.arange(length))
            held = pool_rows(pieces, decoder, backend, layer, slots)
            assert torch.equal(k, held[0][:length]) and torch.equal(v, held[1][:length])


def test_a_storage_without_activations_keeps_none(folder_of: FolderOf) -> None:
    spec = load_decoder(folder_of("llama_gqa"), "bfloat16").config.attention
    plan = planning.build([planning.Span(np.array([0], np.int32), 0, 3)])
    with pytest.raises(ValueError, match="keeps no activations"):
        KeepActivations(plan.row_slots, plan.row_offsets, KVStorage(spec, 3, torch.bfloat16))


def store_of(decoder: Decoder) -> KVStorage:
    return KVStorage(decoder.config.attention, 8, decoder.dtype, decoder.config.hidden_size, decoder.dtype)


def step_of(
    decoder: Decoder, storage: KVStorage, backend: str, tokens: list[list[int]], step: list[tuple[int, int, int]]
) -> None:
    """Computes (sequence, first token, tokens) together."""
    spans = [
        planning.Span(np.array(SLOTS[s][: chunks_for(start + count)], np.int32), start, count)
        for s, start, count in step
    ]
    plan = planning.build(spans)
    attend = attention_of(plan, storage, decoder.config.attention, backend_of(backend), decoder.key_bias)
    ids = [token for s, start, count in step for token in tokens[s][start : start + count]]
    batch = TokenBatch(torch.tensor(ids), torch.from_numpy(plan.positions))
    decoder.forward(batch, attend, torch.tensor([0]), KeepActivations(plan.row_slots, plan.row_offsets, storage))


def pool_rows(
    storage: KVStorage, decoder: Decoder, backend: str, layer: int, slots: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """K and V [n, Hkv, D] of these chunks of the pool, by way of stored sections."""
    spec, dtype = decoder.config.attention, storage.dtype
    sections = torch.empty(
        len(slots), chunk_formats.kv_bytes(spec.kv_heads, spec.head_dim, dtype, "raw"), dtype=torch.uint8
    )
    layout = backend_of(backend).layout(dtype, spec.head_dim)
    chosen = torch.tensor(slots, dtype=torch.int32)
    assert all(chunk_formats.store_kv_many(sections, storage.pool(layer), chosen, "raw", layout=layout))
    k, v = sections.view(dtype).split(spec.kv_heads * spec.head_dim * CHUNK, dim=1)
    k = k.reshape(-1, spec.kv_heads, spec.head_dim, CHUNK).permute(0, 3, 1, 2)
    v = v.reshape(-1, spec.kv_heads, CHUNK, spec.head_dim).transpose(1, 2)
    return k.flatten(0, 1), v.flatten(0, 1)


def test_storage_says_what_a_token_takes(folder_of: FolderOf) -> None:
    spec = load_decoder(folder_of("llama_gqa"), "bfloat16").config.attention
    plain = KVStorage.bytes_per_token(spec, torch.int8)
    assert KVStorage.bytes_per_token(spec, torch.int8, 128, torch.bfloat16) == plain + 2 * 2 * 128
    storage = KVStorage(spec, 3, torch.int8, 128, torch.float32)
    assert storage.x is not None and [x.shape for x in storage.x] == [(3, CHUNK, 128)] * 2
    storage.x[1].fill_(1)
    storage.prefault()
    assert not storage.x[1].any() and KVStorage(spec, 3, torch.int8).x is None
    for bad in (None, torch.int8):
        with pytest.raises(ValueError, match="activations are kept"):
            KVStorage(spec, 3, torch.int8, 128, bad)
