"""What a folder says about embeddings: sentence-transformers' files, and how they may be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.pooling import read_pooling
from headrace.pooling import Pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLS = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZES = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def folder(path: Path, modules: Any = None, pooling: Any = None, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (path / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "want"),
    [
        (None, None, {}, Pooling()),
        (None, {"pooling_mode_mean_tokens": True}, {}, Pooling("mean")),
        ([TRANSFORMER, POOLS], {"pooling_mode_lasttoken": True}, {}, Pooling("last", False)),
        ([TRANSFORMER, POOLS, NORMALIZES], {"pooling_mode_cls_token": True}, {}, Pooling("cls", True)),
        ([TRANSFORMER, POOLS, NORMALIZES], {"pooling_mode": "mean"}, {}, Pooling("mean", True)),
        (None, None, {"matryoshka_dimensions": [512, 64]}, Pooling(sizes=(64, 512))),
        (None, None, {"is_matryoshka": True}, Pooling(sizes=())),
    ],
)
def test_what_a_folder_says(tmp_path: Path, modules: Any, pooling: Any, config: Any, want: Pooling) -> None:
    assert read_pooling(folder(tmp_path, modules, pooling, **config)) == want


@pytest.mark.parametrize(
    ("modules", "pooling", "told"),
    [
        ([TRANSFORMER, POOLS, DENSE], {"pooling_mode_mean_tokens": True}, "Dense, which is not implemented"),
        ([TRANSFORMER], None, "0 modules for pooling"),
        ([TRANSFORMER, POOLS], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "one at a time"),
        ([TRANSFORMER, POOLS], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ([TRANSFORMER, POOLS], {}, "asks for nothing"),
        ([TRANSFORMER, POOLS], None, "does not exist"),
        ([TRANSFORMER, {**POOLS, "path": "../1_Pooling"}], {}, "no folder of the model"),
        ([TRANSFORMER, {**POOLS, "path": 7}], {}, "no folder of the model"),
        ("{", None, "cannot be read"),
        ("[1]", None, "list of modules"),
        ("{}", None, "list of modules"),
    ],
)
def test_what_cannot_be_is_an_obstacle(tmp_path: Path, modules: Any, pooling: Any, told: str) -> None:
    assert told in read_pooling(folder(tmp_path, modules, pooling)).obstacle
