"""The shipped model with a chat template that knows tools: what clients are tried on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "src/headrace/assets/tiny"


def make_model(folder: Path) -> Path:
    """A model folder like that of `tiny`, but for its template, which has tools in the Hermes form."""
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(HERE / "hermes.jinja", folder / "chat_template.jinja")
    return folder
