"""Small random checkpoints of hybrid models, written by transformers' own classes, and the states of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm3Config,
    Lfm3ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from headrace.config import RecurrentSpec
from headrace.kernels.records import LayerStates, RecurrentWeights
from headrace.kernels.recurrent import Recur, recur_rows
from headrace.models.decoder import Decoder
from tests.support.kind_sizes import VOCAB
from tests.support.naive_attention import NaiveAttend, RowAttend, batch_of, naive

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, linear_key_head_dim=32, linear_value_head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
UNEVEN = dict(linear_key_head_dim=40, linear_value_head_dim=24, linear_num_value_heads=6, linear_conv_kernel_dim=3)
ENDS_RECURRENT = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3)
YARN = dict(
    rope_parameters=dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128,
        partial_rotary_factor=0.25,
    )
)  # fmt: skip
EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=96,
    mlp_only_layers=[1],
)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=SIZES["hidden_size"], patch_size=4,
    num_position_embeddings=16,
)  # fmt: skip
MOE = {name: value for name, value in EXPERTS.items() if name != "mlp_only_layers"}
CONV = ["conv", "conv", "full_attention", "conv"]
LFM2: dict[str, Any] = dict(layer_types=CONV, hidden_size=120, num_attention_heads=4, block_multiple_of=16)
"""Four heads of 30: rows of 120 fill no vector."""
LFM2_MOE = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, num_dense_layers=1, routed_scaling_factor=1.5
)
LFM3: dict[str, Any] = dict(
    layer_types=["conv", "sliding_attention", "full_attention", "conv"], sliding_window=100, rope_parameters=None
)
MAMBA = ["mamba", "mamba", "attention", "mamba"]
GRANITE: dict[str, Any] = dict(
    layer_types=MAMBA, num_local_experts=0, shared_intermediate_size=192, mamba_n_heads=8, mamba_d_state=16,
    position_embedding_type="nope", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5,
    attention_multiplier=0.1,
)  # fmt: skip
GRANITE_UNEVEN = GRANITE | dict(
    layer_types=["attention", *MAMBA[:3]], hidden_size=120, num_attention_heads=4, mamba_n_heads=6, mamba_n_groups=3,
    mamba_d_state=20, mamba_d_conv=3, mamba_conv_bias=False, position_embedding_type="rope",
)  # fmt: skip
GRANITE_EXPERTS = GRANITE | dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=64)
NEMOTRON: dict[str, Any] = dict(
    hybrid_override_pattern="M-M*-M", mamba_num_heads=6, mamba_head_dim=32, ssm_state_size=16, n_groups=2,
    time_step_min=1e-30,
)  # fmt: skip
"""A layer without an MLP, also the last one; more channels than twice the hidden size. transformers holds steps above
time_step_min in prompts alone."""
NEMOTRON_EXPERTS = NEMOTRON | dict(
    hybrid_override_pattern="MEM*EM-", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
    moe_shared_expert_intermediate_size=96, routed_scaling_factor=2.5, n_group=2, topk_group=1,
)  # fmt: skip
KIMI: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3, num_experts=8,
    num_experts_per_token=3, moe_intermediate_size=64, num_shared_experts=1, linear_head_dim=32, linear_num_heads=4,
    kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, num_key_value_heads=4,
)  # fmt: skip
"""Ends in a recurrent layer."""
KIMI_UNEVEN = KIMI | dict(
    layer_types=["full_attention", "linear_attention"], num_hidden_layers=2, linear_head_dim=40, linear_num_heads=3,
    linear_conv_kernel_dim=3, q_lora_rank=48, num_shared_experts=2, num_expert_group=4, topk_group=2,
    moe_renormalize=False,
)  # fmt: skip
GLM5: dict[str, Any] = dict(
    layer_types=["linear_attention", "indexed_attention"] * 2, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    indexer_types=["full"] * 4, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, n_shared_experts=1,
    linear_head_dim=16, linear_num_heads=4, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, v_head_dim=48,
    num_key_value_heads=4, index_topk=32, index_head_dim=32, index_n_heads=16, index_kpool=16, hc_mult=3,
)  # fmt: skip
"""Heads of the indexer enough that no two pools count 0 alike."""
FALCON: dict[str, Any] = dict(
    mamba_d_ssm=192, mamba_n_heads=6, mamba_d_state=16, mamba_n_groups=2, num_hidden_layers=3, key_multiplier=0.4,
    attention_in_multiplier=1.2, attention_out_multiplier=0.9, ssm_in_multiplier=1.25, ssm_out_multiplier=0.6,
    ssm_multipliers=[0.8, 0.7, 0.6, 1.1, 0.9], mlp_multipliers=[0.88, 0.6], embedding_multiplier=2.5,
    lm_head_multiplier=0.5,
)  # fmt: skip
FALCON_NORMED = FALCON | dict(
    mamba_rms_norm=True, mamba_norm_before_gate=False, hidden_size=120, head_dim=30, mamba_d_ssm=180, mamba_d_conv=3,
    mamba_conv_bias=False, attention_bias=True, mlp_bias=True, attention_in_multiplier=1.0, num_hidden_layers=2,
)  # fmt: skip
"""Four heads of 30: rows fill no vector."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("next", {}),
    "next_uneven": ("next", UNEVEN),
    "next_experts": ("next", EXPERTS),
    "3_5": ("3_5", {}),
    "3_5_tied": ("3_5", dict(tie_word_embeddings=True, attention_bias=True)),
    "3_5_ends_recurrent": ("3_5", ENDS_RECURRENT | UNEVEN),
    "3_5_yarn": ("3_5", YARN),
    "3_5_vision": ("3_5_vision", {}),
    "3_5_experts": ("3_5_experts", MOE),
    "3_5_experts_vision": ("3_5_experts_vision", MOE),
    "lfm2": ("lfm2", LFM2),
    "lfm2_four_inputs": ("lfm2", LFM2 | dict(conv_L_cache=4, layer_types=["full_attention", *CONV[:3]])),
    "lfm2_experts": ("lfm2_experts", LFM2 | LFM2_MOE),
    "lfm2_vision": ("lfm2_vision", LFM2),
    "lfm3": ("lfm3", LFM3),
    "lfm3_plain": ("lfm3", LFM3 | dict(use_sandwich_norm=False, use_attention_gate=False, attention_bias=True)),
    "granite": ("granite", GRANITE),
    "granite_uneven": ("granite", GRANITE_UNEVEN),
    "granite_experts": ("granite", GRANITE_EXPERTS),
    "nemotron": ("nemotron", NEMOTRON),
    "nemotron_experts": ("nemotron", NEMOTRON_EXPERTS),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1_normed": ("falcon_h1", FALCON_NORMED),
    "kimi": ("kimi", KIMI),
    "kimi_uneven": ("kimi", KIMI_UNEVEN),
    "glm5": ("glm5", GLM5),
}


def seeds_for_rounding(kind: str) -> range:
    """See tests.support.checkpoints.seeds_for_rounding."""
    return range(6 if "experts" in kind or kind.startswith(("kimi", "glm5")) else 1)


PLAIN_NORMS = ("lfm", "granite", "nemotron", "kimi", "falcon", "glm5")
"""What families begin with whose norms do not add one to their weights."""


def _next(**fields: Any) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{"num_experts": 0, **fields}))


def _vision(**fields: Any) -> PreTrainedModel:
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=fields, vision_config=VISION))


def _experts_vision(**fields: Any) -> PreTrainedModel:
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=fields, vision_config=VISION))


def _granite(**fields: Any) -> PreTrainedModel:
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**_without_nets(fields)))


def _nemotron(**fields: Any) -> PreTrainedModel:
    own = {name: value for name, value in fields.items() if name != "num_hidden_layers" and "linear_" not in name}
    return NemotronHForCausalLM(NemotronHConfig(**own))


def _falcon_h1(**fields: Any) -> PreTrainedModel:
    kept = {name: value for name, value in fields.items() if not name.startswith("linear_")}
    return FalconH1ForCausalLM(FalconH1Config(**kept))


def _kimi(**fields: Any) -> PreTrainedModel:
    usual = ("head_dim", *(name for name in SIZES if name.startswith("linear_")))
    given = {name: value for name, value in fields.items() if name not in usual or name in KIMI}
    given["model_max_length"] = given.pop("max_position_embeddings")
    return KimiLinearForCausalLM(KimiLinearConfig(**given))


def _glm5(**fields: Any) -> PreTrainedModel:
    usual = ("head_dim", *(name for name in SIZES if name.startswith("linear_")))
    text = {name: value for name, value in fields.items() if name not in usual or name in GLM5}
    vision = {**VISION, "patch_size": 14}
    del vision["num_position_embeddings"]
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))


def _lfm2(**fields: Any) -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**_without_nets(fields)))


def _lfm3(**fields: Any) -> PreTrainedModel:
    return Lfm3ForCausalLM(Lfm3Config(**_without_nets(fields), head_dim=32))


def _lfm2_experts(**fields: Any) -> PreTrainedModel:
    return Lfm2MoeForCausalLM(Lfm2MoeConfig(**_without_nets(fields)))


def _lfm2_vision(**fields: Any) -> PreTrainedModel:
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_patches=16)
    text = dict(model_type="lfm2", **_without_nets(fields))
    config = Lfm2VlConfig(text_config=text, vision_config=dict(model_type="siglip2_vision_model", **vision))
    return Lfm2VlForConditionalGeneration(config)


def _without_nets(fields: dict[str, Any]) -> dict[str, Any]:
    """What says something of models without gated delta nets and heads of a size of their own."""
    return {name: value for name, value in fields.items() if name != "head_dim" and not name.startswith("linear_")}


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "next": _next,
    "3_5": lambda **fields: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)),
    "3_5_experts": lambda **fields: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**fields)),
    "3_5_vision": _vision,
    "3_5_experts_vision": _experts_vision,
    "falcon_h1": _falcon_h1,
    "glm5": _glm5,
    "granite": _granite,
    "kimi": _kimi,
    "lfm2": _lfm2,
    "lfm3": _lfm3,
    "nemotron": _nemotron,
    "lfm2_experts": _lfm2_experts,
    "lfm2_vision": _lfm2_vision,
}


def build_model(kind: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a kind in fp32, in evaluation mode, whose weights are all representable in bf16."""
    family, fields = KINDS[kind]
    torch.manual_seed(seed)
    model = BUILDERS[family](**{**SIZES, **fields, **overrides})
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *_corrections(model)):
            parameter.copy_(_drawn(name, parameter, family.startswith(PLAIN_NORMS)).bfloat16())
    return model.eval()


def _corrections(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Those of routers, which are no parameters."""
    ends = ("expert_bias", "e_score_correction_bias")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends)]


def _drawn(name: str, parameter: Tensor, plain_norms: bool) -> Tensor:
    """Wide weights; decays between half and nearly all, and norms away from one, in either way of counting."""
    noise = torch.randn_like(parameter)
    if name.endswith(("A_log", "dt_bias")):
        return 0.5 * noise - 1
    if "norm" in name:
        return 0.3 * noise + (plain_norms or name.endswith("linear_attn.norm.weight"))
    if "conv.conv" in name:
        return noise
    if name.endswith(("mamba.conv1d.weight", "mixer.conv1d.weight")):
        return 0.5 * noise
    if parameter.dim() == 1:
        return 0.3 * noise
    return noise * (0.5 if "embed" in name else 1.3 / parameter.shape[-1] ** 0.5)


def make_checkpoint(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    build_model(kind, **overrides).to(dtype).save_pretrained(folder)
    return folder


class OwnStates(Recur):
    """A Recur for some sequences, each with the state of its slot; `counts` are their rows in a step, in order."""

    def __init__(self, spec: RecurrentSpec, dtype: torch.dtype, sequences: int = 1) -> None:
        self.spec, self.counts, self.begun = spec, [0] * sequences, [False] * sequences
        last = (sequences, spec.kernel - 1, spec.channels)
        matrices = (sequences, spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [
            LayerStates(torch.full(last, 7.0, dtype=dtype), torch.full(matrices, 7.0)) for _ in range(spec.layers)
        ]

    def __call__(self, layer: int, mixed: Tensor, gates: Tensor | None, weights: RecurrentWeights) -> Tensor:
        segments, row = [], 0
        for slot, count in enumerate(self.counts):
            segments.append([row, row + count, slot if self.begun[slot] else -1, slot])
            row += count
        if layer == self.spec.layers - 1:
            self.begun = [begun or count > 0 for begun, count in zip(self.begun, self.counts, strict=True)]
        kept = [each for each in segments if each[0] < each[1]]
        return recur_rows(self.spec, mixed, gates, weights, self.states[layer], torch.tensor(kept))


def states_of(decoder: Decoder, sequences: int = 1) -> OwnStates:
    assert decoder.config.recurrent is not None
    return OwnStates(decoder.config.recurrent, decoder.dtype, sequences)


class Sequence:
    """One sequence of a hybrid model, computed in pieces."""

    def __init__(self, decoder: Decoder, attend: type[NaiveAttend] = RowAttend) -> None:
        self.decoder, self.recur, self.attend, self.length = decoder, states_of(decoder), naive(decoder, attend), 0

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [n, V] of the next n tokens."""
        batch = batch_of(tokens, self.length, self.length + len(tokens))
        self.recur.counts, self.length = [len(tokens)], self.length + len(tokens)
        return self.decoder.logits(self.decoder.forward(batch, self.attend, recur=self.recur))


def greedy(decoder: Decoder, prompt: list[int], steps: int) -> list[int]:
    """`steps` greedy tokens, decoded one at a time."""
    sequence, rows, found = Sequence(decoder), list(prompt), []
    for _ in range(steps):
        rows = [int(sequence.logits(rows)[-1].argmax())]
        found += rows
    return found
