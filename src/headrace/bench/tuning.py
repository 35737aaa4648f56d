"""The options of `headrace tune`; tune.py measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.benchmark import MODEL_HELP, a_model, option, token_counts
from headrace.config import EngineConfig
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.bench.prefill_links import RankLink


@dataclass
class Tuning:
    """Search the best split of long prompts over ranks; writes a table.

    The engine reads it with --parallel-table. Interrupted, the same command goes on where it was.
    """

    model: str = option(MODEL_HELP, argument=True, parse=a_model)
    path: Path = option("The table; what it holds already is kept and gone on with.", flags=("--out",))
    ranks: int = option("Context ranks to tune for.", 2, flags=("--ranks", "--context-parallel-size", "-cp"))
    tokens: tuple[int, ...] = option(
        "Lengths of prompts to search at, by commas; between them shares are interpolated.",
        "2048,8192,16384",
        parse=token_counts,
    )
    repeats: int = option("Prefills of each point, of which the median counts.", 2, min=1)
    stride: int = option("Tokens between two bounds that are tried.", CHUNK, rare=True)
    heuristic: bool = option("Also fit h(T, P), for --strategy-rule heuristic.", False)
    threads: int | None = option("Threads of each rank, as the engine will have. Default: its part.", None, min=1)
    dtype: str = option("Compute type, as the engine will have: bfloat16, float32, auto.", "auto")
    bandwidth: float | None = option(
        "GB/s to limit each link to, for experiments; the engine refuses the table.", None, rare=True
    )
    latency_ms: float = option("Milliseconds that each message takes longer, likewise.", 0.0, rare=True)

    def __post_init__(self) -> None:
        """Raises ValueError naming the option."""
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}: one rank has nothing to tune")
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")
        least = self.ranks * max(self.stride, CHUNK)
        if not self.tokens or min(self.tokens) < least:
            raise ValueError(f"tokens must be at least {least} for {self.ranks} ranks, got {list(self.tokens)}")
        if self.path.is_dir():
            raise ValueError(f"out must be a file, {self.path} is a folder")
        from headrace.bench.prefill_links import RankLink  # imports torch: what is wrong is told before

        self.link: RankLink = RankLink(self.bandwidth, self.latency_ms / 1e3)

    def config(self) -> EngineConfig:
        from headrace.bench.prefill_grid import prefill_config

        return prefill_config(self.model, self.ranks, max(self.tokens), self.threads, self.dtype)
