"""Experts in a file: whether the settings ask for it, how much stays in memory, and the speed to expect. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.footprint import Footprint, gib
from headrace.host import GIB
from headrace.models.sizes import compute_type, expert_bytes
from headrace.models.spec import ModelConfig


@dataclass(frozen=True, slots=True)
class ExpertsOutside:
    """Experts of one rank that lie in a file in `folder`. weights: bytes of all weights of the rank; outside: of the
    experts; kept: of these, what memory keeps; chosen: share of the experts that a token meets."""

    folder: str
    weights: int
    outside: int
    kept: int
    chosen: float

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, free: int | None = None) -> ExpertsOutside | None:
        """None where all weights lie in memory. Raises ValueError for a model that has no experts to leave out."""
        if config.experts.path is not None and model.experts is None:
            raise ValueError(f"expert_offload_path: {model.architecture} has no experts; leave it out")
        if config.expert_folder is None or model.experts is None:
            return None
        taken = Footprint.of(config, model, free)
        compute = compute_type(model, config.model.dtype)
        outside = expert_bytes(model, compute, config.model.quantization, config.ranks.tensor)
        experts = model.experts
        return cls(
            config.expert_folder, taken.rank_weights(), outside, taken.kept_experts(), experts.chosen / experts.count
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts that a token meets."""
        return int(self.outside * self.chosen)

    @property
    def hits(self) -> float:
        """Share of them expected in memory: what is kept, as if all were used alike. Uneven use makes it more."""
        return min(1.0, self.kept / self.outside)

    def seconds(self, read_rate: float) -> float:
        """Of reading what a token meets from the disk, at so many bytes a second."""
        return self.token_bytes * (1 - self.hits) / read_rate

    def told(self, read_rate: float) -> str:
        """One line for people."""
        seconds = self.seconds(read_rate)
        speed = f"at least {1 / seconds:,.3g} tokens/s of one sequence" if seconds else "no reads while decoding"
        return (
            f"{gib(self.weights)} of weights; {gib(self.outside)} of them are experts in a file in {self.folder}, of "
            f"which memory keeps {gib(self.kept)}; a token meets {self.token_bytes / GIB:.3f} GiB, "
            f"{self.hits:.0%} of it in memory, at {read_rate / 1e9:.2f} GB/s from the disk: {speed}"
        )
