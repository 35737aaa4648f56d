"""Random adapters in the form that PEFT writes, and models of transformers with an adapter multiplied into them."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headrace.kernels import ops
from headrace.kernels.adapted_rows import Pair
from headrace.models.adapters import MATRIX, Adapters
from headrace.models.decoder import Decoder

ADAPTED = re.compile(
    r"\.(self_attn|attn|mixer|mamba|linear_attn|forget_gate|conv|attention|self_attention|mlp|feed_forward|shared_experts?|"
    r"shared_mlp|"
    r"decoder\.layers\.\d+)\.\w+$|\.per_layer_(input_gate|projection)$"
)
"""Modules beside experts and routers."""
UNTOUCHED = ("kv_b_proj", "gate", "router", "shared_expert_gate")


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    """Projections of attention, of recurrent layers and of MLPs, by their names."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    return {
        name: module
        for name, module in found.items()
        if ADAPTED.search(name) and name.rsplit(".", 1)[1] not in UNTOUCHED and "visual" not in name
        if "vision" not in name and "projector" not in name
    }


def write_adapter(
    folder: Path, model: PreTrainedModel, targets: str = r".*", rank: int = 4, seed: int = 0, size: float = 0.5,
    **config: Any,
) -> Path:  # fmt: skip
    """An adapter of the modules whose names match `targets` as a whole; their ranks differ. size: about how large what
    it adds is beside its input. Returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for place, (name, module) in enumerate(linear_modules(model).items()):
        if re.fullmatch(targets, name):
            own = rank + place % 3
            outputs, inputs = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
            a = torch.randn(own, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, own, generator=generator) / own**0.5 * size / 2
            tensors |= {
                f"base_model.model.{name}.lora_{part}.weight": each.bfloat16().float()
                for part, each in (("A", a), ("B", b))
            }
    assert tensors, "nothing is adapted"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, bias="none", task_type="CAUSAL_LM") | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter multiplied into its weights: W + B A alpha / r."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    merged = deepcopy(model)
    modules = dict(merged.named_modules())
    for name, a in tensors.items():
        if ".lora_A." in name:
            b, rank = tensors[name.replace("lora_A", "lora_B")], len(a)
            scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            change = (b.double() @ a.double() * scale).to(module.weight.dtype)
            module.weight.data += change.T if isinstance(module, Conv1D) else change
    return merged


def drawn_adapters(decoder: Decoder, rank: int = 32) -> Adapters:
    """Three without files: of all matrices that may be changed, of all but the last of a layer, of one alone."""
    g = torch.Generator().manual_seed(5)
    pairs: dict[str, list[Pair | None]] = {}
    for name in filter(MATRIX.match, decoder.matrices):
        outputs, inputs = decoder.matrices[name].shape
        each: list[Pair | None] = []
        for number in range(3):
            down = torch.randn(rank, inputs, generator=g) / inputs**0.5
            up = torch.randn(outputs, rank, generator=g) / rank**0.5
            changed = (True, not name.endswith("down.weight"), name.endswith("out.weight"))[number]
            each.append(Pair(*(ops.pack(part.to(decoder.dtype)) for part in (down, up))) if changed else None)
        pairs[name.removesuffix(".weight")] = each
    return Adapters((), pairs)
