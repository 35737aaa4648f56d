"""Which of a caller's arguments a refused prompt is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.types import InvalidRequest


@contextmanager
def naming(param: str, index: int | None = None) -> Iterator[None]:
    """Names the caller's argument in refusals of a prompt. index: which of several prompts it is."""
    try:
        yield
    except InvalidRequest as error:
        if error.param not in ("prompt", "prompts"):
            raise
        place = param if index is None else f"{param}[{index}]"
        told = str(error).removeprefix(f"{error.param}: ")
        raise InvalidRequest(f"{place}: {told}", param, error.code) from None
