"""From the facts of a GGUF file to the fields of a config.json, and from its tensors' names to the checkpoint's.

What config.json would say then goes through the same checks and the same families as a folder's. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import headrace.models.gguf.apertus as apertus
import headrace.models.gguf.falcon_h1 as falcon_h1
import headrace.models.gguf.kimi_linear as kimi
from headrace.logs import shown
from headrace.models.gguf import deepseek, families, gemma4, granite_hybrid, hybrids, lfm2, nemotron_h, routed, sparse
from headrace.models.gguf.counts import check_counts
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.families import FUSED_NAMES, Fields, Form, Vectors
from headrace.models.gguf.header import GgufFile
from headrace.models.gguf.rotations import rope_of
from headrace.types import UnsupportedModel

HEAD, FF, KV_HEADS = "output.weight", "feed_forward_length", "attention.head_count_kv"
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
"""The file's modules and the checkpoint's."""
ROUTER = "blk.{}.ffn_gate_inp"


def _with_experts(mlp: str, parts: tuple[str, str, str]) -> dict[str, str]:
    """Those, and a router and experts of that name, whose matrices are called `parts`: gate, up, down. The file has all
    experts of a layer in one tensor, or as older ones do each in its own."""
    layer = "model.layers.{}." + mlp
    names = {ROUTER: f"{layer}.gate"}
    for theirs, ours in zip(("gate", "up", "down"), parts, strict=True):
        expert = f"{layer}.experts.{{}}.{ours}"
        names |= {f"blk.{{}}.ffn_{theirs}_exps": expert, f"blk.{{}}.ffn_{theirs}.{{}}": expert}
    return LLAMA_NAMES | names | {"blk.{}.ffn_gate_up_exps": f"{layer}.experts.{{}}.gate_up_proj"}


EXPERT_NAMES = _with_experts("mlp", ("gate_proj", "up_proj", "down_proj"))
LATENT_NAMES: Mapping[str, str] = {**EXPERT_NAMES, **deepseek.NAMES}
INDEXED_NAMES: Mapping[str, str] = {**LATENT_NAMES, **sparse.NAMES}
GLM_MOE_NAMES: Mapping[str, str] = {**EXPERT_NAMES, **deepseek.GLM_NAMES}
GPT_OSS_NAMES: Mapping[str, str] = {**EXPERT_NAMES, **families.GPT_OSS_NAMES}
HYBRID_NAMES: Mapping[str, str] = {**EXPERT_NAMES, **hybrids.EXPERT_NAMES}
GRANITE_EXPERTS = _with_experts("block_sparse_moe", ("gate_proj", "up_proj", "down_proj"))
LFM2_MOE_NAMES = _with_experts("feed_forward", ("w1", "w3", "w2")) | lfm2.EXPERT_NAMES
NEMOTRON_EPSILON = ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
FALCON_EPSILON = ("attention.layer_norm_epsilon", "layer_norm_epsilon")
LAYER_NORM_EPSILON = ("attention.layer_norm_epsilon", "layer_norm_eps")
LFM2_EPSILON = ("attention.layer_norm_rms_epsilon", "norm_eps")
LLAMA4_NAMES = _with_experts("feed_forward", ("gate_proj", "up_proj", "down_proj")) | routed.LLAMA4_NAMES
MIXTRAL_NAMES = _with_experts("block_sparse_moe", ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class Architecture:
    """What general.architecture names. turned: rows of queries and keys lie as llama.cpp rotates them, elements 2 i and
    2 i + 1 of a head, where the checkpoint's halves do: i and i + D / 2.

    form: how other rows lie; fields: what the family's config.json says beside what all do. epsilon: its key and its
    field. partial: a part of each head may be rotated. added_one: to weights of norms. tiled: see
    ModelConfig.tiled_values. latent: sizes of heads are the fields' alone. routed: what is said of experts is read as
    of all, and not by the fields alone. multiplied: see ModelConfig.multiplied.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    turned: bool = False
    form: Form = families.as_named
    fields: Fields | None = None
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    partial: bool = False
    added_one: bool = False
    tiled: bool = False
    latent: bool = False
    routed: bool = True
    multiplied: bool = False
    vectors: Vectors | None = None

    def modules(self, module: str) -> tuple[str, bool] | None:
        """What the checkpoint calls a module of the file, and whether that is one of each expert, with a `{}` for its
        number; None for one that it has not."""
        numbers = NUMBER.findall(module)
        theirs = self.names.get(NUMBER.sub("{}", module))
        if theirs is None:
            return None
        apart = theirs.count("{}") > len(numbers)
        return theirs.format(*numbers, *["{}"] * apart), apart


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", LLAMA_NAMES, turned=True),
    "llama4": Architecture("Llama4ForCausalLM", "llama4_text", LLAMA4_NAMES, fields=routed.llama4, routed=False),
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture("Qwen2ForCausalLM", "qwen2", LLAMA_NAMES)),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture("Qwen3ForCausalLM", "qwen3", LLAMA_NAMES)),
    "mistral3": Architecture("MistralForCausalLM", "mistral", LLAMA_NAMES, turned=True, fields=families.mistral3),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", LLAMA_NAMES | families.SEED_OSS_NAMES, fields=families.seed_oss
    ),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", EXPERT_NAMES),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", LLAMA_NAMES | families.BEHIND_NAMES, fields=families.olmo2),
    "exaone4": Architecture(
        "Exaone4ForCausalLM", "exaone4", LLAMA_NAMES | families.BEHIND_NAMES, fields=families.exaone4
    ),
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", LLAMA_NAMES, fields=families.command_r, epsilon=LAYER_NORM_EPSILON
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", LLAMA_NAMES | families.STARCODER2_NAMES, fields=families.starcoder2,
        epsilon=(LAYER_NORM_EPSILON[0], "norm_epsilon"),
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", "qwen2_moe", HYBRID_NAMES, fields=routed.qwen2_moe, routed=False
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM", "dots1", {**EXPERT_NAMES, **deepseek.SHARED}, fields=deepseek.dots1, routed=False
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", "cohere2", LLAMA_NAMES, fields=families.cohere2,
        epsilon=LAYER_NORM_EPSILON,
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", LLAMA_NAMES, fields=families.ernie4_5),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {**EXPERT_NAMES, **routed.ERNIE_NAMES}, fields=routed.ernie4_5,
        routed=False,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", "minimax_m2", {**MIXTRAL_NAMES, **routed.MINIMAX_NAMES}, fields=routed.minimax_m2,
        partial=True, routed=False,
    ),
    "arcee": Architecture("ArceeForCausalLM", "arcee", LLAMA_NAMES, turned=True, fields=families.arcee),
    "jais2": Architecture(
        "Jais2ForCausalLM", "jais2", LLAMA_NAMES, fields=families.jais2, epsilon=LAYER_NORM_EPSILON
    ),
    "apertus": Architecture(
        "ApertusForCausalLM", "apertus", LLAMA_NAMES | apertus.NAMES, fields=apertus.fields, vectors=apertus.vectors
    ),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", LLAMA_NAMES | families.HUNYUAN_NAMES,
        fields=families.with_biases,
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", EXPERT_NAMES | routed.HUNYUAN_NAMES, fields=routed.hunyuan_moe,
        routed=False,
    ),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM", "exaone_moe", EXPERT_NAMES | routed.EXAONE_NAMES, fields=routed.exaone_moe, routed=False
    ),
    "afmoe": Architecture(
        "AfmoeForCausalLM", "afmoe", {**EXPERT_NAMES, **routed.AFMOE_NAMES}, fields=routed.afmoe, routed=False
    ),
    "mellum": Architecture("MellumForCausalLM", "mellum", EXPERT_NAMES, fields=routed.mellum),
    "gemma": Architecture("GemmaForCausalLM", "gemma", LLAMA_NAMES, added_one=True),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", EXPERT_NAMES),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", LLAMA_NAMES | families.GEMMA_NAMES, fields=families.gemma2, added_one=True
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", LLAMA_NAMES | families.GEMMA_NAMES, fields=families.gemma3, added_one=True
    ),
    "phi2": Architecture(
        "PhiForCausalLM", "phi", LLAMA_NAMES | families.PHI2_NAMES, epsilon=LAYER_NORM_EPSILON, partial=True
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", "stablelm", LLAMA_NAMES, fields=families.stablelm, epsilon=LAYER_NORM_EPSILON,
        partial=True,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", LLAMA_NAMES | FUSED_NAMES, fields=families.phi3, partial=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", LLAMA_NAMES, turned=True, fields=families.smollm3),
    "granite": Architecture("GraniteForCausalLM", "granite", LLAMA_NAMES, turned=True, fields=families.granite),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", "granitemoe", GRANITE_EXPERTS | routed.GRANITE_NAMES, form=routed.granite_form,
        fields=routed.granite_moe, routed=False,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE_EXPERTS | granite_hybrid.NAMES,
        form=granite_hybrid.form, fields=granite_hybrid.fields, routed=False,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            "NemotronHForCausalLM", "nemotron_h", nemotron_h.NAMES, turned=True, fields=nemotron_h.fields,
            epsilon=NEMOTRON_EPSILON, partial=True, routed=False,
        ),
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM", "falcon_h1", LLAMA_NAMES | falcon_h1.NAMES, fields=falcon_h1.fields, multiplied=True
    ),
    "chatglm": Architecture(
        "GlmForCausalLM", "glm", LLAMA_NAMES | FUSED_NAMES, form=families.glm_form, fields=families.glm, partial=True
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", LLAMA_NAMES | families.GLM4_NAMES, fields=families.glm, partial=True
    ),
    "falcon": Architecture(
        "FalconForCausalLM", "falcon", families.FALCON_NAMES, form=families.falcon_form, fields=families.falcon,
        epsilon=FALCON_EPSILON,
    ),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", families.GPT2_NAMES, fields=families.gpt2, epsilon=FALCON_EPSILON),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", "gpt_neox", families.NEOX_NAMES, form=families.fused_in_order, fields=families.gpt_neox,
        epsilon=LAYER_NORM_EPSILON, partial=True,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", HYBRID_NAMES, form=hybrids.qwen3_next_form, fields=hybrids.qwen3_next,
        partial=True, added_one=True, routed=False,
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", LLAMA_NAMES | hybrids.NAMES, form=hybrids.qwen3_5_form,
        fields=hybrids.qwen3_5, partial=True, added_one=True, tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", HYBRID_NAMES, form=hybrids.qwen3_5_form,
        fields=hybrids.qwen3_5_moe, partial=True, added_one=True, tiled=True, routed=False,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", "lfm2", LLAMA_NAMES | lfm2.NAMES, fields=lfm2.dense, epsilon=LFM2_EPSILON
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM", "lfm2_moe", LFM2_MOE_NAMES, fields=lfm2.with_experts, epsilon=LFM2_EPSILON, routed=False
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", "gemma4_text", LLAMA_NAMES | gemma4.NAMES, form=gemma4.form, fields=gemma4.fields,
        routed=False,
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", "deepseek_v2", LATENT_NAMES, fields=deepseek.v2, latent=True, routed=False
    ),
    "kimi-linear": Architecture(
        "KimiLinearForCausalLM", "kimi_linear", MIXTRAL_NAMES | kimi.NAMES, fields=kimi.fields, latent=True,
        routed=False,
    ),
    "deepseek32": Architecture(
        "DeepseekV32ForCausalLM", "deepseek_v32", INDEXED_NAMES, fields=sparse.deepseek_v32, latent=True, routed=False
    ),
    "glm-dsa": Architecture(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", INDEXED_NAMES, fields=sparse.glm_dsa, latent=True, routed=False
    ),
    "mistral4": Architecture(
        "Mistral4ForCausalLM", "mistral4", LATENT_NAMES, fields=deepseek.mistral4, latent=True, routed=False
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM", "minicpm3", LATENT_NAMES, fields=deepseek.minicpm3, latent=True, routed=False
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", "glm4_moe", GLM_MOE_NAMES, fields=deepseek.glm4_moe, partial=True, routed=False
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "gpt_oss", GPT_OSS_NAMES, form=families.gpt_oss_form, fields=families.gpt_oss, routed=False
    ),
}  # fmt: skip
DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM", "deepseek_v3", LATENT_NAMES, fields=deepseek.v3, latent=True, routed=False
)
"""A deepseek2 whose router has sigmoids: DeepSeek-V3 and R1, GLM-4.7-Flash."""
YOUTU = Architecture("YoutuForCausalLM", "youtu", LATENT_NAMES, fields=deepseek.youtu, latent=True, routed=False)
"""One without experts."""
WINDOWED = Architecture("MistralForCausalLM", "mistral", LLAMA_NAMES, turned=True)
"""A llama whose layers all have a window."""
MINISTRAL3 = Architecture("Ministral3ForCausalLM", "ministral3", LLAMA_NAMES, turned=True, fields=families.ministral3)
"""A mistral3 whose queries are multiplied by a factor of their position."""
OLMO3 = Architecture("Olmo3ForCausalLM", "olmo3", LLAMA_NAMES | families.BEHIND_NAMES, fields=families.olmo3)
"""An olmo2 with windows."""
GRANITE_SHARED = replace(
    ARCHITECTURES["granitemoe"], architecture="GraniteMoeSharedForCausalLM", model_type="granitemoeshared"
)
"""A granitemoe with an expert that all rows meet."""
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, turned=True)
"""A llama with experts."""
OTHERS: Mapping[str, Mapping[str, Architecture]] = {
    "llama": {"expert_count": MIXTRAL, "attention.sliding_window": WINDOWED},
    "mistral3": {"attention.temperature_scale": MINISTRAL3},
    "deepseek2": {"attention.temperature_scale": ARCHITECTURES["mistral4"]},
    "olmo2": {"attention.sliding_window": OLMO3},
    "granitemoe": {"expert_shared_feed_forward_length": GRANITE_SHARED},
}
"""What a name stands for where the file has a key that is not 0; the first such key says it."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
MODULE = re.compile(r"blk\.(\d+)\.")


def architecture_of(file: GgufFile) -> Architecture:
    """Raises UnsupportedModel naming an architecture that is not read."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: architecture {shown(str(name))} is not read from GGUF; these are: {', '.join(ARCHITECTURES)}"
        )
    facts = FileFacts(file)
    for key, other in OTHERS.get(name, {}).items():
        if facts.number(key, 0):
            return other
    if name == "deepseek2" and not facts.count("expert_count", 0):
        return YOUTU
    return DEEPSEEK_V3 if name == "deepseek2" and deepseek.has_sigmoids(file) else ARCHITECTURES[name]


def config_fields(file: GgufFile, *parts: GgufFile) -> dict[str, Any]:
    """What config.json would say. parts: the model's others, if it has any; the first has the metadata, and maybe no
    tensor. Raises UnsupportedModel for what is not read, naming it."""
    facts, found = FileFacts(file, *parts), architecture_of(file)
    if not facts.flag("attention.causal", True):
        raise UnsupportedModel(f"{file.path}: {facts.prefix}attention.causal false is not supported")
    check_counts(facts)
    heads, hidden = facts.count("attention.head_count"), facts.count("embedding_length")
    head_dim = facts.count("attention.key_length", hidden // max(1, heads))
    sizes = ("attention.value_length", *(() if found.partial else ("rope.dimension_count",)))
    for name in () if found.latent else sizes:
        if facts.count(name, head_dim) != head_dim:
            told = f"{facts.prefix}{name} {facts.count(name)} other than the head size, {head_dim}"
            raise UnsupportedModel(f"{file.path}: {told}, is not supported")
    tensors = facts.tensors
    fields = {
        "architectures": [found.architecture],
        "model_type": found.model_type,
        "vocab_size": facts.vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": facts.count("context_length"),
        found.epsilon[1]: facts.number(found.epsilon[0]),
        "tie_word_embeddings": HEAD not in tensors,
        "dtype": facts.dtype,
        "bos_token_id": facts.token("bos_token_id"),
        "eos_token_id": facts.ends(),
    }
    if found.model_type in ("llama", "qwen3"):
        fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    fields |= {"mlp_bias": "blk.0.ffn_gate.bias" in tensors} if found.model_type == "llama" else {}
    if found is WINDOWED:
        fields["sliding_window"] = facts.count("attention.sliding_window")
    rope = rope_of(facts, head_dim) | {"rope_theta": facts.number("rope.freq_base", 10_000.0)}
    if found.partial:
        rope["partial_rotary_factor"] = facts.count("rope.dimension_count", head_dim) / max(1, head_dim)
    fields["rope_parameters"] = rope
    if found.model_type == "falcon":
        del fields["head_dim"]  # its class works it out and takes none
    fields |= _experts(facts, found) if found.routed else {}
    own = found.fields(facts, rope) if found.fields is not None else {}
    for name, key, default in (("intermediate_size", FF, None), ("num_key_value_heads", KV_HEADS, heads)):
        if name not in own:
            fields[name] = facts.count(key, default)
    return fields | own


READ = {"expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm"}


def _experts(facts: FileFacts, found: Architecture) -> dict[str, Any]:
    """What config.json would say of experts. Raises UnsupportedModel for a routing that is not read."""
    if ROUTER not in found.names:
        if count := facts.count("expert_count", 0):
            told = f"{facts.prefix}expert_count {count}: {found.model_type} with experts is not supported"
            raise UnsupportedModel(f"{facts.file.path}: {told}")
        return {}
    families.refuse_experts(facts, READ)
    count, chosen = facts.count("expert_count"), facts.count("expert_used_count")
    if found is MIXTRAL:
        if not facts.flag("expert_weights_norm", True):
            raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}expert_weights_norm false is not supported")
        window = facts.count("attention.sliding_window", 0) or None
        return dict(num_local_experts=count, num_experts_per_tok=chosen, sliding_window=window)
    fields = dict(num_experts=count, num_experts_per_tok=chosen, attention_bias=False)
    if found.model_type == "olmoe":
        if facts.number("attention.clamp_kqv", 0.0):
            raise UnsupportedModel(f"{facts.file.path}: {facts.prefix}attention.clamp_kqv is not supported")
        return fields | dict(norm_topk_prob=facts.flag("expert_weights_norm", False))
    inner = facts.count("expert_feed_forward_length", facts.count("feed_forward_length") // max(1, chosen))
    return fields | dict(moe_intermediate_size=inner, norm_topk_prob=facts.flag("expert_weights_norm", True))
