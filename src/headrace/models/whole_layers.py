"""What kernels.block needs to know of a model whose layers C++ computes as a whole, and which models have none."""

from __future__ import annotations

from headrace.kernels.layer_shape import LayerShape
from headrace.models.layer_parts import NO_TIMES
from headrace.models.spec import ModelConfig


def never_whole(config: ModelConfig) -> str | None:
    """Why C++ does not compute the layers of such a model as a whole, whatever its weights and types; None: it may."""
    if config.rope is not None and config.rope.factor_alone:
        return "queries of latents are multiplied by a factor of their position"
    if config.recurrent is not None and config.recurrent.kind == "kda":
        return "decays of channels come from a matrix of their own"
    return None if config.attention.index is None else "rows choose the keys that they attend to"


def shape_of(config: ModelConfig) -> LayerShape:
    """What kernels.block needs to know of the layers."""
    return LayerShape(
        attention=config.attention,
        hidden=config.hidden_size,
        order=config.block,
        activation=f"{config.activation}_mul" if config.gated else config.activation,
        rms=config.norm == "rms",
        eps=config.norm_eps,
        mlp_norm=config.mlp_norm or config.block != "parallel",
        qk_norm=config.qk_norm,
        norm_offset=config.norm_offset,
        qk_norm_whole=config.qk_norm_whole,
        experts=config.experts,
        gated=config.attention_gate,
        recurrent=config.recurrent,
        latent=config.latent,
        beside=_beside(config),
        inputs=0 if config.layer_inputs is None else config.layer_inputs.width,
        more=dict(
            residual_scale=config.residual_scale,
            turn_before_norm=config.turn_before_norm,
            out_eps=config.eps_behind,
        ),
    )


def _beside(config: ModelConfig) -> tuple[float, ...] | None:
    if not config.side_by_side:
        return None
    return NO_TIMES if config.multipliers is None else config.multipliers.of_rows
