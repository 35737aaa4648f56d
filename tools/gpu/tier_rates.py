"""Storing chunks of a GPU's pool in pinned host memory, and restoring them, over its real link.

    python tools/gpu/tier_rates.py [SECONDS]

Chunks of random numbers, bf16, LAYERS layers of a model's shape, through the engine's own codec, host tier and copy
streams: encoded and stored one after the other, brought back as one restore with all checks. What comes back must be
what was stored, to the bit. Rates are of the chunks' bytes; `link` is a plain copy of 256 MiB from pinned memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.config import AttentionSpec
from headrace.device import current
from headrace.kv.storage import KVStorage
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CudaStream
from headrace.offload.restore.pieces import WantedChunk
from headrace.offload.restore.transfer import RestoreTransfer
from headrace.offload.tiers.base import name_of
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.pinned import PinnedBuffers
from headrace.offload.tiers.stack import Tiers

LAYERS, CHUNKS, DIM = 8, 64, 128
SHAPES = {"MHA": 32, "GQA": 8}
"""KV heads of 128, as Llama-2-7B and Llama-3-8B have them."""
GIVEN = bytes(32)


class Bench:
    """A pool of twice CHUNKS slots: chunks are stored from the first half and restored into the second."""

    def __init__(self, kv_heads: int) -> None:
        device = current()
        spec = AttentionSpec(LAYERS, 32, kv_heads, DIM, 1.0, (None,) * LAYERS)
        self.storage = KVStorage(spec, 2 * CHUNKS, torch.bfloat16, device=device.place)
        for pool in self.storage.pools:
            for x in pool.tensors:
                x[:CHUNKS].normal_()
        self.codec = ChunkCodec(self.storage, spec, GIVEN, torch.bfloat16, "plain", device=device)
        size = self.codec.blob_bytes("k", "raw")
        self.tiers = Tiers([HostTier((CHUNKS + 1) * size, allocate=PinnedBuffers(device))], 1 << 20, 10.0)
        self.stream = CudaStream("restore", device)
        self.digests = [number.to_bytes(32, "little") for number in range(CHUNKS)]
        self.bytes = CHUNKS * size

    def store(self) -> float:
        """Seconds of storing all chunks, none of which is there."""
        self.tiers.drop([name_of(digest, "k") for digest in self.digests])
        torch.cuda.synchronize()
        began = time.perf_counter()
        for slot, digest in enumerate(self.digests):
            assert self.tiers.offer(0, name_of(digest, "k"), b"", self.codec.encode(slot, digest, "k", "raw"), 0)
        return time.perf_counter() - began

    def restore(self) -> float:
        """Seconds of restoring all. Raises AssertionError where other bits come."""
        chunks = [WantedChunk(i, digest, CHUNKS + i, "k", 0) for i, digest in enumerate(self.digests)]
        for pool in self.storage.pools:
            for x in pool.tensors:
                x[CHUNKS:] = 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        transfer = RestoreTransfer(self.codec, self.tiers, chunks, 0)
        transfer.start(self.stream)
        transfer.last.synchronize()
        taken = time.perf_counter() - began
        assert transfer.good == CHUNKS, transfer.reason
        same = [torch.equal(x[:CHUNKS], x[CHUNKS:]) for pool in self.storage.pools for x in pool.tensors]
        assert all(same), "what came back is not what was stored"
        return taken

    def close(self) -> None:
        self.stream.close()
        self.tiers.close(1.0)


def link_gbps() -> float:
    """A plain copy from pinned memory."""
    host = current().pinned((256 << 20,), torch.uint8)
    there = torch.empty(host.shape, dtype=torch.uint8, device=current().place)

    def copy() -> float:
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return host.nbytes / median(copy, 0.0) / 1e9


def median(run: Callable[[], float], seconds: float, least: int = 5) -> float:
    """Of the times that `run` tells, after one that does not count."""
    run()
    found, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < least:
        found.append(run())
    return statistics.median(found)


def table(seconds: float) -> dict[str, Any]:
    """Rates of all shapes, measured in about so many seconds."""
    rows = {}
    for name, kv_heads in SHAPES.items():
        bench = Bench(kv_heads)
        stored = median(bench.store, seconds / 8, least=2)
        restored = median(bench.restore, seconds / 4)
        rows[name] = {"store_gbps": bench.bytes / stored / 1e9, "restore_gbps": bench.bytes / restored / 1e9}
        bench.close()
    return {"device": current().name, "link_gbps": link_gbps(), "rows": rows}


def main(seconds: float) -> None:
    found = table(seconds)
    print(f"{found['device']}: link {found['link_gbps']:.1f} GB/s")
    for name, row in found["rows"].items():
        print(f"{name}: stored at {row['store_gbps']:.1f} GB/s, restored at {row['restore_gbps']:.1f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
