"""A folder with nothing but the config.json of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.models.families import FAMILIES


def written(folder: Path, given: dict[str, Any]) -> Path:
    """Of a Llama where nothing else is said. Of a model with other parts, what is given stands in its text part too."""
    raw = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **given}
    family = FAMILIES.get(raw["architectures"][0])
    raw["model_type"] = family.model_type if family else "other"
    if family and family.text_type and "text_config" not in given:
        raw["text_config"] = given | {"model_type": family.text_type}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
