"""How a streamed step is cut: sequences into batches, chunks into pieces of staging; and the memory outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.plan import Span, build
from headrace.config import AttentionSpec, EngineConfig
from headrace.engine.folders import model_folder
from headrace.engine.streaming import cuts
from headrace.models.config import read_config
from headrace.offload.streaming.open import sizes
from headrace.offload.streaming.staging import Staging, StagingPlan
from headrace.offload.streaming.store import FileMemory, OutsideStore, bytes_per_chunk, room

SPEC = AttentionSpec(layers=2, heads=2, kv_heads=2, head_dim=16, windows=(None, None), scale=0.25)


def span(slots: list[int], start: int, rows: int) -> Span:
    return Span(np.array(slots, dtype=np.int32), start, rows)


def decoding(count: int, own: int, shared: int = 0) -> list[Span]:
    """Sequences of `shared` common chunks and `own` of their own, each at the last place of its last chunk."""
    spans, free = [], shared
    for _ in range(count):
        spans.append(span([*range(shared), *range(free, free + own)], (shared + own) * 64 - 1, 1))
        free += own
    return spans


def test_batches_have_about_equally_many_chunks() -> None:
    assert cuts(decoding(8, 3), 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert cuts(decoding(2, 3), 4) == [range(0, 1), range(1, 2)]
    assert cuts(decoding(3, 2, shared=5), 1) == [range(0, 3)]
    long = [span(list(range(9)), 9 * 64 - 1, 1), *(span([9 + i], 10, 1) for i in range(9))]
    assert cuts(long, 2) == [range(0, 1), range(1, 10)]


def test_a_chunk_written_in_the_step_keeps_its_readers_in_one_batch() -> None:
    """The first sequence writes slot 0, which the next two attend in the same step."""
    first = [span([0, 1], 0, 70), span([0, 2], 64, 10), span([0, 3], 64, 12)]
    others = [span([7, 8], 64, 1), span([9, 10], 64, 1)]
    assert cuts([*first, *others], 5) == [range(0, 3), range(3, 4), range(4, 5)]
    read_only = [span([0, 1], 64, 6), span([0, 2], 64, 10), span([0, 3], 64, 12)]
    assert cuts(read_only, 3) == [range(0, 1), range(1, 2), range(2, 3)]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.integers(1, 8), st.integers(1, 130), st.integers(0, 40)
)
def test_pieces_hold_every_item_once_in_order(
    count: int, own: int, shared: int, capacity: int, rows: int, projected: int
) -> None:
    spans = [Span(s.slots, max(s.start - rows + 1, shared * 64), 0) for s in decoding(count, own, shared)]
    spans = [Span(s.slots, s.start, len(s.slots) * 64 - s.start) for s in spans]
    plan = build(spans)
    cut = StagingPlan(plan, plan.items, capacity)
    pieces = cut.pieces(projected)
    seen, last = [], np.full(plan.rows, -1)
    for piece in pieces:
        assert len(piece.slots) == len(set(piece.slots.tolist())) <= capacity
        for slot, key, begin, end in piece.items.tolist():
            seen.append((int(piece.slots[slot]), key, begin, end))
            assert (last[begin:end] < key).all(), "a row's chunks come in ascending order"
            last[begin:end] = key
        written = plan.row_slots[piece.rows]
        assert (piece.slots[piece.row_slots] == written).all()
        assert not np.isin(piece.to_project, plan.row_slots).any(), "a chunk that is written is not projected"
        fresh = piece.slots[piece.projected + piece.loaded :]
        assert np.isin(fresh, plan.row_slots[plan.row_offsets == 0]).all()
        assert not np.isin(piece.to_load, fresh).any()
    assert sorted(seen) == sorted(map(tuple, plan.items.tolist()))
    total = sum(piece.projected for piece in pieces)
    assert total == min(projected, cut.counts.whole)
    assert total + sum(piece.loaded for piece in pieces) == cut.counts.stored
    assert sum(len(piece.rows) for piece in pieces) == plan.rows
    keys = np.concatenate([piece.keys for piece in pieces])
    rest = [k for s, k, _, _ in seen if s not in {int(x) for p in pieces for x in p.to_project}
            and s not in plan.row_slots]  # fmt: skip
    assert not len(keys) or not rest or keys.max() <= min(rest), "those first in position are projected"


def test_staging_takes_what_the_store_has() -> None:
    store = OutsideStore(SPEC, 8, torch.int8, torch.bfloat16, hidden=32)
    for number, tensor in enumerate([*store.x, *(t for pool in store.pools for t in pool.tensors)]):
        tensor.copy_((torch.arange(8) + number).view(8, *[1] * (tensor.dim() - 1)))
    plan = build(decoding(1, 6))
    (piece,) = StagingPlan(plan, plan.items, 8).pieces(2)
    assert (piece.projected, piece.loaded) == (2, 4)
    staging = Staging(SPEC, 8, torch.int8, torch.bfloat16, 32)
    staging.load_x(1, store, 0, piece)
    staging.load_kv(0, store, 1, piece)
    assert torch.equal(staging.x[1][:2], store.x[0][:2])
    for pool, here, other in zip(*(each.tensors for each in (store.pools[1], *staging.kv)), strict=True):
        assert torch.equal(here[2:6], pool[2:6])
        assert not here[:2].any() and not other.any()


def test_a_file_has_room_for_what_was_reckoned_and_no_more(tmp_path: Path) -> None:
    each = bytes_per_chunk(SPEC, torch.bfloat16, torch.bfloat16, 0)
    assert each == 2 * 2 * 2 * 16 * 64 * 2
    file = FileMemory(str(tmp_path), 2 * 2 * room(each // 4 * 4))
    store = OutsideStore(SPEC, 4, torch.bfloat16, torch.bfloat16, allocate=file)
    assert store.chunk_bytes * 2 == each
    store.pools[1].v.fill_(3)
    assert not store.pools[1].k.any() and not store.pools[0].v.any()
    with pytest.raises(ValueError, match="the file holds"):
        file((1,), torch.bfloat16)
    with pytest.raises(ValueError, match="lower kv_offload_disk_size or name another directory"):
        FileMemory(str(tmp_path), 1 << 60)


def test_a_gpu_stages_a_layer_of_all_that_lies_outside() -> None:
    """Its kernels take an operation in one piece. What is refused says how much would do."""
    small = EngineConfig(
        model="tiny", attention_backend="triton", offload_schedule="row", kv_offloading_size=0.05, offload_staging_mb=1
    )
    facts = (read_config(model_folder("tiny")), torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="raise offload_staging_mb to ") as error:
        sizes(small, *facts)
    enough = int(str(error.value).split("offload_staging_mb to ")[1].split(",")[0])
    found = sizes(small.replace(offload_staging_mb=enough), *facts)
    assert found.staged == found.store
    with pytest.raises(ValueError, match=f"raise offload_staging_mb to {enough},"):
        sizes(small.replace(offload_staging_mb=enough - 1), *facts)
    on_cpu = sizes(small.replace(attention_backend="cpu"), *facts)
    assert on_cpu.staged < on_cpu.store == found.store
