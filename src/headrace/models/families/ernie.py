"""ERNIE 4.5, dense: a Llama that rotates pairs of neighbours."""

from __future__ import annotations

from typing import Any

from headrace.models.families.base import Family, paired_rows
from headrace.models.families.llama import PREFIXES, common, names, uniform_windows
from headrace.models.spec import ModelConfig


def _facts(config: Any) -> dict[str, Any]:
    bias = bool(config.use_bias)
    return common(config, uniform_windows(config, None)) | dict(qkv_bias=bias, out_bias=bias, mlp_bias=bias)


def _rows(config: ModelConfig) -> list[int]:
    return paired_rows(config.attention, config.rotation(0)[1])


ERNIE4_5 = Family(
    "ernie4_5", "transformers.models.ernie4_5.configuration_ernie4_5:Ernie4_5Config", _facts, names, PREFIXES,
    qkv_rows=_rows,
)  # fmt: skip
