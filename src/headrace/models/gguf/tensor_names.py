"""The tensors of a GGUF file by the names that the family's checkpoints have. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from headrace.logs import shown
from headrace.models.gguf.architectures import MODULE, Architecture
from headrace.models.gguf.facts import FileFacts
from headrace.models.gguf.header import GgufFile, TensorInfo

GUESSING = ".nextn."
"""In names of tensors that put what is guessed into a further block, and take it out."""
NUMBERS = ("scale", "input_scale")
"""Kinds of tensors that hold one number for each matrix."""


def further_blocks(files: Sequence[GgufFile], layers: int) -> set[int]:
    """Blocks behind the last of so many layers, which guess further tokens: those that nextn_predict_layers counts, if
    one of them has tensors for that, and others that have them. Raises ValueError for a tensor of any other."""
    names = {name: file for file in files for name in file.tensors}
    behind = {block for name in names if (block := _block(name)) >= layers}
    guessing = {_block(name) for name in names if GUESSING in name} & behind
    facts = FileFacts(files[0])
    end = layers + facts.count("nextn_predict_layers", 0)  # as many as a file likes
    counted = {block for block in behind if block < end}
    further = guessing | (counted if counted & guessing else set())
    for name, file in names.items():
        if _block(name) in behind - further:
            told = f"{facts.prefix}block_count is {facts.count('block_count')}, with {layers} layers"
            raise ValueError(f"{file.path}: {shown(name)} is of no layer: {told}; download it again")
    return further


def _block(name: str) -> int:
    """Of a tensor; -1 for one of the whole model."""
    found = MODULE.match(name)
    return -1 if found is None else int(found[1])


def checkpoint_tensors(
    architecture: Architecture, file: GgufFile, info: TensorInfo, experts: int, further: Set[int]
) -> dict[str, TensorInfo]:
    """A tensor of the file by what the checkpoint calls it, one of all experts as one of each; by its own name where
    the checkpoint has none like it, behind `mtp.` in a block of `further`. Raises ValueError for one of another number
    of experts than the model has."""
    module, _, kind = info.name.rpartition(".")
    if _block(info.name) in further:
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
