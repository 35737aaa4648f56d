"""First rates of a model: every family, pools with and without activations, every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernels.backend import backend_of
from headrace.kv.storage import KVStorage
from headrace.models.decoder import load_decoder
from headrace.offload.restore import timing
from headrace.offload.restore.profile import measure, probe
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import restore_split
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.host import HostTier
from headrace.offload.tiers.stack import Tiers
from headrace.types import CHUNK
from tests.support.checkpoints import EVERY_KIND_SLOWLY, FolderOf


@pytest.mark.parametrize("kind", EVERY_KIND_SLOWLY)
def test_first_rates(kind: str, folder_of: FolderOf, tmp_path: Path) -> None:
    """They are there, they are positive, they rise with the work, and a split comes of them."""
    decoder = load_decoder(folder_of(kind), "bfloat16")
    storage = KVStorage(decoder.config.attention, 3, torch.bfloat16, decoder.config.stream_size, decoder.dtype)
    tiers = [HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)]
    found = measure(decoder, storage, backend_of("cpu"), tiers)
    tokens = np.array([64.0, 2048.0, 65536.0])
    for times in (found.project(tokens), found.prefill(0.0, tokens), found.transfer("host", tokens * 1e3)):
        assert np.isfinite(times).all()
        assert (times > 0).all()
        assert times[-1] > times[0]
    assert found.as_dict()["prefill_observed"] == 0, "what was seen at the start is a guess: it decides nothing later"
    assert 0 < found.cpu_s_per_byte("host") < 1e-6
    run = StoredRun(first=0, chunks=20, suffix=5, kv_bytes=1e5, x_bytes=1e5, layers=decoder.config.layers, tiers="disk")
    assert sum(restore_split(run, found)[:3]) == 20


@pytest.mark.parametrize(("kv", "backend"), [("int8", "cpu"), ("float32", "cpu"), ("float32", "reference")])
def test_types_and_backends(kv: str, backend: str, folder_of: FolderOf) -> None:
    decoder = load_decoder(folder_of("llama"), "float32")
    storage = KVStorage(decoder.config.attention, 2, getattr(torch, kv))
    assert float(measure(decoder, storage, backend_of(backend), []).prefill(0, CHUNK)) > 0


def test_a_start_with_nothing_stored_is_brief(
    folder_of: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single calls instead of medians, and no probe: the first start costs as good as nothing."""

    def long(work: object, most_s: float = 0.0) -> float:
        raise AssertionError("a median of calls")

    monkeypatch.setattr(timing, "call_seconds", long)
    decoder = load_decoder(folder_of("llama"), "bfloat16")
    storage = KVStorage(decoder.config.attention, 2, torch.bfloat16)
    tier = DiskTier(tmp_path, 1 << 24)
    found = measure(decoder, storage, backend_of("cpu"), [tier])
    assert 0 < float(found.prefill(0, CHUNK)) < 10 and float(found.transfer("disk", 1e6)) > 0
    tiers = Tiers([tier], 1 << 20, 1.0)
    probe(tiers, found)
    assert not list(tmp_path.glob("blobs/*")) and "disk_observed" not in found.as_dict()
    assert tier.put(b"a", b"", [b"x"])
    with pytest.raises(AssertionError, match="a median"):
        measure(decoder, storage, backend_of("cpu"), [tier])
    probe(tiers, found)
    assert list(tmp_path.glob("blobs/*"))
    tiers.close(1.0)
