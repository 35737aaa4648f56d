"""The families that the decoder knows, by the architecture that config.json names."""

from headrace.models.families.base import Family
from headrace.models.families.experts import MIXTRAL, OLMOE, QWEN3_MOE
from headrace.models.families.falcon import FALCON
from headrace.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from headrace.models.families.opt import OPT

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": OLMOE,
    "OPTForCausalLM": OPT,
    "FalconForCausalLM": FALCON,
}
