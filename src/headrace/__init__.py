"""Headrace: an LLM inference engine built around the KV cache.

from headrace import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from headrace.types import InvalidRequest, RequestOutput, SamplingParams
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM

__all__ = ["LLM", "AsyncLLM", "InvalidRequest", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM and AsyncLLM on first use, so that `import headrace` does not wait for torch."""
    if name == "LLM":
        from headrace.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from headrace.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
