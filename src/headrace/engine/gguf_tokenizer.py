"""The tokenizer that a GGUF file brings: its vocabulary and merges as a tokenizer of the tokenizers library.

Two kinds: byte-level BPE ("gpt2"), whose way of cutting text into words the file only names; and sentencepiece's BPE
with byte fallback, which has merges ("gemma4") or scores in place of them ("llama"). Keys: ggml's docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.engine.gguf_words import WORDS, Words
from headrace.engine.template_file import template_beside
from headrace.engine.tokenizer_file import backed_by, halves
from headrace.logs import shown
from headrace.models.gguf.facts import NO_TOKEN, token_of
from headrace.models.gguf.header import GgufFile, open_gguf, parts_of
from headrace.types import UnsupportedModel

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens."""
MAX_PIECE = 256
"""Characters of a token that is made of others at most; InternLM2's runs of spaces have 128, and only files that are
meant ill have longer ones."""
SPACE = "\u2581"
BESIDE = "put the model's tokenizer.json beside the file"
PADDING = "padding"
NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi-3's special tokens, those that leave the spaces behind them alone."""


T = TypeVar("T")
NO_VOCABULARY = "no_vocab"
"""What llama.cpp calls the tokenizer of a file that has none, even if it names its tokens."""


def has_vocabulary(model: Path) -> bool:
    """Whether the GGUF file brings a tokenizer."""
    metadata = _file(model).metadata
    kind = metadata.get("tokenizer.ggml.model")
    return "tokenizer.ggml.tokens" in metadata and not (isinstance(kind, str) and kind == NO_VOCABULARY)


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a GGUF file as transformers' fast tokenizers are. Raises UnsupportedModel for a kind that is not
    read, ValueError (or what the tokenizers library raises) for a vocabulary that is not sound."""
    vocabulary = _Vocabulary(_file(model))
    return backed_by(vocabulary.tokenizer(), vocabulary.named())


def _file(model: Path) -> GgufFile:
    return open_gguf(parts_of(model)[0])


class _Vocabulary:
    """What the file says of its tokens."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.kind = self._text("ggml.model")
        self.tokens = file.strings("tokenizer.ggml.tokens")
        self.types = self._numbers("token_type", 1)
        if self.kind == "llama":
            self._respell()
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            raise ValueError(f"{file.path}: its vocabulary has tokens twice; {BESIDE}")
        self.words = WORDS.get(str(self._text("ggml.pre"))) if self.kind == "gpt2" else None

    def _respell(self) -> None:
        """The converter writes spaces for the mark of them in tokens that users have defined."""
        for number in np.flatnonzero(self.types == USER_DEFINED):
            self.tokens[number] = self.tokens[number].replace(" ", SPACE)

    def _value(self, name: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{name}")

    def _numbers(self, name: str, default: float) -> Any:
        """One for each token."""
        found = self._value(name)
        if found is None:
            return np.full(len(self.tokens), default)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise ValueError(f"{self.file.path}: tokenizer.ggml.{name} does not have one for each token; {BESIDE}")
        return found

    def _token(self, name: str) -> str | None:
        """Of one to fill up with, which nothing here does, a number without a token counts as none, as in llama.cpp."""
        count = NO_TOKEN if name == PADDING else len(self.tokens)
        number = token_of(self.file, f"{name}_token_id", count)
        return None if number is None or number >= len(self.tokens) else self.tokens[number]

    def _text(self, name: str) -> str | None:
        return self._of_type(name, str)

    def _flag(self, name: str) -> bool | None:
        return self._of_type(f"ggml.{name}", bool)

    def _of_type(self, name: str, kind: type[T]) -> T | None:
        """None where the file does not have it."""
        found = self.file.metadata.get(f"tokenizer.{name}")
        if found is None or isinstance(found, kind):
            return found
        needed = {str: "no text", bool: "neither true nor false"}[kind]
        raise ValueError(f"{self.file.path}: tokenizer.{name} is {needed}; {BESIDE}")

    def named(self) -> dict[str, Any]:
        """Special tokens and the template, by the names of transformers' arguments. Raises ValueError for a template
        beside the file that cannot be read."""
        tokens = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": PADDING}
        found: dict[str, Any] = {ours: self._token(theirs) for ours, theirs in tokens.items()}
        beside = self.file.path.parent
        found["chat_template"] = self._text("chat_template") or template_beside(beside)
        return {name: value for name, value in found.items() if value is not None}

    def tokenizer(self) -> Tokenizer:
        if self.kind == "gpt2":
            made = self._byte_level()
        elif self.kind in ("llama", "gemma4"):
            made = self._sentencepiece()
        else:
            raise UnsupportedModel(
                f"{self.file.path}: tokenizer {shown(str(self.kind))} is not read from GGUF; "
                f"gpt2, llama and gemma4 are: {BESIDE}"
            )
        for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
            added = [self._added(self.tokens[i], special) for i in np.flatnonzero(self.types == kind)]
            made.add_special_tokens(added) if special else made.add_tokens(added)
        self._add_ends(made)
        return made

    def _added(self, token: str, special: bool) -> AddedToken:
        """Phi-3's take the spaces behind them in; files do not say so (llama.cpp knows it by the model's name)."""
        phi3 = self.kind == "llama" and self.file.metadata.get("general.architecture") == "phi3"
        return AddedToken(token, normalized=False, special=special, rstrip=phi3 and token not in NOT_STRIPPED)

    def _byte_level(self) -> Tokenizer:
        words = self._known_words()
        made = Tokenizer(models.BPE(self.ids, self._listed(), ignore_merges=words.whole))
        if words.normal:
            made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence([step() for step in words.steps])
        made.decoder = decoders.ByteLevel()
        return made

    def _known_words(self) -> Words:
        if self.words is None:
            raise UnsupportedModel(
                f"{self.file.path}: tokenizer.ggml.pre {shown(self._text('ggml.pre') or '(none)')} is not known; "
                f"known: {', '.join(WORDS)}: {BESIDE}"
            )
        return self.words

    def _sentencepiece(self) -> Tokenizer:
        asked, gemma4 = self._flag("add_space_prefix"), self.kind == "gemma4"
        prefix, merges = not gemma4 if asked is None else asked, self._listed() if gemma4 else self._merges()
        made = Tokenizer(
            models.BPE(self.ids, merges, unk_token=self._token("unknown"), fuse_unk=True, byte_fallback=True)
        )
        spaces: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
        made.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        return made

    def _listed(self) -> list[tuple[str, str]]:
        """The merges in the file. Raises ValueError where there is none, and for one that is not of two tokens."""
        pairs = [merge.split(" ") for merge in self.file.strings("tokenizer.ggml.merges")]
        wrong = next((pair for pair in pairs if len(pair) != 2), None)
        if wrong is not None or not pairs:
            told = "has none" if wrong is None else f"has {shown(repr(' '.join(wrong)))}, two tokens are needed"
            raise ValueError(f"{self.file.path}: tokenizer.ggml.merges {told}; {BESIDE}")
        return [(pair[0], pair[1]) for pair in pairs]

    def _merges(self) -> list[tuple[str, str]]:
        """All ways to make a token of two, those of the best scores first, as transformers' generate_merges has them.
        Tokens that users have defined go before all others, as in sentencepiece; the converter drops their scores."""
        if self._value("scores") is None:
            raise ValueError(f"{self.file.path}: tokenizer.ggml.scores is missing, which orders its merges; {BESIDE}")
        scores = np.where(self.types == USER_DEFINED, np.inf, self._numbers("scores", 0.0))
        ids = self.ids
        numbers: list[int] = []
        pairs: list[tuple[str, str]] = []
        for number in np.flatnonzero(~np.isin(self.types, (CONTROL, BYTE, UNKNOWN))).tolist():
            token = self.tokens[number]
            found = list(halves(token, ids)) if len(token) <= MAX_PIECE else []
            numbers += [number] * len(found)
            pairs += found
        lefts, rights = (np.array([len(pair[side]) for pair in pairs], int) for side in (0, 1))
        order = np.lexsort((-rights, -lefts, -scores[np.array(numbers, int)]))
        return [pairs[each] for each in order.tolist()]

    def _add_ends(self, made: Tokenizer) -> None:
        """Tokens that a text begins and ends with, where the file asks for them."""
        begins = self._flag("add_bos_token")
        begins = (self.words is None or self.words.begins) if begins is None else begins
        wanted = {"bos": begins, "eos": self._flag("add_eos_token")}
        texts = {name: text for name, asked in wanted.items() if asked and (text := self._token(name)) is not None}
        if not texts:
            return
        before, after = ([texts[name]] if name in texts else [] for name in ("bos", "eos"))
        made.post_processor = processors.Sequence([
            *([processors.ByteLevel(trim_offsets=False)] if self.kind == "gpt2" else []),
            processors.TemplateProcessing(
                single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after],
                special_tokens=[(text, self.ids[text]) for text in dict.fromkeys(texts.values())],
            ),
        ])  # fmt: skip
