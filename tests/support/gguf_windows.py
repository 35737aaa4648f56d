"""Keys of GGUF files that say windows, caps and scales of logits, as llama.cpp's converter writes them
(conversion/gemma.py and command_r.py). Nothing here is taken from headrace's reader."""

from __future__ import annotations

from typing import Any

import gguf
from gguf import GGUFWriter


def gemma2(writer: GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def of_layers(writer: GGUFWriter, config: Any) -> None:
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def cohere(writer: GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2(writer: GGUFWriter, config: Any) -> None:
    cohere(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(64)
