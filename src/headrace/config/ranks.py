"""Settings of several ranks: how many, who starts them, how they talk and how they share a prompt."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.config.fields import SettingsRecord, at_least, need, seconds, setting
from headrace.strategies import OFFERED, STRATEGIES, PrefillStrategy

DistributedBackend = Literal["mp", "ray"]
RankTransport = Literal["auto", "nccl", "host"]
StrategyRule = Literal["cost", "alg1", "alg5", "heuristic"]
INTERFACE, TIMEOUT_S = "127.0.0.1", 10.0


def _one_interface(name: str, value: Any) -> None:
    try:
        given = ipaddress.IPv4Address(value)
    except ValueError:
        raise ValueError(f"{name} must be an IPv4 address, got {value!r}") from None
    if given.is_unspecified or given.is_multicast:
        raise ValueError(f"{name} must be the address of one interface, got {value}")


@dataclass(frozen=True, slots=True)
class RankSettings(SettingsRecord):
    prefix: ClassVar[str] = "rank_"
    title: ClassVar[str] = "Ranks"

    context: int = setting(
        1,
        "Ranks that share the tokens of a sequence and its KV cache.",
        "-cp",
        name="context_parallel_size",
        check=at_least(1),
        common=True,
    )
    tensor: int = setting(
        1,
        "Ranks that share the weights, within each context rank.",
        "-tp",
        name="tensor_parallel_size",
        check=at_least(1),
    )
    launcher: DistributedBackend = setting(
        "mp",
        "Who starts the ranks: mp (this process, or torchrun where it did) or ray (a Ray cluster).",
        name="distributed_backend",
    )
    strategy: PrefillStrategy = setting(
        "auto",
        "How several ranks compute a prompt: auto (as the planner says), "
        + ", ".join(f"{name} ({STRATEGIES[name].summary})" for name in OFFERED)
        + ".",
        name="prefill_strategy",
    )
    rule: StrategyRule = setting(
        "cost",
        "How the planner chooses: cost (predicted time), or between the rings alg1, alg5 or heuristic.",
        name="strategy_rule",
        rare=True,
    )
    table: str | None = setting(
        None, "Table that `headrace tune` wrote for this machine, model and group.", name="parallel_table"
    )
    interface: str = setting(
        INTERFACE, "IPv4 address that ranks bind to talk to each other.", check=_one_interface, rare=True
    )
    transport: RankTransport = setting(
        "auto",
        "How ranks on GPUs exchange tensors: nccl (each has a GPU to itself), host (through pinned memory), or auto "
        "(nccl where it can be).",
        rare=True,
    )
    timeout_s: float = setting(
        TIMEOUT_S, "Seconds of silence after which a rank counts as lost.", check=seconds, rare=True
    )

    def check_together(self) -> None:
        several = "several ranks: set context_parallel_size (-cp) or tensor_parallel_size (-tp)"
        for given, name in (
            (self.launcher != "mp", "distributed_backend"),
            (self.interface != INTERFACE, "rank_interface"),
            (self.transport != "auto", "rank_transport"),
            (self.timeout_s != TIMEOUT_S, "rank_timeout_s"),
        ):
            need(given, self.count > 1, name, several)
        context = "several context ranks: set context_parallel_size (-cp)"
        shared = self.strategy not in ("auto", "single")  # one rank computes every prompt by itself, as single asks
        need(shared, self.context > 1, f"prefill_strategy {self.strategy}", context)
        need(self.table is not None, self.context > 1, "parallel_table", context)
        need(self.rule != "cost", self.context > 1, "strategy_rule", context)
        need(
            self.rule != "cost",
            self.strategy == "auto",
            "strategy_rule",
            "a choice of the planner: leave out prefill_strategy",
        )

    @property
    def count(self) -> int:
        return self.context * self.tensor
