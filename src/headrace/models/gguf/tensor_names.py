"""The tensors of a GGUF file by the names that the family's checkpoints have. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from headrace.logs import shown
from headrace.models.gguf.architectures import MODULE, Architecture
from headrace.models.gguf.header import GgufFile, TensorInfo

NUMBERS = ("scale", "input_scale")
"""Kinds of tensors that hold one number for each matrix."""


def checkpoint_tensors(
    architecture: Architecture, file: GgufFile, info: TensorInfo, experts: int, layers: int
) -> dict[str, TensorInfo]:
    """A tensor of the file by what the checkpoint calls it, one of all experts as one of each; by its own name where
    the checkpoint has none like it, behind `mtp.` in a block behind the last layer. Raises ValueError for one of
    another number of experts than the model has."""
    module, _, kind = info.name.rpartition(".")
    block = MODULE.match(info.name)
    if block is not None and int(block[1]) >= layers:
        return {f"mtp.{info.name}": info}
    if (whole := architecture.modules(info.name)) is not None:
        return {whole[0]: info}
    found = architecture.modules(module)
    if found is None:
        return {info.name: info}
    name, apart = found
    if not apart:
        return {f"{name}.{kind}": info}
    if kind in NUMBERS:
        info = replace(info, shape=(*info.shape, 1))
    if len(info.shape) != (2 if kind in ("bias", *NUMBERS) else 3) or info.shape[0] != experts:
        raise ValueError(
            f"{file.path}: {shown(info.name)} is of shape {list(info.shape)} where matrices of {experts} experts are "
            f"expected; download it again"
        )
    return {f"{name.format(expert)}.{kind}": each for expert, each in enumerate(info.apart())}
