"""From a model folder to ModelConfig, or to a refusal that names what is not supported. Imports no torch by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast, get_args

from headrace.logs import shown
from headrace.models import nulls, schema
from headrace.models.families import CLASSIFIERS, FAMILIES, HEADLESS, Family, family_of
from headrace.models.families.base import LAYER_TYPES, refuse_rope
from headrace.models.files import first_dtype, raw_config, read_json, weight_files
from headrace.models.quantised import FIELDS as QUANTISED_FIELDS
from headrace.models.quantised import scheme_of
from headrace.models.spec import CheckpointDType, ModelConfig, RopeSpec
from headrace.models.stored import has_tiled_values, is_multiplied, stored_weights
from headrace.types import UnsupportedModel

__all__ = ["ModelConfig", "RopeSpec", "read_config"]

log = logging.getLogger(__name__)

OF_THE_WHOLE = ("architectures", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "per_layer_config")
"""Fields that stand beside text_config."""
UNLIMITED = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""What may be said of the steps of Mamba-2 layers, as JSON has infinity and as transformers writes it."""
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' names of the types that weights may have."""


def read_config(folder: str | Path) -> ModelConfig:
    """Facts of the model in `folder`.

    Raises UnsupportedModel naming the architecture or the config field, ValueError if the folder cannot be read.
    """
    return read_with(Path(folder), _normalised)


def read_with(folder: Path, normalised: Callable[[dict[str, Any], Family], Any]) -> ModelConfig:
    """normalised(fields of config.json, family): those fields with defaults filled in."""
    raw, path = raw_config(folder)
    schema.check(raw, schema.ConfigFields, path)
    try:
        family = _family(raw)
        if family.text_type is not None:
            raw = _text_part(family.completed(raw), family)
        _refuse_fields(raw, family)
        scheme = scheme_of(raw)
        config = nulls.readable(normalised, raw, family)
        facts = nulls.facts_of(config, family.facts)
        _check_size(config, facts)
        return ModelConfig(
            architecture=raw["architectures"][0],
            text_type=family.text_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=facts.pop("layers", config.num_hidden_layers),
            dtype=_dtype(raw, folder),
            tied=getattr(config, "tie_word_embeddings", False),
            head=raw["architectures"][0] not in HEADLESS | CLASSIFIERS,
            labels=_labels(raw) if raw["architectures"][0] in CLASSIFIERS else (),
            bos_token_id=getattr(config, "bos_token_id", None),
            tiled_values=has_tiled_values(folder),
            multiplied=is_multiplied(folder),
            eos_token_ids=_eos(config, folder),
            stored=stored_weights(folder, scheme),
            **facts,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


def _family(raw: dict[str, Any]) -> Family:
    architectures = raw.get("architectures") or ["(none)"]
    supported = ", ".join(FAMILIES)
    family = FAMILIES.get(architectures[0])
    if family is None or len(architectures) > 1:
        remote = "; its auto_map asks for remote code, which is never run" if raw.get("auto_map") else ""
        name = ", ".join(map(str, architectures))
        raise UnsupportedModel(f"architecture {name} is not supported{remote}; supported: {supported}")
    if raw.get("model_type") not in family.model_types:
        # transformers picks the class by model_type: the two must agree, or ours would not be the class it runs
        raise UnsupportedModel(f"model_type {raw.get('model_type')!r} is not supported for {architectures[0]}")
    text = (raw.get("text_config") or {}).get("model_type")
    return family_of(architectures[0], text)


def _text_part(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields of text_config, with those that stand beside it: what is said of the whole model."""
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in family.text_types:
        known = " or ".join(repr(each.text_type) for each in (family, *family.other_texts))
        raise UnsupportedModel(f"text_config is missing, or not of model_type {known}")
    for name in (*OF_THE_WHOLE, *QUANTISED_FIELDS):
        if raw.get(name) is not None:
            text = text | {name: raw[name]}
    log.info("%s: the text part is loaded; images are not taken", raw["architectures"][0])
    return text


def _refuse_fields(raw: dict[str, Any], family: Family) -> None:
    by_layer = layers_by_number(raw.get("per_layer_config") or {}, raw.get("num_hidden_layers"))
    own = {name for fields in by_layer.values() for name in fields}
    for name in sorted(own - set(family.layer_fields)):
        raise UnsupportedModel(f"per_layer_config.{name} is not supported")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for each in [rope[kind] for kind in LAYER_TYPES if rope.get(kind)] or [rope]:
        refuse_rope(each.get("rope_type", each.get("type", "default")), each)
    for name, value in (raw.get("auto_map") or {}).items():
        _refuse_remote_code(name, value, family)
    for name in ("time_step_limit", "mamba_dt_limit"):
        if raw.get(name) not in UNLIMITED:
            raise UnsupportedModel(f"{name} {shown(str(raw[name]))} is not supported; 0 and infinity are")
    if raw.get("is_causal") is False:
        raise UnsupportedModel("is_causal false is not supported")


def layers_by_number(by_name: dict[str, Any], layers: int | None) -> dict[int, Any]:
    """per_layer_config by numbers, which transformers writes as "4" or, from ten layers on, as "04". Refuses a layer
    that is named twice, of which transformers takes the last one, and one that a model of so many layers has not."""
    found: dict[int, Any] = {}
    for name, fields in by_name.items():
        layer = int(name)
        if layer in found:
            raise UnsupportedModel(f"per_layer_config names layer {layer} twice; download the file again")
        if layers is not None and layer >= layers:
            raise UnsupportedModel(f"per_layer_config names layer {layer}, num_hidden_layers is {layers}")
        found[layer] = fields
    return found


def _refuse_remote_code(name: str, value: Any, family: Family) -> None:
    """Refuses an auto_map entry, unless it names the module that transformers has taken in since (Falcon's do). What is
    named for tokenizers, as Phi-4 mini's file does, is left unread."""
    known: set[str | None] = {f"{kind}_{module}" for kind in ("modeling", "configuration") for module in family.modules}
    known |= {family.published_as}  # HunYuan-A13B's file names hunyuan.py
    if isinstance(value, str) and name != "AutoTokenizer":
        module = value.split("--")[-1].split(".")[0]
        if module not in known:
            raise UnsupportedModel(f"auto_map names {value}: remote code is never run")


def _normalised(raw: dict[str, Any], family: Family) -> Any:
    """The configuration as transformers reads it: defaults filled in, old rope fields brought to one form."""
    configuration = resolve_name(family.configuration)
    try:
        return configuration.from_dict(schema.known(raw))
    except Exception as error:  # transformers raises its own kinds for values that its classes do not accept
        raise UnsupportedModel(f"transformers does not accept it as {family.model_type}: {shown(error)}") from error


def _check_size(config: Any, facts: dict[str, Any]) -> None:
    """What no single field's range rules out."""
    if not 1 <= facts["max_model_len"] <= schema.MAX_LENGTH:
        raise UnsupportedModel(
            f"a length of {facts['max_model_len']} positions; at most {schema.MAX_LENGTH} are supported"
        )
    given = getattr(config, "layer_types", None)
    if given and len(given) != config.num_hidden_layers:
        raise UnsupportedModel(
            f"layer_types names {len(given)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )


def _labels(raw: dict[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's outputs, in their order; of a file that says nothing two, as transformers has it."""
    names = raw.get("id2label")
    if not names:
        return tuple(f"LABEL_{label}" for label in range(raw.get("num_labels") or 2))
    if set(names) != set(map(str, range(len(names)))):
        raise UnsupportedModel("id2label does not name labels 0, 1, 2, ..: download the file again")
    return tuple(names[str(label)] for label in range(len(names)))


def _dtype(raw: dict[str, Any], folder: Path) -> CheckpointDType:
    """Type of the weights: as config.json says, otherwise that of the first tensor."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        first = first_dtype(weight_files(folder)[0])
        name = DTYPES.get(first, first)
    name = str(name).removeprefix("torch.")
    if name not in get_args(CheckpointDType):
        raise UnsupportedModel(f"dtype {name} is not supported; supported: {', '.join(get_args(CheckpointDType))}")
    return cast(CheckpointDType, name)


def _eos(config: Any, folder: Path) -> tuple[int, ...]:
    """End-of-sequence tokens of config.json and generation_config.json, without repeats."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    schema.check(generation, schema.GenerationConfig, path)
    values = [getattr(config, "eos_token_id", None), generation.get("eos_token_id")]
    found = [token for value in values for token in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
