"""Weights from a checkpoint into the decoder's tensors (models.slots.expected): renamed, fused, converted, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels.formats import Coded
from headrace.logs import shown
from headrace.models.checkpoint import Checkpoint, open_checkpoint
from headrace.models.config import DTYPES
from headrace.models.families import family_of
from headrace.models.families.base import Family, Names
from headrace.models.files import is_gguf
from headrace.models.shards import Share
from headrace.models.sizes import EMBED, HEAD, HEAD_BIAS, LOOKED_UP
from headrace.models.slots import Slot, expected, expert_of, is_of_heads
from headrace.models.spec import CLASSIFIER, ModelConfig
from headrace.types import UnsupportedModel

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) after each tensor, as they are in memory."""

HARMLESS = re.compile(
    r"^mtp\.|(^|\.)(rotary_emb\.inv_freq|decoder\.version|masked_bias|rope_(freqs|factors_long|factors_short)\.weight|"
    r"input_scale|input_zero_point|activation_scale|[kv]_scale|act_fn\.(beta|eps))$"
)
"""Layers that guess further tokens; numbers of xIELU that are the same in all models; buffers that old checkpoints have
and no forward pass reads; what models.gguf.architectures has read; scales of activations, which are not rounded."""

FOLDER = (
    "the checkpoint does not match config.json",
    "download both again, or use the config.json that belongs to it",
)
FILE = "its tensors, called as in a model folder, do not match its metadata", "download it again"
"""What is told of tensors that are not as expected, and the remedy: of a folder, and of a GGUF file."""

AT_ONCE = 4096
"""Rows of codes that are multiplied out together."""


@dataclass(slots=True)
class StoredMatrix:
    """A matrix whose outputs, one part after another, lie in a file as codes under scales or as numbers, and are read
    when they are wanted: `read` gives the parts. coded: some part is codes. outputs: of the whole matrix, where this is
    a tensor rank's share of it."""

    shape: tuple[int, ...]
    read: Callable[[], list[Tensor | Coded]]
    coded: bool
    outputs: int | None = None

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The matrix multiplied out."""
        return torch.cat(
            [part.to(dtype) if isinstance(part, Tensor) else part.dequantised(dtype) for part in self.read()]
        )


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
    share: Share | None = None,
    stored: dict[str, StoredMatrix] | None = None,
    experts_later: bool = False,
    tables_later: bool = False,
) -> dict[str, Tensor]:
    """The decoder's tensors by our names, in `dtype`, each with memory of its own; of `share` only what it holds.

    stored: takes the matrices that are stored as codes, but for those that are looked up and those of each head;
    without it they too are multiplied out. experts_later: it takes the experts' matrices too, and none is read yet.
    tables_later: and what is looked up, if that is codes: a head that is the table too is one with it.

    Raises ValueError naming tensors that are missing, unexpected or of another shape or type than config.json implies.
    """
    with open_checkpoint(folder, config) as checkpoint:
        slots, family = expected(config), checkpoint.form(family_of(config.architecture, config.text_type))
        sources = _sources(config, family, slots, checkpoint.names)
        _check(folder, checkpoint, slots, sources, _unread(config, family))
        weights: dict[str, Tensor] = {}
        shared: dict[tuple[str, ...], Tensor] = {}  # by what they are made of, and their own name where that is a part
        coded = set() if stored is None else _codes(checkpoint, sources, tables_later)
        own_of = {name: sources[name] + ((name,) if slot.of else ()) for name, slot in slots.items()}
        to_come = {own_of[n]: _held(checkpoint, s, sources[n], dtype, n in coded) for n, s in slots.items()}
        read, total = 0, sum(to_come.values())
        for name, slot in slots.items():
            if share is None or share.holds(name):
                rows, own = rows_of(config, family, name, share), sources[name]
                later = experts_later and slot.columns and expert_of(name) is not None
                if stored is not None and name in coded:
                    both = name == HEAD and own == sources[EMBED] and EMBED in stored
                    stored[name] = stored[EMBED] if both else _stored(checkpoint, slot, own, rows)
                elif stored is not None and later:
                    stored[name] = _numbers_later(checkpoint, slot, own, dtype, rows)
                elif own_of[name] in shared:
                    weights[name] = shared[own_of[name]]
                else:
                    kept = torch.float32 if slot.wide else dtype
                    weights[name] = shared[own_of[name]] = _fuse(checkpoint, slot, own, kept, rows)
                    _check_finite(folder, weights[name], own)
            size = to_come.pop(own_of[name], 0)
            read += size
            if progress is not None and size:
                progress(read, total)
    if config.tied and HEAD in weights and EMBED in weights and torch.equal(weights[HEAD], weights[EMBED]):
        weights[HEAD] = weights[EMBED]
    return weights


def _codes(checkpoint: Checkpoint, sources: dict[str, tuple[str, ...]], tables: bool) -> set[str]:
    """Names of those that stay codes, as far as they are. tables: what is looked up, too."""
    return {
        name
        for name, own in sources.items()
        if (tables or name not in LOOKED_UP) and not is_of_heads(name) and any(map(checkpoint.is_coded, own))
    }


def _held(checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...], dtype: torch.dtype, coded: bool) -> int:
    """Bytes of a tensor in memory. coded: it stays codes, as far as it is."""
    if not coded:
        return slot.count * dtype.itemsize
    if slot.of:
        return checkpoint.held(sources[0]) * sum(slot.parts) // slot.of
    return sum(
        checkpoint.held(source) if checkpoint.is_coded(source) else math.prod(checkpoint.shape(source)) * dtype.itemsize
        for source in sources
    )


def _sources(
    config: ModelConfig, family: Family, slots: dict[str, Slot], present: set[str]
) -> dict[str, tuple[str, ...]]:
    """Our tensor -> the checkpoint's tensors that make it, with the prefix that most of them have there."""
    forms = [each(config) for each in (family.names, family.other_names) if each is not None]
    candidates = [
        {name: source_of(names, name, prefix) for name in slots} for names in forms for prefix in family.prefixes
    ]
    found = max(candidates, key=lambda sources: sum(present.issuperset(group) for group in sources.values()))
    if not config.head:
        return found
    embed, head = found[EMBED], found[HEAD]
    if config.tied and not present.issuperset(head):
        found[HEAD] = embed
    elif config.tied and not present.issuperset(embed):
        found[EMBED] = head
    return found  # tied but both stored: both are read, and a head that differs stays its own, as transformers has it


def source_of(names: Names, name: str, prefix: str) -> tuple[str, ...]:
    """The checkpoint's tensors, with that prefix, that make ours."""
    if name in (HEAD, HEAD_BIAS):  # of a text part that has a head of its own it stands there
        (head,), kind = names.get("head", ("lm_head",)), name.rpartition(".")[2]
        return (f"{prefix.removesuffix('model.') if prefix.endswith('.model.') else ''}{head}.{kind}",)
    if name == CLASSIFIER:
        return (CLASSIFIER,)
    module, kind = name.rsplit(".", 1)
    numbers = re.findall(r"\d+", module)
    if alone := names.get(re.sub(r"\d+", "{}", name)):
        return tuple(prefix + source.format(*numbers) for source in alone)
    theirs = names[module if module in names else re.sub(r"\d+", "{}", module)]
    return tuple(f"{prefix}{source.format(*numbers)}.{kind}" for source in theirs)


def _unread(config: ModelConfig, family: Family) -> tuple[str, ...]:
    """What names of tensors that nothing is computed from begin with."""
    unused = family.unused(config) if family.unused is not None else ()
    return (*family.unread, *(prefix + name for prefix in family.prefixes for name in unused))


def _check(
    folder: Path,
    checkpoint: Checkpoint,
    slots: dict[str, Slot],
    sources: dict[str, tuple[str, ...]],
    unread: tuple[str, ...],
) -> None:
    wanted = {source for name in slots for source in sources[name]}
    missing = sorted(wanted - checkpoint.names)
    beside = checkpoint.names - wanted
    unexpected = sorted(
        name
        for name in beside
        if not HARMLESS.search(name) and not name.startswith(unread) and not _adds_nothing(checkpoint, name)
    )
    problems = [
        f"{label} {', '.join(map(shown, names[:5]))}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label, names in (("lacks", missing), ("has unexpected", unexpected))
        if names
    ]
    if not problems:
        problems = [text for name, slot in slots.items() for text in _misfits(checkpoint, slot, sources[name])][:5]
    if problems:
        pair, remedy = FILE if is_gguf(folder) else FOLDER
        raise ValueError(f"{folder}: {pair}: it {'; it '.join(problems)}; {remedy}")


def _adds_nothing(checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is a bias of zeros, which tools that quantise have written beside matrices that have none."""
    module, _, kind = name.rpartition(".")
    beside = kind == "bias" and f"{module}.weight" in checkpoint.names and checkpoint.is_coded(f"{module}.weight")
    return beside and not checkpoint.read(name).any()


def _misfits(checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...]) -> list[str]:
    found = []
    parts = slot.rows_of(len(sources))
    for source, rows in zip(sources, parts, strict=True):
        shape, kind = checkpoint.shape(source), checkpoint.stored_as(source)
        if shape != slot.shape(rows):
            found.append(f"has {shown(source)} of shape {list(shape)} where {list(slot.shape(rows))} is expected")
        if checkpoint.is_coded(source):
            if slot.columns is None or slot.wide:
                found.append(f"stores the {'filter' if slot.filter else 'vector'} {shown(source)} as {kind}")
        elif kind not in DTYPES:
            found.append(f"stores {shown(source)} as {kind}, supported: {', '.join(DTYPES)}")
    return found


def _fuse(
    checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...], dtype: torch.dtype, rows: Tensor | None
) -> Tensor:
    """The sources one after another, or of all their rows the ones numbered `rows`, in that order."""
    return fused(slot, (_numbers(checkpoint, source, dtype) for source in sources), dtype, rows)


def fused(slot: Slot, parts: Iterable[Tensor], dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    """The parts of a tensor one after another, or of all their rows the ones numbered `rows`, in that order."""
    whole = torch.empty(slot.shape(sum(slot.parts) if rows is None else len(rows)), dtype=dtype)
    start = 0
    for part in parts:
        end = start + len(part)
        if rows is None:
            whole[start:end].copy_(part)
        else:
            here = (rows >= start) & (rows < end)
            whole[here] = part[rows[here] - start].to(dtype)
        start = end
    return whole


def _numbers(checkpoint: Checkpoint, source: str, dtype: torch.dtype) -> Tensor:
    """A tensor, in `dtype` where it is made of codes."""
    if not checkpoint.is_coded(source):
        return checkpoint.read(source)
    made = torch.empty(checkpoint.shape(source), dtype=dtype)
    for rows in torch.arange(len(made)).split(AT_ONCE):
        part = _part(checkpoint, source, rows)()
        made[rows] = part if isinstance(part, Tensor) else part.dequantised(dtype)
    return made


def _stored(checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...], rows: Tensor | None) -> StoredMatrix:
    """The sources one after another, or of all their rows the ones numbered `rows`, in that order."""
    readers = [_part(checkpoint, source, own) for source, own in _runs(checkpoint, sources, rows)]
    shape = slot.shape(sum(slot.parts) if rows is None else len(rows))
    return StoredMatrix(shape, lambda: [reader() for reader in readers], coded=True, outputs=sum(slot.parts))


def _numbers_later(
    checkpoint: Checkpoint, slot: Slot, sources: tuple[str, ...], dtype: torch.dtype, rows: Tensor | None
) -> StoredMatrix:
    """Those of a matrix of numbers, read and converted when they are wanted; as the file has them if that is how."""
    mapped = {source: checkpoint.read(source) for source in sources}

    def read() -> list[Tensor | Coded]:
        one = mapped[sources[0]]
        alone = len(sources) == 1 and rows is None and one.dtype == dtype
        whole = one if alone else fused(slot, [mapped[source] for source in sources], dtype, rows)
        _check_finite(checkpoint.model, whole, sources)
        return [whole]

    shape = slot.shape(sum(slot.parts) if rows is None else len(rows))
    return StoredMatrix(shape, read, coded=False, outputs=sum(slot.parts))


def _runs(checkpoint: Checkpoint, sources: tuple[str, ...], rows: Tensor | None) -> list[tuple[str, Tensor | None]]:
    """Where to find the rows numbered `rows`: source after source, each with rows of its own. None: all of them."""
    if rows is None:
        return [(source, None) for source in sources]
    sizes = torch.tensor([checkpoint.shape(source)[0] for source in sources])
    ends = sizes.cumsum(0)
    found, counts = torch.unique_consecutive(torch.bucketize(rows, ends, right=True), return_counts=True)
    runs = zip(found.tolist(), rows.split(counts.tolist()), strict=True)
    return [(sources[at], run - (ends - sizes)[at]) for at, run in runs]


def _part(checkpoint: Checkpoint, source: str, rows: Tensor | None) -> Callable[[], Tensor | Coded]:
    if not checkpoint.is_coded(source):
        whole = checkpoint.read(source)
        return lambda: whole if rows is None else whole[rows]
    read = checkpoint.coded(source, rows)

    def named() -> Coded:
        try:
            return read()
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{checkpoint.model}: {shown(source)}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{checkpoint.model}: {shown(source)}: {error}; download the weights again") from None

    return named


def _check_finite(folder: Path, tensor: Tensor, sources: tuple[str, ...]) -> None:
    """Refuses NaN and infinity, which make every answer empty or arbitrary. One pass: a finite sum has neither."""
    if torch.isfinite(tensor.sum(dtype=torch.float32)) or torch.isfinite(tensor).all():
        return
    raise ValueError(
        f"{folder}: {' or '.join(sources)} holds NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}; "
        f"download the weights again, or load them in another dtype"
    )


def rows_of(config: ModelConfig, family: Family, name: str, share: Share | None) -> Tensor | None:
    """Rows of the checkpoint's tensors that make ours, where that is not all of them in their order."""
    kept = share.rows(name) if share else None
    mine = None if kept is None else torch.cat([torch.arange(part.start, part.stop) for part in kept])
    order = None if family.rows is None else family.rows(config, name)
    if order is None and family.qkv_rows is not None and ".qkv." in name:
        order = family.qkv_rows(config)
    if order is None:
        return mine
    return torch.tensor(order) if mine is None else torch.tensor(order)[mine]
