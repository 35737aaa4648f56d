"""What the card reads and multiplies at best: the limits of all that is measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tools.gpu import timing
from tools.gpu.runner import Case, Row


def cases() -> Iterator[Case]:
    yield Case("limits", limits)


def limits() -> Row:
    facts = torch.cuda.get_device_properties(timing.CUDA)
    figures = {"read_gbps": timing.read_gbps(), "gemm_tflops": timing.gemm_tflops()}
    return Row(torch.cuda.get_device_name(), figures | {"processors": facts.multi_processor_count,
                                                       "memory_gib": facts.total_memory / 2**30})  # fmt: skip
