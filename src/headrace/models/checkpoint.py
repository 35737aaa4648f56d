"""Tensors of a checkpoint by the names of its family, whatever files they lie in: numbers, or codes under scales."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.kernels.formats import Coded
from headrace.logs import shown
from headrace.models.files import is_gguf, weight_files
from headrace.models.gguf.architectures import Architecture, architecture_of, checkpoint_name
from headrace.models.gguf.blocks import coded
from headrace.models.gguf.header import GgufFile, TensorInfo, open_gguf
from headrace.models.spec import ModelConfig

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Checkpoint(Protocol):
    """Read access to all tensors, mapped from disk. Use as a context manager; what was read stays good after it."""

    @property
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str:
        """The type of its numbers, as safetensors calls it, or the name of its format."""

    def is_coded(self, name: str) -> bool:
        """Whether it is codes under scales."""

    def read(self, name: str) -> Tensor:
        """A tensor of numbers as stored; its memory belongs to the file, so copy what is to stay."""

    def coded(self, name: str, rows: Tensor | None) -> Coded:
        """A matrix of codes, or of its rows the ones numbered `rows`, in that order. Raises ValueError for scales that
        are not finite."""

    def __enter__(self) -> Checkpoint: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def open_checkpoint(model: Path, config: ModelConfig) -> Checkpoint:
    """The weights of a folder or of a GGUF file. Raises ValueError for files that are not sound."""
    return GgufCheckpoint(model, config) if is_gguf(model) else SafetensorsCheckpoint(model)


class SafetensorsCheckpoint:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._where: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged or cut short ({shown(error)}); download it again") from None
            self._where.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def stored_as(self, name: str) -> str:
        return str(self._where[name].get_slice(name).get_dtype())

    def is_coded(self, name: str) -> bool:
        return False

    def read(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def coded(self, name: str, rows: Tensor | None) -> Coded:
        raise ValueError(f"{name} is not quantised")


class GgufCheckpoint:
    """A GGUF file, or all its parts, by the names that the family's checkpoints have."""

    def __init__(self, model: Path, config: ModelConfig) -> None:
        self._spec = config.attention
        self._where: dict[str, tuple[GgufFile, TensorInfo]] = {}
        files = [open_gguf(path) for path in weight_files(model)]
        self._architecture: Architecture = architecture_of(files[0])
        for file in files:
            for info in file.tensors.values():
                name = checkpoint_name(self._architecture, info.name) or info.name
                if name in self._where:
                    raise ValueError(f"{file.path}: {shown(info.name)} lies in another part too; download it again")
                self._where[name] = file, info

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass  # tensors that were read keep their file mapped

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][1].shape

    def stored_as(self, name: str) -> str:
        return self._where[name][1].type.name

    def is_coded(self, name: str) -> bool:
        return not self._where[name][1].type.plain

    def read(self, name: str) -> Tensor:
        info, turned = self._where[name][1], self._turned(name)
        numbers = self._bytes(name).view(PLAIN[info.type.name]).view(info.shape)
        return numbers if turned is None else numbers[turned]

    def coded(self, name: str, rows: Tensor | None) -> Coded:
        stored, turned = self._bytes(name), self._turned(name)
        wanted = turned if rows is None else rows if turned is None else turned[rows]
        return coded(self.stored_as(name), stored if wanted is None else stored[wanted])

    def _bytes(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row]."""
        file, info = self._where[name]
        return torch.from_numpy(file.bytes_of(info))

    def _turned(self, name: str) -> Tensor | None:
        """The rows of the file's queries or keys in the checkpoint's order; None where that is the file's."""
        kind = name.split(".")[-2] if "." in name else ""
        if not self._architecture.turned or kind not in ("q_proj", "k_proj"):
            return None
        heads = self._spec.heads if kind == "q_proj" else self._spec.kv_heads
        pairs = torch.arange(heads * self._spec.head_dim).view(heads, self._spec.head_dim // 2, 2)
        return pairs.transpose(1, 2).reshape(-1)
