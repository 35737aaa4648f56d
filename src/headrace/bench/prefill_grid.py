"""What the benchmarks of single prefills share: a grid of ranks, links, new and cached tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.benchmark import Benchmark
from headrace.bench.shapes import SHAPES, checkpoint
from headrace.bench.table import Column
from headrace.config import EngineConfig
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.bench.prefill_links import RankLink
    from headrace.bench.prefill_testbed import PrefillTestbed
    from headrace.planner.tuned_table import TunedTable

RANKS_HELP = "Numbers of ranks, by commas."
TOKENS_HELP = "New tokens, by commas, as 2048,8k."
CACHED_HELP = "Cached tokens before them, by commas: multiples of 64."
BANDWIDTH_HELP = "GB/s of each link between two ranks, by commas; 'none': as fast as it goes."
LATENCY_HELP = "Milliseconds that each message takes longer."
LINK_HELP = "limited: delayed in the ranks. netns: network namespaces limited by tc (root)."
THREADS_HELP = "Threads of each rank."
DTYPE_HELP = "Compute type: bfloat16, float32, auto."


CELL = (
    Column("ranks", form="d", width=5),
    Column("link", lambda case: link_text(case["bandwidth_gbps"]), "GB/s", width=5),
    Column("prompt", "tokens", "tokens", ",", width=6),
    Column("cached", "cached", "tokens", ",", width=6),
)
"""Where a prefill is measured."""


def link_text(gbps: float | None) -> str:
    return "as is" if gbps is None else f"{gbps:g}"


class PrefillGrid(Benchmark):
    """Its subclasses declare these fields, each with its own default."""

    model: str
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    cached: tuple[int, ...]
    bandwidth: tuple[float | None, ...]
    latency_ms: float
    jitter: float = 0.0
    link: str
    threads: int
    dtype: str
    table: Path | None

    def __post_init__(self) -> None:
        """Raises ValueError naming the option."""
        for name, low in (("ranks", 2), ("tokens", 1), ("cached", 0)):
            given = getattr(self, name)
            if not given or min(given) < low:
                raise ValueError(f"{name} must be one or more integers of at least {low}, got {list(given)}")
        odd = [count for count in self.cached if count % CHUNK]
        if odd:
            raise ValueError(f"cached must be multiples of {CHUNK}, the length of a chunk, got {odd[0]}")
        for name in ("links", "tuned"):  # what they refuse is told before ranks are started
            getattr(self, name)

    @cached_property
    def links(self) -> tuple[RankLink, ...]:
        from headrace.bench.prefill_links import RankLink

        return tuple(RankLink(gbps, self.latency_ms / 1e3, self.jitter) for gbps in self.bandwidth)

    @cached_property
    def tuned(self) -> TunedTable | None:
        from headrace.planner.tuned_table import load_table

        return None if self.table is None else load_table(self.table)

    def testbeds(self) -> Iterator[PrefillTestbed]:
        """A testbed for each number of ranks, behind each link."""
        import msgspec

        from headrace.bench import prefill_testbed

        longest = max(self.tokens) + max(self.cached)
        for ranks in self.ranks:
            config = prefill_config(self.model, ranks, longest, self.threads, self.dtype)
            with prefill_testbed.open_testbed(config, netns=self.link == "netns") as testbed:
                figures = msgspec.to_builtins(testbed.machine)
                self.machine[f"profile_{ranks}_ranks"] = figures
                self.note(figures)
                testbed.check_table(self.tuned)
                for link in self.links:
                    testbed.set_link(link)
                    yield testbed

    def case_count(self) -> int:
        return len(self.ranks) * len(self.bandwidth) * len(self.tokens) * len(self.cached)

    def note(self, profile: dict[str, Any]) -> None:
        """Adds further figures of the machine, whose profile this is."""


def link_bandwidths(name: str, text: str) -> tuple[float | None, ...]:
    """GB/s by commas, 'none' for unlimited. Raises ValueError naming the option."""
    found = []
    for part in text.split(","):
        try:
            found.append(None if part.strip() == "none" else float(part))
        except ValueError:
            raise ValueError(f"{name} must be GB/s by commas, or 'none', got {part!r}") from None
    return tuple(found)


def prefill_config(model: str, ranks: int, longest: int, threads: int | None, dtype: str = "auto") -> EngineConfig:
    """`model`: a folder, 'tiny', or a random-weight shape. Raises ValueError where prompts are too long."""
    from headrace.engine.capacity import model_folder
    from headrace.models.config import read_config

    if model in SHAPES and not Path(model).is_dir():
        model = str(checkpoint(model))
    context = read_config(model_folder(model)).max_model_len
    if longest > context:
        raise ValueError(f"tokens and cached make {longest} together, the model's context is {context}: ask for less")
    rounded = -(-longest // CHUNK) * CHUNK
    return EngineConfig(
        model=model,
        context_parallel_size=ranks,
        kv_cache_tokens=rounded,
        threads=threads,
        dtype=dtype,
    )
