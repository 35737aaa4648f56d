"""The metadata of a GGUF file's architecture, each value checked as it is read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.logs import shown
from headrace.models.gguf.header import GgufFile, TensorInfo
from headrace.types import UnsupportedModel

CONTROL = 3
"""Type of special tokens."""
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<|call|>",
)  # fmt: skip
"""Those of them that end an answer, whatever else the file says: most name one of several, as in llama.cpp."""
HARMONY, WITHIN = "<|return|>", "<|end|>"
"""Where there is the one, as in gpt-oss, the other ends a message within an answer."""

YARN_KEYS = {"yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier"}
"""Under rope.scaling."""
READ_KEYS = dict.fromkeys(("mistral3", "mistral4", "deepseek2", "deepseek32", "glm-dsa"), YARN_KEYS) | {
    "olmo2": {"yarn_attn_factor"}
}
"""By architecture."""

F32_ALONE = (
    ".ssm_conv1d.weight", *(f".ssm_conv1d_{part}.weight" for part in "qkv"), ".shortconv.conv.weight", ".ssm_a",
    ".ssm_d", ".ssm_norm.weight", ".bias", "position_embd.weight",
)  # fmt: skip
"""Filters of convolutions, vectors of Mamba-2 layers, biases of experts, learned positions: always F32."""


EMBED, TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"
NO_TOKEN = (1 << 32) - 1
"""Stands for no token, as negative numbers do."""


def token_of(file: GgufFile, name: str, count: int) -> int | None:
    """The number of a special token; None where the file names none. Raises ValueError for one that is not below
    `count`, or is no number."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and (value < 0 or value == NO_TOKEN)):
        return None
    if not whole or value >= count:
        told = f"tokenizer.ggml.{name} is {shown(repr(value))}, a number below {count} is needed"
        raise ValueError(f"{file.path}: {told}; download it again")
    return int(value)


class FileFacts:
    """The metadata of an architecture, by the end of the key."""

    def __init__(self, file: GgufFile, *parts: GgufFile) -> None:
        self.file = file
        self._where = {name: part for part in (file, *parts) for name in part.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: part.tensors[name] for name, part in self._where.items()}
        name = str(file.metadata.get("general.architecture"))
        self.prefix, self.scaling = f"{name}.", READ_KEYS.get(name, set())

    @property
    def dtype(self) -> str:
        """The type computed in: that of numbers where all are numbers, else bfloat16."""
        matrices = [info for name, info in self.tensors.items() if len(info.shape) > 1 and not name.endswith(F32_ALONE)]
        kinds = {info.type.name for info in matrices}
        return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")

    def value(self, name: str) -> Any:
        return self.file.metadata.get(self.prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        return int(self._typed(name, default, int))

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._typed(name, default, (int, float)))

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.file.path}: {self.prefix}{name} is neither true nor false; download it again")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.value(name)
        if not isinstance(value, str | None):
            raise ValueError(f"{self.file.path}: {self.prefix}{name} is no text; download it again")
        return default if value is None else value

    @property
    def layers(self) -> int:
        """Blocks but for those that guess further tokens."""
        return self.count("block_count") - self.count("nextn_predict_layers", 0)

    def each_layer(self, name: str) -> list[int] | None:
        """A number or a flag for each layer; those of blocks behind the last layer may stand there too, and are left
        out. None where the file does not have the key."""
        value = self.value(name)
        if value is None:
            return None
        sizes = sorted({self.layers, self.count("block_count")})
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "bui" or len(value) not in sizes:
            told = f"{self.file.path}: {self.prefix}{name} does not have a number or a flag for each layer"
            raise ValueError(f"{told} (block_count says {' or '.join(map(str, sizes))}); download it again")
        return [int(each) for each in value[: self.layers]]

    def vector(self, name: str, length: int) -> np.ndarray[Any, Any]:
        """Divisors of the rotation, in fp64."""
        info = self.tensors.get(name)
        if info is None or info.type.name != "F32" or info.shape != (length,):
            raise UnsupportedModel(f"{self.file.path}: {name} is not F32 [{length}], half of what is rotated of a head")
        return np.frombuffer(self._where[name].bytes_of(info), np.float32).astype(np.float64)

    def _typed(self, name: str, default: Any, kind: Any) -> Any:
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, np.ndarray) and len(each := set(value.tolist())) == 1:
            (value,) = each  # of every layer
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(f"{self.file.path}: {self.prefix}{name} differs from layer to layer: not supported")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.file.path}: {self.prefix}{name} is {shown(repr(value))}; download it again")
        return value

    def token(self, name: str) -> int | None:
        """See token_of."""
        return token_of(self.file, name, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding. Raises ValueError where there is none, or the tokens are more."""
        if EMBED not in self.tensors:
            raise ValueError(f"{self.file.path}: there is no {EMBED}; download it again")
        rows, count = self.tensors[EMBED].shape[0], self.file.length(TOKENS)
        if count > rows:
            raise ValueError(f"{self.file.path}: {TOKENS} has {count} tokens, {EMBED} {rows} rows; download it again")
        return rows

    def ends(self) -> list[int] | None:
        """Tokens that end an answer."""
        found = [self.token(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
        types = self.file.metadata.get("tokenizer.ggml.token_type")
        if isinstance(types, np.ndarray) and TOKENS in self.file.metadata:
            texts = self.file.strings(TOKENS)
            ends = {token: texts[token] for token in np.flatnonzero(types[: len(texts)] == CONTROL).tolist()}
            within = WITHIN if HARMONY in ends.values() else None
            found += [token for token, text in ends.items() if text in ENDS and text != within]
        return list(dict.fromkeys(token for token in found if token is not None)) or None
