"""tokenizer.json rules: it says how a model's tokenizer was trained to cut text, and transformers 4 went by it.

transformers 5 builds the tokenizers of some classes anew, by the rules of the class that tokenizer_config.json names
(GPT2Tokenizer, LlamaTokenizer), and takes from tokenizer.json the vocabulary alone. For SmolLM2, whose digits stand
apart, or Yi, whose texts begin without a space, these are other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.files import read_given
from headrace.models.files import read_json

MODEL = ("ignore_merges", "fuse_unk", "byte_fallback", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
"""Of a BPE, what changes its tokens beside vocabulary and merges."""
MAX_TOKENIZER = 256 << 20
"""Bytes; Gemma 3's has 33 MB."""
AS_IT_IS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that take tokenizer.json whole."""


def backed_by(backend: Tokenizer, named: dict[str, Any]) -> Any:
    """A tokenizer of transformers' over one of the tokenizers library, with special tokens and the template by the
    names of its arguments."""
    from transformers import PreTrainedTokenizerFast

    class Backed(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __init__(self) -> None:
            # Set as transformers' own classes do it: one given as an argument is copied, which takes seconds.
            self._tokenizer = backend
            super().__init__(clean_up_tokenization_spaces=False, **named)

    return Backed()


def halves(token: str, tokens: Container[str]) -> Iterator[tuple[str, str]]:
    """All ways to make a token of two others."""
    for cut in range(1, len(token)):
        if (right := token[cut:]) in tokens and (left := token[:cut]) in tokens:
            yield left, right


def follow(made: Any, folder: Path) -> None:
    """Gives a tokenizer, as transformers loaded it of the folder, the steps of its tokenizer.json, and the token that a
    text begins with where tokenizer_config.json asks for it. Raises what reading a damaged file raises."""
    path, backend = folder / "tokenizer.json", getattr(made, "backend_tokenizer", None)
    if backend is None or not path.is_file():
        return
    if type(made).__name__ not in AS_IT_IS:
        _take_steps(backend, json.loads(read_given(path, MAX_TOKENIZER)))
    _begin(made, folder)


def _take_steps(backend: Tokenizer, said: dict[str, Any]) -> None:
    if said["model"].get("type") != "BPE":
        return
    said = {**said, "added_tokens": [], "model": {**said["model"], "vocab": {}, "merges": []}}  # quick without them
    steps = Tokenizer.from_str(json.dumps(said))
    for name in MODEL:
        setattr(backend.model, name, getattr(steps.model, name))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = steps.normalizer, steps.pre_tokenizer, steps.decoder


def _begin(made: Any, folder: Path) -> None:
    """In transformers 4 a tokenizer of Llama's class began a text where its configuration says so; tokenizer.json, as
    DeepSeek-V3's, may be silent."""
    try:
        given = read_json(folder / "tokenizer_config.json")
    except ValueError:
        return
    kind = str(given.get("tokenizer_class", "")).removesuffix("Fast")
    if kind != "LlamaTokenizer" or given.get("add_bos_token") is not True or made.bos_token is None:
        return
    if made("a", verbose=False)["input_ids"][:1] != [made.bos_token_id]:
        made.add_bos_token = True
