"""What a folder of an adapter says of it (LoRA, as PEFT writes it): its name here, scales and identity. No torch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.files import open_given
from headrace.logs import shown
from headrace.models.files import check_whole, read_json
from headrace.types import UnsupportedModel

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BLOCK = 1 << 20

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "use_bdlora": (False, None),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Fields of adapter_config.json that change more than what is computed here, and the values that do not."""
OTHER_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What init_lora_weights begins with where training began by changing the model's own weights."""
AS_PEFT = r"(.*\.)?({})$"
"""How PEFT matches a pattern with a module's name; in Python's regular expressions, so with the meaning of ^ there."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """name: by which requests ask for it. alpha: numerator of its scale, `alphas` of modules by a pattern of their
    names; by_root: the denominator is the root of the rank, not the rank (rsLoRA, arXiv 2312.03732). invocation: token
    ids from whose last place in a prompt on rows have the adapter (activated LoRA, arXiv 2504.12397); (): all rows.
    digest: of its files, 32 bytes."""

    name: str
    folder: Path
    alpha: float
    alphas: tuple[tuple[str, float], ...]
    by_root: bool
    invocation: tuple[int, ...]
    digest: bytes

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def scale(self, module: str, rank: int) -> float:
        """By which a module's change, of that rank, is multiplied."""
        own = (alpha for pattern, alpha in self.alphas if re.match(AS_PEFT.format(pattern), module))
        return next(own, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def read_adapter(name: str, folder: Path) -> AdapterFacts:
    """Of the adapter in `folder`. Raises ValueError for files that are not sound, UnsupportedModel for an adapter of
    another kind than LoRA, or that changes more."""
    called = f"adapter {shown(repr(name))}"
    try:
        if not (folder / WEIGHTS).is_file():
            raise ValueError(_without_weights(folder))
        config = read_json(folder / CONFIG)
        _check(config)
        check_whole(folder / WEIGHTS)
        return AdapterFacts(
            name, folder, _number(config.get("lora_alpha", 8), "lora_alpha"), _patterns(config.get("alpha_pattern")),
            _flag(config.get("use_rslora"), "use_rslora"), _invocation(config), _digest(folder),
        )  # fmt: skip
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{called}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{called}: {error}") from None


def _without_weights(folder: Path) -> str:
    if (folder / "adapter_model.bin").is_file():
        return f"{folder}: adapter_model.bin holds pickled weights, which can run code when read; save it as {WEIGHTS}"
    return f"{folder} holds no {WEIGHTS}; download it too"


def _check(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"peft_type {shown(repr(kind))} is not supported; LORA is")
    for field, harmless in REFUSED.items():
        value = config.get(field)
        if not any(value == each and type(value) is type(each) for each in harmless):
            raise UnsupportedModel(f"{field} {shown(repr(value))} is not supported; merge it into its model")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(OTHER_WEIGHTS):
        told = "the adapter belongs to weights that its training changed; have PEFT convert it as it saves it"
        raise UnsupportedModel(f"init_lora_weights {shown(repr(begun))}: {told}")


def _number(value: Any, field: str) -> float:
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{field} must be a number, got {shown(repr(value))}")
    return found


def _flag(value: Any, field: str) -> bool:
    if value not in (True, False, None) or (isinstance(value, int | float) and not isinstance(value, bool)):
        raise ValueError(f"{field} must be true or false, got {shown(repr(value))}")
    return bool(value)


def _patterns(given: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(given or {}, dict):
        raise ValueError(f"alpha_pattern must map modules to numbers, got {shown(repr(given))}")
    found = tuple((pattern, _number(alpha, f"alpha_pattern.{pattern}")) for pattern, alpha in (given or {}).items())
    for pattern, _ in found:
        # A name, or names between bars: what PEFT writes. Others might take for ever to match.
        if not re.fullmatch(r"\^?[\w.|\\]+\$?", pattern) or not _compiles(pattern):
            raise UnsupportedModel(f"alpha_pattern {shown(repr(pattern))} is not supported; name modules")
    return found


def _compiles(pattern: str) -> bool:
    try:
        re.compile(AS_PEFT.format(pattern))
    except re.error:
        return False
    return True


def _invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = config.get("alora_invocation_tokens") or []
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("alora_invocation_tokens must be a list of token ids")
    return tuple(tokens)


def _digest(folder: Path) -> bytes:
    """Of what the files hold: another adapter under the same name has its own keys and values."""
    found = hashlib.blake2b(digest_size=32)
    for name in (CONFIG, WEIGHTS):
        try:
            with open_given(folder / name) as file:
                while block := file.read(BLOCK):
                    found.update(block)
        except OSError as error:
            raise ValueError(f"{folder / name} cannot be read: {error.strerror}") from None
        found.update(b"\0")
    return found.digest()
