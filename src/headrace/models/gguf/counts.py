"""Numbers of a GGUF file that do not go together, refused by its own keys. Imports no torch."""

from __future__ import annotations

from headrace.models.gguf.facts import FileFacts
from headrace.types import UnsupportedModel

MULTIPLES = (
    ("attention.head_count", "attention.head_count_kv"),
    ("ssm.time_step_rank", "ssm.group_count"),
    ("expert_count", "expert_group_count"),
)
"""The first is a multiple of the second."""
AT_MOST = (("expert_used_count", "expert_count"), ("expert_group_used_count", "expert_group_count"))
"""The first is no more than the second."""


def check_counts(facts: FileFacts) -> None:
    """Raises UnsupportedModel. What the file does not say, and numbers of each layer, are looked at elsewhere."""
    pairs = list(MULTIPLES)
    if facts.value("attention.key_length") is None:
        pairs.append(("embedding_length", "attention.head_count"))
    for whole, part in pairs:
        if (found := _both(facts, whole, part)) and found[0] % found[1]:
            _refuse(facts, whole, part, "is not a multiple of")
    for part, whole in AT_MOST:
        if (found := _both(facts, part, whole)) and found[0] > found[1]:
            _refuse(facts, part, whole, "is more than")
    rotated = facts.value("rope.dimension_count")
    if isinstance(rotated, int) and rotated % 2:
        told = f"{facts.prefix}rope.dimension_count {rotated} is odd, and elements are rotated in pairs"
        raise UnsupportedModel(f"{facts.file.path}: {told}; download it again")


def _both(facts: FileFacts, *names: str) -> tuple[int, ...] | None:
    """Both numbers, if the file has both and neither is 0."""
    found = tuple(facts.value(name) for name in names)
    return found if all(isinstance(each, int) and each > 0 for each in found) else None


def _refuse(facts: FileFacts, one: str, other: str, how: str) -> None:
    told = f"{facts.prefix}{one} {facts.value(one)} {how} {facts.prefix}{other} {facts.value(other)}"
    raise UnsupportedModel(f"{facts.file.path}: {told}; download it again")
