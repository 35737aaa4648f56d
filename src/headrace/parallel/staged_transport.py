"""Transport of a device's tensors through pinned memory of the host, over any transport of main memory.

    x --(stream out)--> pinned --(gloo)--> pinned --(stream in)--> x of the other rank

Copies run on streams of their own, beside what is computed. What is relayed goes on from the pinned buffer that it came
into. This works wherever ranks reach each other, also if they share a device. Tensors in main memory go as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.device import Device
from headrace.parallel.device_transfer import DeviceTransfer
from headrace.parallel.pinned_room import PinnedRoom
from headrace.parallel.transport import Links, Tag, Traffic, Transfer, check_sent, flat
from headrace.parallel.waiters import Waiters


class StagedTransport:
    """One rank's end. inner: carries what is pinned."""

    def __init__(self, inner: Links, device: Device) -> None:
        self.inner, self.device = inner, device
        self.rank, self.size, self.traffic = inner.rank, inner.size, Traffic()
        self._out, self._into, self._room = device.stream(), device.stream(), PinnedRoom(device)
        self._waiters = Waiters("headrace-staged", device.enter)
        self._under_way: set[DeviceTransfer] = set()

    def isend(self, x: Tensor, to: int, tag: Tag) -> Transfer:
        """As TorchTransport.isend. Its `wait` returns when x has left the device."""
        self.traffic.sent(to, x)
        if not self.device.holds(x):
            return self.inner.isend(x, to, tag)
        check_sent(x)
        transfer, buffer = self._begin(x), self._room.take(x.nbytes)
        with torch.inference_mode(), self.device.on(self._out):
            self._out.wait_event(transfer.begun)
            buffer[: x.nbytes].copy_(flat(x), non_blocking=True)
            transfer.over.record(self._out)
        transfer.hand_over()
        self._run(transfer, buffer, lambda: self._send(transfer, buffer, to, tag))
        return transfer

    def irecv(self, x: Tensor, source: int, tag: Tag, relay: int | None = None) -> Transfer:
        """As TorchTransport.irecv."""
        if relay is not None:
            self.traffic.sent(relay, x)
        if not self.device.holds(x):
            return self.inner.irecv(x, source, tag, relay)
        check_sent(x)
        transfer, buffer = self._begin(x), self._room.take(x.nbytes)
        work = self.inner.irecv(buffer[: x.nbytes], source, tag, relay)
        self._run(transfer, buffer, lambda: self._receive(transfer, buffer, work))
        return transfer

    def _begin(self, x: Tensor) -> DeviceTransfer:
        transfer = DeviceTransfer(self.device, self.traffic, x)
        self._under_way.add(transfer)
        return transfer

    def _run(self, transfer: DeviceTransfer, buffer: Tensor, carry: Callable[[], None]) -> None:
        """Has a thread carry it, and give the buffer back."""

        def run() -> None:
            try:
                carry()
                self._room.give(buffer)
            except Exception as error:  # who waits gets it; the buffer may yet be written to
                transfer.hand_over(str(error))
            self._under_way.discard(transfer)

        self._waiters.run(run)

    def _send(self, transfer: DeviceTransfer, buffer: Tensor, to: int, tag: Tag) -> None:
        transfer.over.synchronize()
        self.inner.isend(buffer[: transfer.x.nbytes], to, tag).wait()

    def _receive(self, transfer: DeviceTransfer, buffer: Tensor, work: Transfer) -> None:
        work.wait()
        with torch.inference_mode(), self.device.on(self._into):
            self._into.wait_event(transfer.begun)
            flat(transfer.x).copy_(buffer[: transfer.x.nbytes], non_blocking=True)
            transfer.over.record(self._into)
        transfer.hand_over()
        work.drain()
        transfer.over.synchronize()

    def fail(self, why: str) -> None:
        """Everybody who waits, and who will, gets RankLost(why)."""
        self.inner.fail(why)

    def settle(self, seconds: float) -> bool:
        """Waits until nothing is under way; whether that was so in time."""
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            time.sleep(0.005)
        return self.inner.settle(max(0.0, end - time.monotonic())) and not self._under_way

    def close(self, timeout_s: float = 2.0) -> bool:
        """See TorchTransport.close."""
        return self.inner.close(timeout_s) & self._waiters.close(timeout_s)
