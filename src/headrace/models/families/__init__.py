"""The families that the decoder knows, by the architecture that config.json names."""

from headrace.models.families.afmoe import AFMOE
from headrace.models.families.apertus import APERTUS
from headrace.models.families.base import Family
from headrace.models.families.cohere import COHERE
from headrace.models.families.cohere2 import AYA_VISION, COHERE2, COHERE2_VISION
from headrace.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM_LITE, KIMI_VISION, MISTRAL4
from headrace.models.families.deepseek_sparse import DEEPSEEK_V32, GLM_DSA
from headrace.models.families.dots1 import DOTS1, SOLAR_OPEN
from headrace.models.families.ernie import ERNIE4_5
from headrace.models.families.ernie_moe import ERNIE_MOE
from headrace.models.families.exaone_moe import EXAONE_MOE
from headrace.models.families.experts import MELLUM, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from headrace.models.families.falcon import FALCON
from headrace.models.families.falcon_h1 import FALCON_H1
from headrace.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WITH_VISION
from headrace.models.families.gemma4 import GEMMA4, GEMMA4_MULTIMODAL, GEMMA4_UNIFIED, GEMMA4_UNIFIED_MULTIMODAL
from headrace.models.families.glm import GLM, GLM4
from headrace.models.families.glm4_moe import GLM4_MOE
from headrace.models.families.glm5_next import GLM5_NEXT
from headrace.models.families.gpt2 import GPT2
from headrace.models.families.gpt_neox import GPT_NEOX
from headrace.models.families.gpt_oss import GPT_OSS
from headrace.models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SHARED
from headrace.models.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from headrace.models.families.hunyuan import HUNYUAN_DENSE, HUNYUAN_MOE, HY3
from headrace.models.families.hy4 import HY4, HY4_WITH_VISION
from headrace.models.families.hyperclovax import HYPERCLOVAX
from headrace.models.families.kimi_linear import KIMI_LINEAR
from headrace.models.families.lfm2 import LFM2, LFM2_MOE, LFM2_WITH_VISION, LFM3
from headrace.models.families.llama import ARCEE, CWM, LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3, SEED_OSS
from headrace.models.families.llama4 import LLAMA4, LLAMA4_WITH_VISION
from headrace.models.families.minicpm3 import MINICPM3, YOUTU
from headrace.models.families.minimax_m2 import MINIMAX_M2
from headrace.models.families.minimax_m3 import MINIMAX_M3
from headrace.models.families.mistral3 import MINISTRAL3, MISTRAL3
from headrace.models.families.muse_glimmer import MUSE_GLIMMER
from headrace.models.families.nemotron_h import NEMOTRON_H
from headrace.models.families.olmo import EXAONE4, EXAONE4_5, OLMO2, OLMO3
from headrace.models.families.opt import OPT
from headrace.models.families.phi import PHI, PHI3
from headrace.models.families.qwen3_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WITH_VISION,
    QWEN3_5_WITH_VISION,
    QWEN3_NEXT,
)
from headrace.models.families.qwen3_vl_moe import QWEN3_VL_MOE
from headrace.models.families.qwen_vl import QWEN2_5_VL, QWEN3_VL
from headrace.models.families.smollm import SMOLLM3
from headrace.models.families.stablelm import STABLELM
from headrace.models.families.starcoder2 import JAIS2, STARCODER2

__all__ = ["CLASSIFIERS", "FAMILIES", "HEADLESS", "Family"]

HEADLESS: dict[str, Family] = {
    "LlamaModel": LLAMA,
    "MistralModel": MISTRAL,
    "Qwen2Model": QWEN2,
    "Qwen3Model": QWEN3,
}
"""Decoders alone, as checkpoints made for embeddings have them."""
CLASSIFIERS: dict[str, Family] = {
    "LlamaForSequenceClassification": LLAMA,
    "MistralForSequenceClassification": MISTRAL,
    "Qwen2ForSequenceClassification": QWEN2,
    "Qwen3ForSequenceClassification": QWEN3,
}
"""Decoders with a classifier's head, as rerankers and reward models have it."""
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4_WITH_VISION,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_WITH_VISION,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_WITH_VISION,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL_MOE,
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": OLMOE,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "GptOssForCausalLM": GPT_OSS,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "Lfm2VlForConditionalGeneration": LFM2_WITH_VISION,
    "Lfm3ForCausalLM": LFM3,
    "NemotronHForCausalLM": NEMOTRON_H,
    "OPTForCausalLM": OPT,
    "GPT2LMHeadModel": GPT2,
    "GPTNeoXForCausalLM": GPT_NEOX,
    "FalconForCausalLM": FALCON,
    "FalconH1ForCausalLM": FALCON_H1,
    "StableLmForCausalLM": STABLELM,
    "PhiForCausalLM": PHI,
    "Phi3ForCausalLM": PHI3,
    "SmolLM3ForCausalLM": SMOLLM3,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE_SHARED,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeLiteForCausalLM": GLM_LITE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": GLM_DSA,
    "Glm5NextForConditionalGeneration": GLM5_NEXT,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_WITH_VISION,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4_MULTIMODAL,
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED_MULTIMODAL,
    "Ministral3ForCausalLM": MINISTRAL3,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "Mistral4ForCausalLM": MISTRAL4,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "SeedOssForCausalLM": SEED_OSS,
    "ArceeForCausalLM": ARCEE,
    "Ernie4_5ForCausalLM": ERNIE4_5,
    "HunYuanDenseV1ForCausalLM": HUNYUAN_DENSE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Exaone4ForCausalLM": EXAONE4,
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE2,
    "Starcoder2ForCausalLM": STARCODER2,
    "MiniCPM3ForCausalLM": MINICPM3,
    "Dots1ForCausalLM": DOTS1,
    "SolarOpenForCausalLM": SOLAR_OPEN,
    "GemmaForCausalLM": GEMMA,
    "CwmForCausalLM": CWM,
    "MinistralForCausalLM": MINISTRAL,
    "YoutuForCausalLM": YOUTU,
    "MellumForCausalLM": MELLUM,
    "ExaoneMoeForCausalLM": EXAONE_MOE,
    "ExaoneMoEForCausalLM": EXAONE_MOE,  # as the first files call it
    "HunYuanMoEV1ForCausalLM": HUNYUAN_MOE,
    "HYV3ForCausalLM": HY3,
    "HYV4ForCausalLM": HY4,
    "HYV4VLForConditionalGeneration": HY4_WITH_VISION,
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "AfmoeForCausalLM": AFMOE,
    "ApertusForCausalLM": APERTUS,
    "AyaVisionForConditionalGeneration": AYA_VISION,
    "Cohere2VisionForConditionalGeneration": COHERE2_VISION,
    "Exaone4_5_ForConditionalGeneration": EXAONE4_5,
    "HyperCLOVAXForCausalLM": HYPERCLOVAX,
    "Jais2ForCausalLM": JAIS2,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "KimiK25ForConditionalGeneration": KIMI_VISION,
    "Kimi_K25ForConditionalGeneration": KIMI_VISION,  # as transformers calls it
    "GraniteMoeSWAForCausalLM": GRANITE_MOE_SWA,
    "MuseGlimmerForConditionalGeneration": MUSE_GLIMMER,
    **HEADLESS,
    **CLASSIFIERS,
}


def family_of(architecture: str, text_type: str | None) -> Family:
    """The family of a supported architecture whose text part has this model_type (None: it has no parts)."""
    family = FAMILIES[architecture]
    return next((each for each in family.other_texts if each.text_type == text_type), family)
