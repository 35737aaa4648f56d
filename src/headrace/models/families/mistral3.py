"""Mistral Small 3.1 and later, Devstral, Magistral: a text part of Mistral's, Ministral 3's or Mistral 4's, and images.

Ministral 3 is a Mistral with yarn positions, whose queries are multiplied by a factor that grows with their position
(`llama_4_scaling_beta`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, tempered, tied_unless_told
from headrace.models.families.deepseek import MISTRAL4
from headrace.models.families.llama import MISTRAL, PREFIXES, common, names, uniform_windows


def _facts(config: Any) -> dict[str, Any]:
    return common(config, uniform_windows(config, config.sliding_window), turned=tempered(config))


MINISTRAL3 = Family(
    "ministral3", "transformers.models.ministral3.configuration_ministral3:Ministral3Config", _facts, names, PREFIXES
)
UNREAD = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")


def _with_vision(text: Family) -> Family:
    """Of which the text part is computed, and images are refused."""
    prefixes = ("language_model.model.", "model.language_model.")
    return replace(
        text, model_type="mistral3", text_type=text.model_type, prefixes=prefixes, unread=UNREAD,
        completed=tied_unless_told,
    )  # fmt: skip


MISTRAL3 = replace(_with_vision(MISTRAL), other_texts=(_with_vision(MINISTRAL3), _with_vision(MISTRAL4)))
