"""Instruction sets, and random checkpoints, written once per session, with both readings: transformers' and ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from headrace.engine.tokenizer import Tokenizer
from headrace.kernels import cpu
from headrace.models.decoder import load_decoder
from tests.support.checkpoints import FolderOf, OursOf, TheirsOf, make_checkpoint
from tests.support.small_tokenizers import KINDS, save

transformers.utils.logging.disable_progress_bar()
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):  # Triton is built for Linux only
    from tests.support.interpreter import prepare_once
    from tests.support.interpreter_types import keep_types

    prepare_once()
    keep_types()


@pytest.fixture(params=cpu.available_isas() if cpu.available() else ())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    before = cpu.isa()
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(before)


@pytest.fixture
def first_caches() -> Iterator[tuple[int, ...]]:
    """Sizes for `cpu.use_l1`, by which kernels decide what to fetch where; the machine's own comes back at the end."""
    yield 32, 48
    cpu.use_l1(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch on one thread: on a busy machine small operations wait longer for a second one than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """folder_of(kind): the fp32 checkpoint of that kind. Not to be changed; see tests.support.checkpoints.KINDS."""
    return lru_cache(None)(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def ours_of(folder_of: FolderOf) -> OursOf:
    """ours_of(kind, dtype): that checkpoint as our decoder."""
    return lru_cache(None)(lambda kind, dtype="float32": load_decoder(folder_of(kind), dtype))


@pytest.fixture(scope="session")
def theirs_of(folder_of: FolderOf) -> TheirsOf:
    """theirs_of(kind, dtype): the model of transformers; each time another where it remembers what it has seen."""

    def load(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        [name] = json.loads((folder_of(kind) / "config.json").read_text())["architectures"]
        model: PreTrainedModel = getattr(transformers, name).from_pretrained(folder_of(kind), dtype=dtype)
        return model.eval()

    kept = lru_cache(None)(load)
    return lambda kind, *dtype: (load if kind == "llama_dynamic" else kept)(kind, *dtype)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: Tokenizer(save(make(), tmp_path_factory.mktemp(name))) for name, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: Any, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads_kept() -> Iterator[None]:
    """torch has as many threads after the test as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
