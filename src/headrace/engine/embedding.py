"""One vector for a text: hidden states pooled as the checkpoint says, cut and normalised.

The engine pools (engine.pooled) and sends fp32 bytes; whoever asked cuts and normalises (finished). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.engine.prompts import Prompts, listed
from headrace.pooling import Pooling
from headrace.types import InvalidRequest, SamplingParams

Vector = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]
"""[inputs, size]"""
EMBEDS = SamplingParams(max_tokens=0, prompt_logprobs=0)
"""Parameters of a request that embeds: none has a say."""


def finished(raw: bytes, pooling: Pooling, dimensions: int | None = None) -> Vector:
    """The embedding of what the engine has pooled: the first `dimensions` numbers, normalised if the checkpoint says
    so."""
    vector = np.frombuffer(raw, "<f4")[:dimensions].astype(np.float64)
    if pooling.normalize:
        length = float(np.sqrt(np.square(vector).sum()))
        vector = vector / length if length else vector
    return vector.astype(np.float32)


def check_dimensions(dimensions: int | None, size: int, pooling: Pooling) -> None:
    """Raises InvalidRequest unless the embedding, of `size` numbers, may be cut to so many; for a classifier always."""
    if pooling.labels:
        raise InvalidRequest("this model has a classifier's head and makes no embeddings: classify, or rerank", "model")
    if dimensions is None:
        return
    if type(dimensions) is int and dimensions == size:
        return
    if type(dimensions) is not int or not 1 <= dimensions < size:
        raise InvalidRequest(f"dimensions must be between 1 and {size}, got {dimensions!r}", "dimensions")
    if pooling.sizes is None:
        told = f"the model's embeddings have {size} numbers and cannot be cut: leave dimensions out"
        raise InvalidRequest(told, "dimensions")
    if pooling.sizes and dimensions not in pooling.sizes:
        told = ", ".join(map(str, pooling.sizes))
        raise InvalidRequest(f"the model's embeddings can be cut to {told}; got {dimensions}", "dimensions")


def check_classifies(pooling: Pooling) -> None:
    """Raises InvalidRequest unless the model has a classifier's head."""
    if not pooling.labels:
        told = "this model has no classifier's head; score, or embed"
        raise InvalidRequest(told, "model")


def inputs_of(inputs: Prompts) -> list[str | list[int]]:
    """One text or several, as several. Raises InvalidRequest for what is neither, and for none."""
    found = listed(inputs, "inputs")
    if not found:
        raise InvalidRequest("there is nothing to embed: give at least one text", "inputs")
    return found


class EmbeddingAborted(RuntimeError):
    """A request has ended without its embedding."""


def stacked(raw: Sequence[bytes | None], pooling: Pooling, dimensions: int | None) -> Vectors:
    """Embeddings [inputs, size] of what the engine has pooled. Raises EmbeddingAborted where that is missing."""
    found = [each for each in raw if each is not None]
    if len(found) < len(raw):
        raise EmbeddingAborted("an embedding was aborted: the model's output is broken, or a request was ended")
    return np.stack([finished(each, pooling, dimensions) for each in found])
