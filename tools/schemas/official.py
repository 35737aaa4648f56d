"""The official JSON-Schema-Test-Suite, from the sdist of the PyPI package `jsonschema`, fetched when it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILD = Path(__file__).parents[2] / "build" / "schemas"
VERSION = "4.26.0"
HASH = "sha256:0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")

OPTIONAL = ("optional/content.json", "format.json")
"""What the specification leaves open: contents of texts, and formats that are annotations alone."""

_DIALECTS = {
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A schema with instances: (value, whether it is valid)."""

    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...]


def fetched() -> Path:
    """The suite's folder. Raises CalledProcessError where it can neither be found nor fetched."""
    folder = BUILD / f"jsonschema-{VERSION}" / "json" / "tests"
    if not folder.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        wanted = BUILD / "requirements.txt"
        wanted.write_text(f"jsonschema=={VERSION} --hash={HASH}\n")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "jsonschema", "-q"]
        subprocess.run([*pip, "--require-hashes", "-r", str(wanted), "-d", str(BUILD)], check=True)
        with tarfile.open(BUILD / f"jsonschema-{VERSION}.tar.gz") as archive:
            archive.extractall(BUILD, filter="data")
    return folder


def groups(folder: Path) -> Iterator[Group]:
    for draft in DRAFTS:
        for path in sorted((folder / draft).rglob("*.json")):
            told = str(path.relative_to(folder / draft))
            if told in OPTIONAL:
                continue
            for number, group in enumerate(json.loads(path.read_text())):
                schema = group["schema"]
                if isinstance(schema, dict) and draft in _DIALECTS:
                    schema = {"$schema": _DIALECTS[draft], **schema}
                instances = tuple((test["data"], test["valid"]) for test in group["tests"])
                yield Group(f"{draft}/{told}#{number} {group['description']}", schema, instances)
