"""Random checkpoints, written once per session, and both readings of each: transformers' and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.engine.tokenizer import Tokenizer
from headrace.models.decoder import Decoder, load_decoder
from tests.cpu.checkpoints import make_checkpoint
from tests.cpu.tokenizers_made import KINDS, save

transformers.utils.logging.disable_progress_bar()

FolderOf = Callable[[str], Path]
OursOf = Callable[..., Decoder]
TheirsOf = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch on one thread: on a busy machine small operations wait longer for a second one than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """folder_of(kind): the fp32 checkpoint of that kind. Not to be changed; see tests.cpu.checkpoints.KINDS."""
    return lru_cache(None)(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def ours_of(folder_of: FolderOf) -> OursOf:
    """ours_of(kind, dtype): that checkpoint as our decoder."""
    return lru_cache(None)(lambda kind, dtype="float32": load_decoder(folder_of(kind), dtype))


@pytest.fixture(scope="session")
def theirs_of(folder_of: FolderOf) -> TheirsOf:
    """theirs_of(kind, dtype): a new model of transformers (dynamic NTK makes it remember what it has seen)."""

    def load(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=dtype)
        return model.eval()

    return load


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: Tokenizer(save(make(), tmp_path_factory.mktemp(name))) for name, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: Any, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]
