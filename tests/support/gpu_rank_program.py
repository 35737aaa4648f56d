"""A worker rank whose device is none (tests.support.fake_device): the Triton kernels run in their interpreter."""

from __future__ import annotations

from headrace import device
from headrace.config import EngineConfig
from headrace.engine import ranks
from headrace.parallel import measure
from headrace.parallel.group import Group
from headrace.parallel.rank import Rank
from headrace.planner.machine import Machine
from tests.support.fake_device import FakeDevice

MACHINE = Machine(
    name="no device", cores=1, isa="interpreted", date="", linear_flops_s=1e9, attention_flops_s=((1, 1e9),),
    memory_bytes_s=1e9, link_bytes_s=1e9,
)  # fmt: skip
MAKER = f"{__name__}:make"


def make(config: EngineConfig, group: Group) -> Rank:
    """ranks.make, which measures nothing: in the interpreter that would take minutes."""
    device.use(FakeDevice())
    measure.take_part = lambda rank, tensor=1: MACHINE
    return ranks.make(config, group)
