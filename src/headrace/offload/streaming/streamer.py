"""Decoding on KV that stays outside the fast memory: each layer's chunks pass through staging, some as X.

KVPR's pipeline with double buffering: while one operation (a layer over a batch) computes, X, K and V of the next are
on their way in; new K, V and X, and hidden states that must wait, leave by the other copy stream. The chunks that are
projected from X need neither K nor V from outside. What is computed from them is what was stored, to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.offload.streaming.step import StreamBatch, StreamingOptions, StreamStep
from headrace.offload.streaming.transfers import Transfers


@dataclass(slots=True)
class Streamer:
    """A decoder over a store. One step at a time. failed: what ended a step, after which there is no other."""

    decoder: Decoder
    transfers: Transfers
    options: StreamingOptions
    failed: BaseException | None = None

    def run(self, batches: Sequence[StreamBatch]) -> list[Tensor]:
        """Hidden states [n, E] of each batch, as Decoder.forward gives them. What a batch reads of the store was
        written in an earlier step, or is written by the batch itself. Raises what a copy stream raised. The store then
        lacks what the step was to write, of which the prefix tree knows nothing: RuntimeError from then on."""
        if self.failed is not None:
            raise RuntimeError(f"an earlier step failed ({self.failed}); load the model again")
        self.transfers.settle()
        began = time.perf_counter()
        try:
            step = StreamStep(self.decoder, self.transfers, self.options, batches)
            states = [self.decoder.leave(x) for x in step.run()]
            if (device := self.transfers.device) is not None:
                device.current_stream().synchronize()
            step.note()
        except BaseException as error:
            self.failed = error
            raise
        self.transfers.totals.steps += 1
        self.transfers.totals.seconds += time.perf_counter() - began
        return states

    def close(self) -> None:
        """Ends the copy streams after what is on its way. May be called again."""
        self.transfers.streams.close()
        if self.failed is None:
            self.transfers.settle()
