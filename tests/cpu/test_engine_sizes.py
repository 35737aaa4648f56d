"""Bytes that are told from a model's facts, against those of the tensors that it then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config import Quantization
from headrace.engine.capacity import model_folder
from headrace.kernels import cpu
from headrace.kv.storage import KVStorage
from headrace.models.decoder import load_decoder
from headrace.models.plain_config import plain_config
from headrace.models.sizes import kv_bytes_per_token, loading_bytes, weight_bytes
from headrace.offload.weights.layers import tensors_of
from tests.support.checkpoints import WITH_EXPERTS, FolderOf

pytestmark = pytest.mark.cpu

TINY = model_folder("tiny")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_the_weights(dtype: str, quantization: Quantization) -> None:
    sizes_are_told(TINY, dtype, quantization)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_bytes_of_a_head_that_is_the_table(quantization: Quantization, folder_of: FolderOf) -> None:
    """Held once; rounded, it is another one. While it is packed, both are there."""
    folder = folder_of("llama_tied")
    sizes_are_told(folder, "bfloat16", quantization)
    config = plain_config(folder)
    more = loading_bytes(config, "bfloat16") - weight_bytes(config, "bfloat16")
    assert more == 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_bytes_of_experts(kind: str, folder_of: FolderOf) -> None:
    for quantization in ("none", "int8", "int4", "w8a8"):
        sizes_are_told(folder_of(kind), "bfloat16", quantization)


def sizes_are_told(folder: Path, dtype: Any, quantization: Quantization) -> None:
    decoder = load_decoder(folder, dtype, quantization=quantization)
    plain = {id(w): w.nbytes for name, w in decoder.weights.items() if name not in decoder.matrices}
    packed = sum(x.nbytes for weight in decoder.matrices.values() for x in tensors_of(weight).values())
    told = weight_bytes(plain_config(folder), dtype, quantization)
    filled = sum(-w.shape[0] % cpu.COLUMNS * w.shape[1] * 4 for w in decoder.matrices.values())  # up to whole blocks
    assert sum(plain.values()) + packed == pytest.approx(told, rel=0.03, abs=filled)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_of_the_cache(dtype: str) -> None:
    spec = plain_config(TINY).attention
    assert kv_bytes_per_token(spec, dtype, "auto") == KVStorage.bytes_per_token(spec, getattr(torch, dtype))
    assert kv_bytes_per_token(spec, dtype, "int8") == KVStorage.bytes_per_token(spec, torch.int8)
