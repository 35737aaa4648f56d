"""Mistral Small 3.1 and later, Devstral, Magistral: a text part of Mistral's, or of Ministral 3's, beside images.

Ministral 3 is a Mistral with yarn positions, whose queries are multiplied by a factor that grows with their position
(`llama_4_scaling_beta`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.models.families.base import Family, rope
from headrace.models.families.llama import MISTRAL, PREFIXES, common, names, uniform_windows
from headrace.types import UnsupportedModel

BETA = "llama_4_scaling_beta"


def _facts(config: Any) -> dict[str, Any]:
    spec = rope(config, ignored={BETA, "max_position_embeddings"})
    for needed in (BETA, "original_max_position_embeddings"):
        if config.rope_parameters.get(needed) is None:
            raise UnsupportedModel(f"rope_parameters.{needed} is missing; download the file again")
    turned = replace(spec, query_beta=float(config.rope_parameters[BETA]))
    return common(config, uniform_windows(config, config.sliding_window), turned=turned)


def _completed(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers' Mistral3Config ties the head unless it is told otherwise; a stored head counts all the same."""
    return {"tie_word_embeddings": True} | raw


MINISTRAL3 = Family(
    "ministral3", "transformers.models.ministral3.configuration_ministral3:Ministral3Config", _facts, names, PREFIXES
)
UNREAD = ("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector.")


def _with_vision(text: Family) -> Family:
    """Of which the text part is computed, and images are refused."""
    prefixes = ("language_model.model.", "model.language_model.")
    return replace(
        text, model_type="mistral3", text_type=text.model_type, prefixes=prefixes, unread=UNREAD, completed=_completed
    )


MISTRAL3 = replace(_with_vision(MISTRAL), other_texts=(_with_vision(MINISTRAL3),))
