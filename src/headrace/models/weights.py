"""Weights from safetensors into the decoder's tensors (models.spec.expected): renamed, fused, converted, checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.logs import shown
from headrace.models.config import DTYPES
from headrace.models.families import FAMILIES
from headrace.models.families.base import Names
from headrace.models.files import weight_files
from headrace.models.shards import Share
from headrace.models.spec import ModelConfig, Slot, expected

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor, as they are in memory."""

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|decoder\.version|masked_bias)$")
"""Buffers that old checkpoints carry and no forward pass reads."""

FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
"""Tensors [E, ...] of all experts, as transformers may write them."""


class Checkpoint:
    """Read access to all tensors of a folder, mapped from disk. Use as a context manager."""

    def __init__(self, folder: Path, experts: int = 0) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._where: dict[str, safe_open] = {}
        self._fused: dict[str, tuple[str, int]] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged or cut short ({shown(error)}); download it again") from None
            self._where.update(dict.fromkeys(file.keys(), file))
        if experts:
            self._take_apart(experts)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _take_apart(self, experts: int) -> None:
        """Shows a tensor [experts, ...], `experts.NAME`, as one of each: `experts.0.NAME.weight` and so on."""
        for name in [name for name in self._where if FUSED.search(name)]:
            if len(shape := self.shape(name)) == 3 and shape[0] == experts:
                file = self._where.pop(name)
                apart = {FUSED.sub(rf".experts.{e}.\1.weight", name): (name, e) for e in range(experts)}
                self._where.update(dict.fromkeys(apart, file))
                self._fused.update(apart)

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, expert = self._fused.get(name, (name, None))
        shape = tuple(self._where[name].get_slice(stored).get_shape())
        return shape if expert is None else shape[1:]

    def stored_as(self, name: str) -> str:
        stored, _ = self._fused.get(name, (name, None))
        return str(self._where[name].get_slice(stored).get_dtype())

    def read(self, name: str) -> Tensor:
        """The tensor as stored; its memory belongs to the file, so copy what is to stay."""
        stored, expert = self._fused.get(name, (name, None))
        file = self._where[name]
        return file.get_tensor(name) if expert is None else file.get_slice(stored)[expert]


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
    share: Share | None = None,
) -> dict[str, Tensor]:
    """The decoder's tensors by our names, in `dtype`, each with memory of its own; of `share` only what it holds.

    Raises ValueError naming tensors that are missing, unexpected or of another shape or type than config.json implies.
    """
    with Checkpoint(folder, config.experts.count if config.experts else 0) as checkpoint:
        slots = expected(config)
        sources = _sources(config, slots, checkpoint.names)
        _check(folder, checkpoint, slots, sources)
        weights: dict[str, Tensor] = {}
        shared: dict[tuple[str, ...], Tensor] = {}
        to_come = {sources[name]: slot.count * dtype.itemsize for name, slot in slots.items()}
        read, total = 0, sum(to_come.values())
        for name, slot in slots.items():
            if share is None or share.holds(name):
                if sources[name] not in shared:
                    rows = _rows(config, name, share)
                    shared[sources[name]] = _fuse(checkpoint, slot, sources[name], dtype, rows)
                    _check_finite(folder, shared[sources[name]], sources[name])
                weights[name] = shared[sources[name]]
            size = to_come.pop(sources[name], 0)
            read += size
            if progress is not None and size:
                progress(read, total)
    if config.tied and "head.weight" in weights and torch.equal(weights["head.weight"], weights["embed.weight"]):
        weights["head.weight"] = weights["embed.weight"]
    return weights


def _sources(config: ModelConfig, slots: dict[str, Slot], present: set[str]) -> dict[str, tuple[str, ...]]:
    """Our tensor -> the checkpoint's tensors that make it, with the prefix that most of them have there."""
    family = FAMILIES[config.architecture]
    forms = [each(config) for each in (family.names, family.other_names) if each is not None]
    candidates = [
        {name: _source(names, name, prefix) for name in slots} for names in forms for prefix in family.prefixes
    ]
    found = max(candidates, key=lambda sources: sum(present.issuperset(group) for group in sources.values()))
    embed, head = found["embed.weight"], found["head.weight"]
    if config.tied and not present.issuperset(head):
        found["head.weight"] = embed
    elif config.tied and not present.issuperset(embed):
        found["embed.weight"] = head
    return found  # tied but both stored: both are read, and a head that differs stays its own, as transformers has it


def _source(names: Names, name: str, prefix: str) -> tuple[str, ...]:
    if name == "head.weight":
        return ("lm_head.weight",)
    module, kind = name.rsplit(".", 1)
    numbers = re.findall(r"\d+", module)
    theirs = names[re.sub(r"\d+", "{}", module)]
    return tuple(f"{prefix}{source.format(*numbers)}.{kind}" for source in theirs)


def _check(folder: Path, checkpoint: Checkpoint, slots: dict[str, Slot], sources: dict[str, tuple[str, ...]]) -> None:
    wanted = {source for name in slots for source in sources[name]}
    missing = sorted(wanted - checkpoint.names)
    unexpected = sorted(name for name in checkpoint.names - wanted if not HARMLESS.search(name))
    problems = [
        f"{label} {', '.join(map(shown, names[:5]))}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label, names in (("lacks", missing), ("has unexpected", unexpected))
        if names
    ]
    if not problems:
        problems = [text for name, slot in slots.items() for text in _misfits(checkpoint, slot, sources[name])][:5]
    if problems:
        raise ValueError(f"{folder}: the checkpoint does not match config.json: it {'; it '.join(problems)}")


def _misfits(checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...]) -> list[str]:
    found = []
    parts = slot.parts if len(sources) > 1 else (sum(slot.parts),)
    for source, rows in zip(sources, parts, strict=True):
        shape, kind = checkpoint.shape(source), checkpoint.stored_as(source)
        if shape != slot.shape(rows):
            found.append(f"has {shown(source)} of shape {list(shape)} where {list(slot.shape(rows))} is expected")
        if kind not in DTYPES:
            found.append(f"stores {shown(source)} as {kind}, supported: {', '.join(DTYPES)}")
    return found


def _fuse(
    checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...], dtype: torch.dtype, rows: Tensor | None
) -> Tensor:
    """The sources one after another, or of all their rows the ones numbered `rows`, in that order."""
    fused = torch.empty(slot.shape(sum(slot.parts) if rows is None else len(rows)), dtype=dtype)
    start = 0
    for source in sources:
        part = checkpoint.read(source)
        end = start + len(part)
        if rows is None:
            fused[start:end].copy_(part)
        else:
            here = (rows >= start) & (rows < end)
            fused[here] = part[rows[here] - start].to(dtype)
        start = end
    return fused


def _check_finite(folder: Path, tensor: Tensor, sources: tuple[str, ...]) -> None:
    """Refuses NaN and infinity, which make every answer empty or arbitrary. One pass: a finite sum has neither."""
    if torch.isfinite(tensor.sum(dtype=torch.float32)) or torch.isfinite(tensor).all():
        return
    raise ValueError(
        f"{folder}: {' or '.join(sources)} holds NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}; "
        f"download the weights again, or load them in another dtype"
    )


def _rows(config: ModelConfig, name: str, share: Share | None) -> Tensor | None:
    """Rows of the checkpoint's tensors that make ours, where that is not all of them in their order."""
    kept = share.rows(name) if share else None
    mine = None if kept is None else torch.cat([torch.arange(part.start, part.stop) for part in kept])
    qkv_rows = FAMILIES[config.architecture].qkv_rows
    if qkv_rows is None or ".qkv." not in name:
        return mine
    stored = torch.tensor(qkv_rows(config.attention))
    return stored if mine is None else stored[mine]
