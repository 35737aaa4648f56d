"""Every module of the package can be imported by itself."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import headrace

pytestmark = pytest.mark.unit

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(headrace.__path__, "headrace.")
    if not info.name.endswith("__main__") and not info.name.rpartition(".")[2].startswith("_cpu")
)


@pytest.mark.parametrize("name", MODULES)
def test_import(name: str) -> None:
    importlib.import_module(name)
