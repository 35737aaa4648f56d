"""Headrace: an LLM inference engine built around the KV cache.

from headrace import LLM, SamplingParams

with LLM("tiny") as llm:
    print(llm.generate("In the beginning", SamplingParams(temperature=0))[0].text)
"""

from typing import TYPE_CHECKING, Any

from headrace.outputs import RequestOutput, Score
from headrace.types import (
    Delta,
    EngineDead,
    InvalidRequest,
    Overloaded,
    SamplingParams,
    Structured,
    UnsupportedModel,
)
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "Delta",
    "EngineDead",
    "InvalidRequest",
    "Overloaded",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "Structured",
    "UnsupportedModel",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """LLM and AsyncLLM on first use, so that `import headrace` does not wait for torch."""
    if name == "LLM":
        from headrace.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from headrace.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
