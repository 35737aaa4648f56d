"""Settings of the model and of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from headrace.config.fields import SettingsRecord, at_least, between, listed, setting
from headrace.kernels.registry import BACKENDS

DType = Literal["auto", "bfloat16", "float32"]
FLOAT16 = ("float16", "fp16", "half")
INSTEAD = ("bfloat16", "computed in bfloat16, which has the same size; float32 keeps all digits")
Quantization = Literal["none", "int8", "int4", "w8a8", "fp8_rowwise"]
BACKENDS_TOLD = [f"{name} ({entry.told})" for name, entry in reversed(BACKENDS.items())]

if TYPE_CHECKING:  # a type checker reads no computed Literal
    AttentionBackend = str
else:
    AttentionBackend = Literal["auto", *reversed(BACKENDS)]

MOST_THREADS = 1024
"""More than that a process may not have, and it helps none."""


@dataclass(frozen=True, slots=True)
class ModelSettings(SettingsRecord):
    title: ClassVar[str] = "Model and computing"

    folder: str = setting(
        "tiny",
        "Model folder, GGUF file or a downloaded name of the hub; 'tiny' is the shipped model.",
        "-m",
        name="model",
    )
    dtype: DType = setting(
        "auto",
        "Compute type: bfloat16, float32, or auto (the checkpoint's; float16 becomes bfloat16).",
        spellings={"bf16": "bfloat16", "fp32": "float32", "float": "float32"} | dict.fromkeys(FLOAT16, INSTEAD),
    )
    quantization: Quantization = setting(
        "none",
        "Weights rounded as they load: none, int8 (a scale per output), int4 (a scale per 64 inputs); w8a8: int8, "
        "and activations row by row, so that prompts are computed faster; fp8_rowwise: the same in FP8, "
        "of feed-forward layers alone, on a GPU.",
        common=True,
    )
    max_len: int | None = setting(
        None,
        "Longest sequence, prompt and answer together, in tokens, as 8192 or 128k.",
        unit="tokens",
        name="max_model_len",
        check=at_least(1),
        common=True,
    )
    backend: AttentionBackend = setting(
        "auto",
        f"Attention kernels: {listed(['auto', *BACKENDS_TOLD], 'or')}.",
        name="attention_backend",
    )
    chat_template: str | None = setting(
        None,
        "File with a chat template (Jinja) in place of the model's own.",
    )
    threads: int | None = setting(
        None,
        "CPU threads of the engine. Default: all cores that it may use (affinity, CPU quota).",
        check=between(1, MOST_THREADS),
        common=True,
    )

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on a GPU."""
        return self.backend == "triton"
