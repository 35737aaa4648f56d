"""Copy streams of a GPU. `make gpu-check` runs these; without a device they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.device import current
from headrace.offload.copy_streams import PINNED_BYTES, CopyStreams, CudaStream, open_copy_streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def both() -> Iterator[CopyStreams]:
    both = open_copy_streams(current())
    yield both
    both.close()


def test_streams_of_their_own(both: CopyStreams) -> None:
    assert isinstance(both.into, CudaStream) and isinstance(both.out, CudaStream)
    assert both.into.stream != both.out.stream
    assert both.into.stream != torch.cuda.current_stream()


@pytest.mark.parametrize("count", [1, 1000, PINNED_BYTES, 5 * PINNED_BYTES // 2 + 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_there_and_back(both: CopyStreams, count: int, pinned: bool) -> None:
    """Bytes of any number, through the pinned buffers or from pinned memory."""
    source = torch.randint(256, (count,), dtype=torch.uint8)
    source = source.pin_memory() if pinned else source
    there, back = torch.empty(count, dtype=torch.uint8, device="cuda"), torch.empty_like(source, pin_memory=pinned)
    both.into.copy(there, source, "kv").wait()
    assert torch.equal(there.cpu(), source)
    both.out.copy(back, there, "kv").synchronize()
    assert torch.equal(back, source)


def test_parts_and_types(both: CopyStreams) -> None:
    source = torch.randn(64, 8, 32).bfloat16()
    there = torch.zeros(3, 64, 8, 32, dtype=torch.bfloat16, device="cuda")
    both.into.copy(there[1], source, "kv").wait()
    assert torch.equal(there[1].cpu(), source)
    assert not there[0].any() and not there[2].any()
    turned = torch.empty(8, 64, 32, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    both.into.copy(turned, source, "kv").wait()
    assert torch.equal(turned.cpu(), source)


def test_after_what_is_being_computed(both: CopyStreams) -> None:
    """The staging buffer is read by a long kernel: the copy into it comes after, and the result is the old one."""
    stage, fresh = torch.ones(4096, 4096, device="cuda"), torch.full((4096, 4096), 2.0).pin_memory()
    product = stage
    for _ in range(50):
        product = stage @ product / 4096
    both.into.copy(stage, fresh, "kv").wait()
    assert torch.equal(product, torch.ones_like(product))
    assert torch.equal(stage, torch.full_like(stage, 2.0))


def test_what_is_computed_after_the_wait_sees_it(both: CopyStreams) -> None:
    stage = torch.zeros(1 << 22, device="cuda")
    for turn in range(1, 20):
        both.into.copy(stage, torch.full((1 << 22,), float(turn)), "kv").wait()
        assert bool((stage == turn).all())


def test_errors_are_handed_on(both: CopyStreams) -> None:
    def fail() -> None:
        raise OSError("gone")

    bad = both.into.submit(fail, 3, "kv")
    with pytest.raises(OSError, match="gone"):
        bad.wait()
    both.into.submit(lambda: None, 5, "kv").wait()
