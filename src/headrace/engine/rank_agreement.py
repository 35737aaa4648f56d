"""Ranks meet: what each finds on its own host and all must have in common (the model, its adapters, what computes), and
links for tensors on GPUs.

Settings are rank 0's for all. Files are read by each rank where it is, and of two hosts one may have another copy.
"""

from __future__ import annotations

import logging

from headrace.config import EngineConfig
from headrace.engine.adapters import read_adapters
from headrace.engine.capacity import model_folder
from headrace.kernels import cpu
from headrace.logs import shown
from headrace.models.adapter_files import AdapterFacts
from headrace.offload.identity import model_sample
from headrace.parallel import devices
from headrace.parallel.group import Group, each_says
from headrace.version import __version__

log = logging.getLogger(__name__)


def connect(config: EngineConfig, group: Group) -> str:
    """Gives a rank on a GPU its device, and the group links for its tensors; what they are, empty on a CPU. Raises
    ValueError for ranks that do not fit together."""
    check_alike(config, group)
    if not config.model.on_gpu:
        return ""
    devices.claim(group.rank)
    return devices.connect(group, config.ranks.transport, config.ranks.interface)


def check_alike(config: EngineConfig, group: Group) -> None:
    """Every rank calls it. Raises ValueError on all of them where one has another model or other adapters than rank 0;
    says where one computes by other instructions, so that bits depend on who computes."""
    folder = config.model.folder
    _must_agree(group, "model", model_sample(model_folder(folder)).hex(), f"the model {shown(folder)}")
    for number, facts in enumerate(read_adapters(config)):
        _must_agree(group, f"adapter/{number}", facts.digest.hex(), _named(facts))
    if not config.model.on_gpu:  # of GPUs: parallel.devices
        _say_what_computes(group)


def _named(facts: AdapterFacts) -> str:
    return f"the adapter {shown(repr(facts.name))}, {shown(facts.folder)}"


def _must_agree(group: Group, key: str, value: str, what: str) -> None:
    others = _others(group, key, value)
    if others:
        each = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        raise ValueError(f"{each} other files than rank 0 of {what}: copy its folder to every host")


def _say_what_computes(group: Group) -> None:
    isa = cpu.isa() if cpu.available() else "torch alone"
    others = _others(group, "computes on", f"{isa}, headrace {__version__}")
    if others and group.rank == 0:
        log.warning(
            "ranks %s compute by other instructions or another version than rank 0 (%s): bits depend on which rank "
            "computes; set HEADRACE_ISA alike on all hosts, and install one version",
            ", ".join(map(str, others)), isa,
        )  # fmt: skip


def _others(group: Group, key: str, value: str) -> list[int]:
    """The ranks that say something else than rank 0."""
    first, *each = each_says(group, key, value)
    return [rank for rank, other in enumerate(each, 1) if other != first]
