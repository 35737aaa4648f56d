"""GGUF files with the vocabulary of a tokenizer alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend

from tests.support.small_tokenizers import TEMPLATE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(
    path: Path,
    backend: Backend,
    kind: str,
    change: Callable[[GGUFWriter], object] = lambda _: None,
    architecture: str = "llama",
) -> Path:
    """A file with the vocabulary of a tokenizer alone."""
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    added = {
        token.content: CONTROL if token.special else USER_DEFINED
        for token in backend.get_added_tokens_decoder().values()
    }
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    writer = GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    types = [added.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    writer.add_token_types([UNKNOWN if token == "<unk>" else each for token, each in zip(tokens, types, strict=True)])
    if kind != "llama":
        writer.add_token_merges(merges)
    else:  # a token's score says how early it is made
        scores = {"".join(merge.split(" ")): -float(rank) for rank, merge in enumerate(merges)}
        writer.add_token_scores([scores.get(token, -1000.0) for token in tokens])
    if kind != "gpt2":
        writer.add_unk_token_id(vocabulary["<unk>"])
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_chat_template(TEMPLATE)
    change(writer)
    close(writer)
    return path
