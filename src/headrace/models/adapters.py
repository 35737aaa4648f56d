"""Adapters (LoRA) from their files into pairs of matrices, one for each of the decoder's matrices that they change.

K, N: inputs and outputs of one of our matrices, which may be made of several modules of a checkpoint; r: rank of one
module's change, R: of all of them together. Modules are found, and rows put in order, as those of the model's own
weights are (models.weights), so that a tensor rank's share, too, is cut as theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.kernels import dispatch, ops
from headrace.kernels.adapted_rows import Pair, Pairs
from headrace.logs import shown
from headrace.models.adapter_files import AdapterFacts
from headrace.models.families import family_of
from headrace.models.hybrid import as_tiled
from headrace.models.shards import Share
from headrace.models.slots import Slot, expected
from headrace.models.spec import ModelConfig
from headrace.models.weights import fused, rows_of, source_of
from headrace.types import UnsupportedModel

MATRIX = re.compile(
    r"layers\.(\d+)\."
    r"(qkv|mixed|gates|decays|out_gates|out|recurrent_out|queries|query_in|latent|attention_gates|input_gate|input_out|"
    r"(shared\.)?(up|down))\.weight$"
)
"""Of ours, those that an adapter may change."""
TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight$")
UNIT = 32
"""R is a multiple of it: kernels read whole vectors."""

Found = dict[str, tuple[Tensor, Tensor]]
"""Module of a checkpoint -> (A [r, inputs], B [outputs, r])."""


class Adapters:
    """Those of an engine, by their number in its settings. facts: of each. pairs: by matrix, as in layers.0.qkv."""

    def __init__(self, facts: Sequence[AdapterFacts], pairs: Mapping[str, Pairs]) -> None:
        self.facts, self.pairs = tuple(facts), pairs

    def of_layer(self, index: int) -> dict[str, Pairs]:
        """Those of a layer's matrices, without the layer's prefix."""
        prefix = f"layers.{index}."
        return {name.removeprefix(prefix): pairs for name, pairs in self.pairs.items() if name.startswith(prefix)}

    @property
    def nbytes(self) -> int:
        """Memory of the pairs."""
        return sum(pair.nbytes for each in self.pairs.values() for pair in each if pair is not None)


def load_adapters(
    facts: Sequence[AdapterFacts],
    config: ModelConfig,
    dtype: torch.dtype,
    share: Share | None = None,
    device: torch.device | None = None,
) -> Adapters:
    """Reads adapters of the model `config`, in `dtype`; of `share` only what it holds. device: the CPU, if it is not
    given.

    Raises ValueError for files that are not sound or do not fit the model, UnsupportedModel for what is not adapted.
    """
    if config.value_norm and dispatch.on_gpu(torch.empty(0, device=device)):
        told = f"{config.architecture} is not adapted on a GPU yet"
        raise UnsupportedModel(f"adapters: {told}; merge the adapter into the model")
    if config.multiplied:
        raise UnsupportedModel(
            f"adapters: this file's matrices are multiplied by what {config.architecture} multiplies numbers by, which "
            f"is for what adapters add, too, and the file does not say it; use the model's safetensors"
        )
    slots = {name: slot for name, slot in expected(config).items() if MATRIX.match(name)}
    made: dict[str, list[tuple[Tensor, Tensor] | None]] = {}
    for number, each in enumerate(facts):
        try:
            _check_invocation(each, config)
            for name, pair in _read(each, config, slots, dtype, share).items():
                made.setdefault(name, [None] * len(facts))[number] = pair
        except UnsupportedModel as error:
            raise UnsupportedModel(f"adapter {shown(repr(each.name))}: {error}") from None
        except ValueError as error:
            raise ValueError(f"adapter {shown(repr(each.name))}: {error}") from None
    return Adapters(facts, {name.removesuffix(".weight"): _packed(pairs, device) for name, pairs in made.items()})


def _check_invocation(facts: AdapterFacts, config: ModelConfig) -> None:
    beyond = [token for token in facts.invocation if token >= config.vocab_size]
    if beyond:
        told = f"{beyond[0]}, and the model has {config.vocab_size} tokens"
        raise ValueError(f"alora_invocation_tokens names {told}; the adapter is of another model")


def _packed(pairs: Sequence[tuple[Tensor, Tensor] | None], device: torch.device | None) -> list[Pair | None]:
    """All of one R: that of the largest."""
    rank = max(len(pair[0]) for pair in pairs if pair is not None)
    rank += -rank % UNIT
    pad = torch.nn.functional.pad

    def there(part: Tensor) -> ops.Weight:
        part = part.to(device or "cpu")
        return part.contiguous() if dispatch.on_gpu(part) else ops.pack(part)

    def one(down: Tensor, up: Tensor) -> Pair:
        missing = rank - len(down)
        return Pair(there(pad(down, (0, 0, 0, missing))), there(pad(up, (0, missing))))

    return [None if pair is None else one(*pair) for pair in pairs]


def _read(
    facts: AdapterFacts, config: ModelConfig, slots: Mapping[str, Slot], dtype: torch.dtype, share: Share | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """(down, up) of each of our matrices that the adapter changes."""
    modules = _modules(facts)
    sources = _sources(config, slots, set(modules))
    meant = {module for group in sources.values() for module in group}
    family = family_of(config.architecture, config.text_type)
    other = sorted(module for module in set(modules) - meant if not module.startswith(family.unread))
    deeper = [int(n) for module in other for n in re.findall(r"\blayers\.(\d+)\.", module) if int(n) >= config.blocks]
    if deeper:
        told = f"it changes layer {max(deeper)}, and this one has {config.blocks}"
        raise ValueError(f"{facts.weights}: the adapter is of another model: {told}, counted from 0")
    if other:
        told = f"{', '.join(map(shown, other[:3]))}{f' and {len(other) - 3} more' if len(other) > 3 else ''}"
        raise UnsupportedModel(
            f"changes {told}: projections of attention (but kv_b_proj and indexers), of recurrent layers and of "
            f"MLPs are adapted, and no other module of {config.architecture}; merge the adapter into its model"
        )
    made = {}
    for name, group in sources.items():
        if not modules.keys().isdisjoint(group):
            rows = rows_of(config, family, name, share)
            down, up = _pair(facts, modules, group, slots[name], dtype, rows)
            made[name] = (_by_column(config, name, down), up)
    if not made:
        raise ValueError(f"{facts.weights} changes nothing")
    return made


def _modules(facts: AdapterFacts) -> Found:
    """What the file has of each module."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(facts.weights, framework="pt") as file:
            for name in sorted(file.keys()):
                named = TENSOR.match(name)
                if named is None:
                    raise UnsupportedModel(f"{shown(name)} is no matrix of LoRA; merge the adapter into its model")
                found.setdefault(named[1], {})[named[2]] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{facts.weights} is damaged or cut short ({shown(error)}); download it again") from None
    for module, each in found.items():
        if len(each) < 2:
            raise ValueError(f"{facts.weights} lacks lora_A or lora_B of {shown(module)}; download it again")
    return {module: (each["A"], each["B"]) for module, each in found.items()}


def _sources(config: ModelConfig, slots: Iterable[str], present: set[str]) -> dict[str, tuple[str, ...]]:
    """Our matrix -> the modules that make it, by the names that most modules of the adapter have."""
    family = family_of(config.architecture, config.text_type)
    named = (family.names, family.other_names, family.in_memory)
    forms = [each(config) for each in named if each is not None]
    candidates = [
        {name: tuple(each.removesuffix(".weight") for each in source_of(names, name, prefix)) for name in slots}
        for names in forms
        for prefix in family.prefixes
    ]
    return max(candidates, key=lambda found: sum(module in present for group in found.values() for module in group))


def _pair(
    facts: AdapterFacts, modules: Found, group: Sequence[str], slot: Slot, dtype: torch.dtype, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(down [R, K], up [N, R]) of one of our matrices: each module has columns of its own in `up`, which are zero in
    the others' rows, so that one product adds what each adds."""
    parts = slot.rows_of(len(group))
    ranks = [len(modules[module][0]) if module in modules else 0 for module in group]
    downs, ups, begin = [], [], 0
    for module, outputs, rank in zip(group, parts, ranks, strict=True):
        up = torch.zeros(outputs, sum(ranks))
        if module in modules:
            down, own = modules[module]
            _check(facts, module, down, own, (outputs, slot.columns))
            downs.append(down.to(dtype))
            up[:, begin : begin + rank] = own.float() * facts.scale(module, rank)
        ups.append(up)
        begin += rank
    made = fused(Slot(slot.parts, sum(ranks)), ups, dtype, rows)
    for tensor in (*downs, made):
        if not tensor.isfinite().all():
            raise ValueError(f"{facts.weights} holds NaN or infinity in {', '.join(group)}; download it again")
    return torch.cat(downs), made


def _by_column(config: ModelConfig, name: str, down: Tensor) -> Tensor:
    """down [R, K] as the columns of its matrix lie, perhaps in an order of their own (ModelConfig.tiled_values)."""
    found = MATRIX.match(name)
    if found is None or config.recurrent is None or not config.tiled_values or found[2] != "out":
        return down
    return as_tiled(config.recurrent, down) if int(found[1]) in config.recurrent_layers else down


def _check(facts: AdapterFacts, module: str, down: Tensor, up: Tensor, shape: tuple[int, int | None]) -> None:
    outputs, inputs = shape
    kinds = {part.dtype for part in (down, up)}
    if not all(kind.is_floating_point for kind in kinds):
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise ValueError(f"{facts.weights}: {shown(module)} is stored as {names}; numbers of floating point are read")
    wanted = ([len(down), inputs], [outputs, len(down)])
    if not len(down) or [list(down.shape), list(up.shape)] != list(wanted):
        raise ValueError(
            f"{facts.weights}: {shown(module)} has {list(down.shape)} and {list(up.shape)}, of a matrix "
            f"[{outputs}, {inputs}] of this model; the adapter is of another one"
        )
