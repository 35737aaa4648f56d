"""Heads of chunks that any number of tensor ranks stored, read by any other that can."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from headrace.config import AttentionSpec
from headrace.kv.storage import KVStorage
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.frame import DamagedBlob, check_blob, section_at
from headrace.offload.ranked.forms import find, forms_of
from headrace.offload.ranked.words import Place
from headrace.offload.tiers.base import HeadShare, name_of, tokens_of

HEADS, LAYERS, SLOTS, DIM = 12, 2, 3, 16
IDENTITY, DIGEST = bytes(32), bytes(range(32))
PARTS = [1, 2, 3, 4, 6, 12]


def codec_of(heads: range, dtype: torch.dtype, filled: bool) -> ChunkCodec:
    """Of a pool that has some heads, whose numbers depend on the head alone."""
    spec = AttentionSpec(
        layers=LAYERS, heads=HEADS, kv_heads=len(heads), head_dim=DIM, scale=1.0, windows=(None,) * LAYERS
    )
    storage = KVStorage(spec, SLOTS, dtype)
    if filled:
        for (layer, pool), (at, head) in product(enumerate(storage.pools), enumerate(heads)):
            generator = torch.Generator().manual_seed(100 * layer + head)
            for x in pool.tensors:
                drawn = torch.randn(SLOTS, *x.shape[2:], generator=generator) * 20
                x[:, at] = drawn.abs() if x is pool.k_scale or x is pool.v_scale else drawn.to(x.dtype)
    compute = torch.bfloat16 if dtype == torch.int8 else dtype
    return ChunkCodec(storage, spec, IDENTITY, compute, "plain")


def heads_of(share: HeadShare) -> range:
    count = HEADS // share.parts
    return range(share.part * count, (share.part + 1) * count)


def loaded(codec: ChunkCodec, blob: bytes, digest: bytes, slot: int) -> None:
    header = codec.header(memoryview(blob), digest, "k")
    for layer in range(LAYERS):
        start = section_at(LAYERS, header.section_bytes, layer)
        section = memoryview(blob)[start : start + header.section_bytes]
        header.check(layer, section)
        rows = torch.frombuffer(bytearray(section), dtype=torch.uint8)[None]
        codec.load(layer, "k", header.format, rows, [slot])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("form", ["raw", "int8", "int4"])
@pytest.mark.parametrize("parts", PARTS)
def test_a_rank_gets_its_heads_from_any_form(parts: int, form: Any, dtype: torch.dtype) -> None:
    """As from its own, to the bit, also where the tier rounds."""
    mine = HeadShare(parts - 1, parts)
    own = codec_of(heads_of(mine), dtype, filled=False)
    found = set()
    for each in forms_of(own, mine):
        for pool in own.storage.pools:
            for x in pool.tensors:
                x.zero_()
        for wanted, share in zip(each.wanted(7, DIGEST, 1, 0), each.shares, strict=True):
            source = codec_of(heads_of(share), dtype, filled=True)
            loaded(each.codec, b"".join(source.encode(2, share.of(DIGEST), "k", form)), wanted.digest, wanted.slot)
        if share.parts == parts:
            truth = [x.clone() for pool in own.storage.pools for x in pool.tensors]
            assert all(x[1].any() and not x[[0, 2]].any() for x in truth)
        assert all(map(torch.equal, [x for pool in own.storage.pools for x in pool.tensors], truth))
        found.add(share.parts)
    assert found == {other for other in PARTS if other % parts == 0 or parts % other == 0}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("raw", torch.bfloat16), ("int8", torch.bfloat16), ("int4", torch.bfloat16), ("raw", torch.int8)],
)
def test_layers_that_differ(form: Any, dtype: torch.dtype) -> None:
    """Larger layers take several sections; the last one, which has no keys of its own, takes none."""
    shapes = ((4, 64), (1, 128), (3, 32), (1, 128))
    spec = AttentionSpec(4, 4, 4, 64, 1.0, (None,) * 4, shapes=shapes, shared=(1,))
    codecs = []
    for seed in (1, 2):
        storage = KVStorage(spec, SLOTS, dtype)
        generator = torch.Generator().manual_seed(seed)
        for x in (x for pool in storage.pools for x in pool.tensors):
            x.copy_((torch.randn(x.shape, generator=generator) * 20).abs())
        codecs.append(ChunkCodec(storage, spec, IDENTITY, torch.bfloat16, "plain"))
    source, target = codecs
    assert [len(each) for each in source.sections("k")] == [3, 1, 1]
    blob = b"".join(source.encode(1, DIGEST, "k", form))
    check_blob(blob, name_of(DIGEST, "k"))
    assert len(blob) == source.blob_bytes("k", form)
    header, count = target.header(memoryview(blob), DIGEST, "k"), source.sections("k")[-1].stop
    for layer, own in enumerate(target.sections("k")):
        first, end = (section_at(count, header.section_bytes, section) for section in (own.start, own.stop))
        target.load(layer, "k", form, torch.frombuffer(bytearray(blob[first:end]), dtype=torch.uint8)[None], [2])
    for mine, theirs in zip(source.storage.pools, target.storage.pools, strict=True):
        for x, y in zip(mine.tensors, theirs.tensors, strict=True):
            assert (
                torch.equal(x[1], y[2]) if form == "raw" else (x[1].float() - y[2].float()).abs().max() < 0.1 * x.max()
            )


def test_a_share_is_no_other() -> None:
    one, other = HeadShare(0, 2), HeadShare(1, 2)
    codec = codec_of(heads_of(one), torch.bfloat16, filled=True)
    blob = b"".join(codec.encode(0, one.of(DIGEST), "k", "raw"))
    loaded(codec, blob, one.of(DIGEST), 0)
    for digest in (DIGEST, other.of(DIGEST), HeadShare(0, 3).of(DIGEST)):
        with pytest.raises(DamagedBlob, match="digest"):
            codec.header(memoryview(blob), digest, "k")


def test_a_chunk_counts_once() -> None:
    names = [name_of(HeadShare(part, 3).of(DIGEST), "k") for part in range(3)]
    assert [tokens_of(name) for name in (*names, name_of(DIGEST, "k"), name_of(DIGEST, "x"))] == [64, 0, 0, 64, 0]


class Held:
    """Tiers that have blobs of these names."""

    def __init__(self, *tiers: set[bytes]) -> None:
        self.tiers, self.asked = tiers, 0

    def find(self, names: list[bytes]) -> list[int | None]:
        self.asked += len(names)
        return [next((i for i, tier in enumerate(self.tiers) if name in tier), None) for name in names]


def test_which_form_is_found() -> None:
    """The rank's own if it has the first chunk, else the first that has; a run ends where its form does."""
    digests = [bytes([i]) * 32 for i in range(5)]
    mine = HeadShare(1, 2)
    forms = forms_of(codec_of(heads_of(mine), torch.bfloat16, filled=False), mine)
    numbers = {form.shares[0].parts: number for number, form in enumerate(forms)}

    def names(parts: int, chunks: range) -> set[bytes]:
        return {name for chunk in chunks for name in forms[numbers[parts]].names(digests[chunk])}

    nothing: Any = Held(set(), set())
    assert find(nothing, forms, digests) == [None] * 5 and nothing.asked < 5 + 20
    own: Any = Held(set(), names(2, range(3)) | names(1, range(5)))
    assert find(own, forms, digests) == [Place(1)] * 3 + [None] * 2
    whole: Any = Held(names(2, range(3, 5)), names(1, range(4)))
    assert find(whole, forms, digests) == [Place(1, numbers[1])] * 4 + [None]
    parts = names(4, range(5))
    one_less: Any = Held(parts - {forms[numbers[4]].names(digests[2])[1]})
    assert find(one_less, forms, digests) == [Place(0, numbers[4])] * 2 + [None] + [Place(0, numbers[4])] * 2
    assert find(one_less, forms, []) == []
