"""Tensors of a checkpoint by the names of its family, whatever files they lie in: numbers, or codes under scales."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.kernels.formats import Coded
from headrace.logs import shown
from headrace.models import quantised_layouts
from headrace.models.families import family_of
from headrace.models.families.base import Family
from headrace.models.files import is_gguf, placed, weight_files
from headrace.models.gguf.architectures import Architecture, architecture_of
from headrace.models.gguf.blocks import coded
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.families import turned
from headrace.models.gguf.header import GgufFile, TensorInfo, open_gguf
from headrace.models.gguf.tensor_names import checkpoint_tensors, further_blocks
from headrace.models.quantised import ENDS, Scheme
from headrace.models.spec import ModelConfig

ReadCoded = Callable[[], Coded]
ByInputs = Callable[[str, Sequence[int]], bool]
"""Whether the weights of all experts, a module of that name and shape [experts, ...], lie by inputs."""
FUSED = re.compile(
    r"\.experts\.(gate_up_proj|up_proj|down_proj)(?:_(bias|blocks|scales|scale_inv|activation_scale))?$"
    r"|(?<=\.block_sparse_moe)\.(input_linear|output_linear)\.(weight)$"
)
"""Tensors [E, ...] of all experts, as transformers may write them and gpt-oss and Mistral Small 4 are published, and as
Granite is."""
SCALE = {"scale_inv": "weight_scale_inv"}
"""Of those in FP8, by the name that it has where each expert has a module of its own."""
CORRECTIONS = ".e_score_correction_bias"
"""Of experts' scores [E], which ERNIE's files have as one row [1, E]."""
RATES = ".self_attn.A_log"
"""How fast heads forget [Hv], which Kimi Linear's files have as [1, 1, Hv, 1]."""
OF_QKV = tuple(f".{part}_conv1d.weight" for part in "qkv")
"""Kimi Linear's convolutions, which GGUF files have as [1, channels, 1, inputs]."""
FILTERS = (".conv1d.weight", ".conv.conv.weight")
"""Of convolutions [channels, 1, inputs], which GGUF files have as matrices."""
OF_MAMBA = tuple(f".{mixer}.{name}" for mixer in ("mamba", "mixer") for name in ("A_log", "D", "norm.weight"))
"""Vectors that GGUF files have as matrices."""
ONE_ROW = ".shared_expert_gate.weight"
"""A matrix [1, inputs] that GGUF files have as a vector."""
OF_KEYS, OF_VALUES, OF_BOTH = (f".self_attn.{part}_b_proj.weight" for part in ("k", "v", "kv"))
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint(Protocol):
    """Read access to all tensors, mapped from disk. Use as a context manager; what it gave stays good after it."""

    model: Path

    @property
    def names(self) -> set[str]: ...

    def form(self, family: Family) -> Family:
        """The family as its tensors lie here."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str:
        """The type of its numbers, as safetensors calls it, or the name of its format."""

    def is_coded(self, name: str) -> bool:
        """Whether it is codes under scales."""

    def held(self, name: str) -> int:
        """Bytes that its codes and scales take in memory, about."""

    def read(self, name: str) -> Tensor:
        """A tensor of numbers as stored; its memory belongs to the file, so copy what is to stay."""

    def coded(self, name: str, rows: Tensor | None) -> ReadCoded:
        """What takes apart a matrix of codes, or of its rows the ones numbered `rows`, in that order. It raises
        ValueError for tensors that do not fit together, and for scales that are not finite."""

    def __enter__(self) -> Checkpoint: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_checkpoint(model: Path, config: ModelConfig) -> Checkpoint:
    """The weights of a folder or of a GGUF file. Raises ValueError for files that are not sound."""
    if is_gguf(model):
        return GgufCheckpoint(model, config)
    scheme, experts = config.stored.scheme if config.stored is not None else None, _count_experts(config)
    by_inputs, family = _lie_by_inputs(config), family_of(config.architecture, config.text_type)
    if scheme is not None:
        return QuantisedCheckpoint(model, scheme, experts, by_inputs, family.named)
    return SafetensorsCheckpoint(model, experts, by_inputs, family.named, family.by_inputs)


def _lie_by_inputs(config: ModelConfig) -> ByInputs:
    family, spec = family_of(config.architecture, config.text_type), config.experts
    if spec is None or not family.fused_either_way:
        return lambda module, shape: family.fused_by_inputs
    inputs = {"gate_up_proj": config.hidden_size, "down_proj": spec.inner}
    return lambda module, shape: shape[-1] != inputs[module]


def _count_experts(config: ModelConfig) -> int:
    return 0 if config.experts is None else config.experts.count


class SafetensorsCheckpoint:
    """The safetensors files of a folder. A tensor [experts, ...], `experts.NAME`, is shown as one of each expert:
    `experts.0.NAME.weight` and so on, `experts.NAME_bias` as `experts.0.NAME.bias`; so are those of Granite, which
    stand without `experts`. by_inputs: which such weights lie as [experts, inputs, outputs]; named: what a tensor is
    called here; turned: modules of layers whose matrices lie as [inputs, outputs]."""

    def __init__(
        self,
        folder: Path,
        experts: int = 0,
        by_inputs: ByInputs = lambda module, shape: False,
        named: Callable[[str], str] = str,
        turned: tuple[str, ...] = (),
    ) -> None:
        self.model, self._by_inputs = folder, by_inputs
        self._turned: set[str] = set()
        self._stack = ExitStack()
        self._where: dict[str, safe_open] = {}
        self._stored: dict[str, tuple[str, int | None]] = {}
        """Those that are called otherwise in a file, or are one expert's part of a tensor there, by our names."""
        where = placed(folder)
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged or cut short ({shown(error)}); download it again") from None
            for name in tuple(file.keys()):
                if name in self._where and name not in where:
                    raise ValueError(f"{path}: {shown(name)} is in another file too; download the folder again")
                if name not in self._where or where[name] == path.name:
                    self._where[name] = file
        for name in list(self._where):
            if (ours := named(name)) != name:
                if ours in self._where:
                    raise ValueError(f"{folder}: {shown(name)} is there as {shown(ours)} too; download it again")
                self._where[ours], self._stored[ours] = self._where.pop(name), (name, None)
        ends = tuple(f".{module}.weight" for module in turned)
        self._turned |= {name for name in self._where if name.endswith(ends)}
        if experts:
            self._take_apart(experts)

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _take_apart(self, experts: int) -> None:
        for name, found in [(name, found) for name in self._where if (found := FUSED.search(name))]:
            stored = self._stored.get(name, (name, None))[0]
            shape = self._where[name].get_slice(stored).get_shape()
            if shape[:1] == [experts]:
                file, module, before = self._where.pop(name), found[1] or found[3], name[: found.start()]
                kind = SCALE.get(found[2], found[2] or "weight")
                apart = {f"{before}.experts.{e}.{module}.{kind}": (stored, e) for e in range(experts)}
                self._where.update(dict.fromkeys(apart, file))
                self._stored.update(apart)
                if kind == "weight" and self._by_inputs(module, shape):
                    self._turned.update(apart)
        self._turned |= {scale for name in self._turned if (scale := f"{name}_scale_inv") in self._where}

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def form(self, family: Family) -> Family:
        return family

    def shape(self, name: str) -> tuple[int, ...]:
        stored, expert = self._stored.get(name, (name, None))
        shape = tuple(self._where[name].get_slice(stored).get_shape())
        own = shape if expert is None else shape[1:]
        if name.endswith(RATES) and own[:2] == own[3:] * 2 == (1, 1):
            return own[2:3]
        if name.endswith(CORRECTIONS) and own[:1] == (1,):
            return own[1:]
        return own[::-1] if name in self._turned else own

    def stored_as(self, name: str) -> str:
        stored, _ = self._stored.get(name, (name, None))
        return str(self._where[name].get_slice(stored).get_dtype())

    def is_coded(self, name: str) -> bool:
        return False

    def held(self, name: str) -> int:
        raise ValueError(f"{name} is not quantised")

    def read(self, name: str) -> Tensor:
        stored, expert = self._stored.get(name, (name, None))
        file = self._where[name]
        own = file.get_tensor(stored) if expert is None else file.get_slice(stored)[expert]
        if name.endswith((CORRECTIONS, RATES)):
            return own.flatten()
        return own.T if name in self._turned else own

    def coded(self, name: str, rows: Tensor | None) -> ReadCoded:
        raise ValueError(f"{name} is not quantised")


class QuantisedCheckpoint(SafetensorsCheckpoint):
    """Those of a folder whose config.json says how they are quantised. A module's tensors of codes, scales and the rest
    are one here, called `weight`; modules without them have numbers."""

    def __init__(
        self, folder: Path, scheme: Scheme, experts: int, by_inputs: ByInputs, named: Callable[[str], str]
    ) -> None:
        super().__init__(folder, experts, by_inputs, named)
        self._own: dict[str, list[str]] = {}
        self._schemes: dict[str, Scheme] = {}
        for each in scheme.every:
            first, second, *others = ENDS[each.layout]
            for module in [name.removesuffix(f".{first}") for name in self._where if name.endswith(f".{first}")]:
                own = [f"{module}.{end}" for end in (first, second, *others) if f"{module}.{end}" in self._where]
                told = len(own) > 1 if each.layout == "plain" else f"{module}.{second}" in own
                if told and f"{module}.weight" not in self._own:
                    self._own[f"{module}.weight"], self._schemes[f"{module}.weight"] = own, each

    @property
    def names(self) -> set[str]:
        return set(self._where) - {part for own in self._own.values() for part in own} | set(self._own)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._own:
            return super().shape(name)
        stored, scheme = super().shape(self._own[name][0]), self._schemes[name]
        if scheme.layout == "mxfp4" and len(stored) == 3:
            return stored[0], stored[1] * stored[2] * 2
        if len(stored) != 2:
            return stored
        if scheme.layout == "nf4":
            try:
                return quantised_layouts.state_of(self.read(self._own[name][1]))[:2]
            except ValueError as error:
                raise ValueError(f"{self.model}: {shown(name)}: {error}; download it again") from None
        each = 32 // scheme.bits
        if scheme.layout == "packed":
            return tuple(self.read(self._own[name][1]).flatten().tolist())
        if scheme.layout in ("nvfp4", "nvfp4 scale_2", "packed mxfp4"):
            return stored[0], stored[1] * 2
        swapped = {"gptq": (stored[1], stored[0] * each), "awq": (stored[1] * each, stored[0])}
        return swapped.get(scheme.layout, stored)

    def stored_as(self, name: str) -> str:
        return self._schemes[name].name if name in self._own else super().stored_as(name)

    def is_coded(self, name: str) -> bool:
        return name in self._own

    def held(self, name: str) -> int:
        return math.prod(self.shape(name)) * self._schemes[name].bits // 8

    def coded(self, name: str, rows: Tensor | None) -> ReadCoded:
        module = name.removesuffix("weight")
        tensors = {part.removeprefix(module): self.read(part) for part in self._own[name]}
        return partial(quantised_layouts.coded, self._schemes[name], tensors, rows)


class GgufCheckpoint:
    """A GGUF file, or all its parts, by the names that the family's checkpoints have; blocks behind the last layer,
    which guess further tokens, by theirs. What heads make of latents is one matrix here, of numbers, also where the
    file has keys [Hq, rank, plain], transposed, and values [Hq, value, rank]. Vectors in the metadata are tensors."""

    def __init__(self, model: Path, config: ModelConfig) -> None:
        self.model = model
        self._where: dict[str, tuple[GgufFile, TensorInfo]] = {}
        files = [open_gguf(path) for path in weight_files(model)]
        self._architecture: Architecture = architecture_of(files[0])
        further = further_blocks(files, config.blocks)
        for file in files:
            for info in file.tensors.values():
                tensors = checkpoint_tensors(self._architecture, file, info, _count_experts(config), further)
                for name, each in tensors.items():
                    if name in self._where:
                        raise ValueError(f"{file.path}: {shown(info.name)} is there twice; download it again")
                    self._where[name] = file, each
        vectors_of = self._architecture.vectors
        vectors = {} if vectors_of is None else vectors_of(FileFacts(files[0]))
        self._vectors = {name: torch.from_numpy(vector) for name, vector in vectors.items()}
        self._scales = {name: own for name in self._where if (own := self._scale_of(name)) in self._where}
        pairs = [(name, name.replace(OF_KEYS, OF_VALUES)) for name in self._where if name.endswith(OF_KEYS)]
        self._of_heads = {keys.replace(OF_KEYS, OF_BOTH): (keys, own) for keys, own in pairs if own in self._where}

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass  # tensors that were read keep their file mapped

    @property
    def names(self) -> set[str]:
        beside = {part for parts in self._of_heads.values() for part in parts}.union(self._scales.values())
        return set(self._where) - beside | set(self._of_heads) | set(self._vectors)

    def form(self, family: Family) -> Family:
        form = turned if self._architecture.turned else self._architecture.form
        return form(family, self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._of_heads:
            keys, values = (self._where[part][1].shape for part in self._of_heads[name])
            fit = len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])
            return (keys[0] * (keys[2] + values[1]), keys[1]) if fit else keys
        shape = tuple(self._vectors[name].shape) if name in self._vectors else self._where[name][1].shape
        if name.endswith(ONE_ROW) and math.prod(shape) == shape[-1]:
            return 1, shape[-1]
        if name.endswith((*OF_MAMBA, RATES)):
            return (math.prod(shape),)
        if name.endswith(OF_QKV):
            return (math.prod(shape[:-1]), 1, shape[-1])
        return (shape[0], 1, *shape[1:]) if name.endswith(FILTERS) else shape

    def stored_as(self, name: str) -> str:
        return "F32" if name in self._of_heads or name in self._vectors else self._where[name][1].type.name

    def is_coded(self, name: str) -> bool:
        return name not in self._of_heads and name not in self._vectors and not self._where[name][1].type.plain

    def held(self, name: str) -> int:
        return self._where[name][1].held

    def read(self, name: str) -> Tensor:
        if name in self._vectors:
            return self._vectors[name]
        if name in self._of_heads:
            keys, values = map(self._wide, self._of_heads[name])
            return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        numbers = self._bytes(name).view(PLAIN[self.stored_as(name)]).view(self.shape(name))
        if name.endswith(".A_log"):  # the file has -exp of it
            return numbers.float().neg().log()
        norm = name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")
        return numbers.float() - 1 if norm and self._architecture.added_one else numbers

    def coded(self, name: str, rows: Tensor | None) -> ReadCoded:
        stored, kind, own = self._bytes(name), self.stored_as(name), self._scales.get(name)
        scale = None if own is None else self._wide(own)
        return lambda: coded(kind, stored if rows is None else stored[rows], scale)

    def _scale_of(self, name: str) -> str | None:
        """The tensor of one number that a matrix in NVFP4 is multiplied by, if there is one."""
        info = self._where[name][1]
        return f"{name.removesuffix('weight')}scale" if info.type.name == "NVFP4" and name.endswith(".weight") else None

    def _wide(self, name: str) -> Tensor:
        """A tensor in fp32, multiplied out."""
        if not self.is_coded(name):
            return self.read(name).float()
        return self.coded(name, None)().dequantised().view(self.shape(name))

    def _bytes(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row]."""
        file, info = self._where[name]
        return torch.from_numpy(file.bytes_of(info))
