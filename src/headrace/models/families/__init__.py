"""The families that the decoder knows, by the architecture that config.json names."""

from headrace.models.families.base import Family
from headrace.models.families.falcon import FALCON
from headrace.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from headrace.models.families.opt import OPT
from headrace.models.families.qwen3_next import QWEN3_5, QWEN3_NEXT

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "OPTForCausalLM": OPT,
    "FalconForCausalLM": FALCON,
}
