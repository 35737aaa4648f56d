"""Memory that nobody has written holds NaN: `MALLOC_PERTURB_=165 pytest -p tests.support.unwritten`.

New tensors and arrays hold NaN, the largest integers, or True; what C++ allocates holds bytes that glibc chooses by
MALLOC_PERTURB_. Whoever reads what was not written then gets an answer that is seen to be wrong, where a new process
has zeros and an old one whatever lay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    stack = ExitStack()
    stack.enter_context(filled())
    config.add_cleanup(stack.close)


@contextmanager
def filled() -> Iterator[None]:
    """Within it torch.empty and its like, and numpy.empty, give filled memory."""
    plain, before = np.empty, torch.are_deterministic_algorithms_enabled()

    def empty(*given: Any, **named: Any) -> Any:
        made = plain(*given, **named)
        if made.dtype.kind in "fiub":
            made.fill({"f": np.nan, "b": True}.get(made.dtype.kind) or np.iinfo(made.dtype).max)
        return made

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills, too
    np.empty = empty
    try:
        yield
    finally:
        np.empty = plain
        torch.use_deterministic_algorithms(before)
