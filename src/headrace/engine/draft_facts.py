"""The draft model of the settings, as far as it is known before any weight is read. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.config import EngineConfig, Quantization
from headrace.config.speculation import METHODS
from headrace.engine.folders import model_folder
from headrace.models.plain_config import plain_config
from headrace.models.sizes import compute_type, kv_bytes_per_token, weight_bytes
from headrace.models.spec import ModelConfig
from headrace.types import UnsupportedModel, did_you_mean


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """compute: the type that it computes in, and keeps keys and values in. quantization: of its weights; those that are
    stored quantised stay as they are."""

    name: str
    folder: Path
    model: ModelConfig
    compute: str
    quantization: Quantization
    on_gpu: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> DraftFacts | None:
        """None where no model drafts. Raises ValueError, or UnsupportedModel, naming the setting, where there is no
        such model."""
        name = config.speculation.model
        if name is None:
            return None
        try:
            folder = model_folder(name)
            model = plain_config(folder)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"speculative: {error}") from None
        except ValueError as error:
            meant = did_you_mean(name, METHODS) or f"; {', '.join(METHODS)} need no model"
            raise ValueError(f"speculative: {error}{meant}") from None
        rounded: Quantization = config.model.quantization if model.stored is None else "none"
        return cls(name, folder, model, compute_type(model, config.model.dtype), rounded, config.model.on_gpu)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model, self.compute, self.quantization, on_gpu=self.on_gpu)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a token of the pool, beside the model's own."""
        return kv_bytes_per_token(self.model.attention, self.compute, "auto")

    def bytes_beside(self, config: EngineConfig, here: int) -> int:
        """The same for each token of one rank's pool, where `here` ranks share this host and one of them, rank 0, has
        it for the tokens of all context ranks."""
        return -(-self.kv_bytes_per_token * config.ranks.context // here)

    def check(self, model: ModelConfig) -> None:
        """Raises ValueError where it cannot draft for `model`."""
        own = self.model
        if own.recurrent is not None:
            raise ValueError(
                f"speculative {self.name}: {own.architecture} has recurrent layers, whose states do not go back to "
                f"before a wrong draft; take a draft model without"
            )
        if not own.head:
            raise ValueError(f"speculative {self.name}: {own.architecture} has no head for text; take one that writes")
        if own.vocab_size != model.vocab_size:
            raise ValueError(
                f"speculative {self.name}: it has a vocabulary of {own.vocab_size:,} tokens, the model one of "
                f"{model.vocab_size:,}; take a smaller model of the model's own family"
            )
