"""Who may import whom (DESIGN, section 4), read from the sources without running them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SOURCE = Path(__file__).parents[2] / "src"
BASE = {"types", "config", "logs", "files", "cores", "host", "memory"}
CORE = BASE | {"kernels", "kv", "attention"}
BELOW_ENGINE = CORE | {"models", "planner", "parallel", "offload", "assets"}

MAY_IMPORT = {
    "types": set(),
    "config": {"types"},
    "memory": set(),
    "logs": set(),
    "files": set(),
    "cores": set(),
    "host": set(),
    "console": BASE,
    "assets": BASE,
    "kernels": BASE,
    "kv": BASE,
    "planner": BASE,
    "attention": BASE | {"kernels", "kv"},
    "models": CORE,
    "parallel": CORE | {"models", "planner"},
    "offload": CORE | {"models", "planner"},
    "engine": BELOW_ENGINE,
    "server": BELOW_ENGINE | {"engine"},
    "bench": BELOW_ENGINE | {"engine", "console"},
    "cli": BELOW_ENGINE | {"engine", "server", "console", "bench"},
}
"""Room -> rooms it may import, besides itself. The package's own __init__ may import anything."""

OFFLOAD_PARTS: dict[str, set[str]] = {
    "tiers": set(), "weights": set(), "restore": {"tiers"}, "streaming": {"weights"},
}  # fmt: skip
"""Part of the room offload -> parts it may import, besides itself and what lies beside the parts."""

TORCH = {"torch", "transformers", "safetensors"}
TORCH_FREE = ("headrace.types", "headrace.config", "headrace.kv", "headrace.planner", "headrace.attention.plan",
              "headrace.engine.scheduler", "headrace.engine.stored_prefixes")  # fmt: skip
NEEDS_TORCH = ("headrace.kv.storage",)


def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    found = {}
    for path in sorted(SOURCE.glob("headrace/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """headrace.kv.tree -> kv; headrace.kernels.state has a room of its own; '' is the package itself."""
    inner = module.removeprefix("headrace").removeprefix(".")
    return inner if inner in MAY_IMPORT else inner.split(".")[0]


def names(node: ast.Import | ast.ImportFrom, module: str) -> Iterator[str]:
    """Modules that an import statement in `module` names, in full; `from package import module` counts as both."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, *filter(None, [base])])
    inner = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES]
    if len(inner) < len(node.names):
        yield base
    yield from inner


def statements(body: list[ast.stmt], *, at_import: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; with at_import only those that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
            continue
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if at_import and deferred:
            continue
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, [])
            if not (at_import and for_types and name == "body"):
                parts = [
                    part.body if hasattr(part, "body") and name in ("handlers", "cases") else [part] for part in inner
                ]
                yield from statements([child for part in parts for child in part], at_import=at_import)


@cache
def imports(module: str, at_import: bool = False) -> tuple[str, ...]:
    tree = ast.parse(MODULES[module].read_text())
    return tuple(name for node in statements(tree.body, at_import=at_import) for name in names(node, module))


def chain_to_torch(module: str, seen: set[str]) -> list[str] | None:
    """How importing `module` brings in torch, module by module; None if it does not."""
    seen.add(module)
    parent = module.rpartition(".")[0]
    for name in (*imports(module, at_import=True), *([parent] if parent else [])):
        if name.split(".")[0] in TORCH:
            return [module, name]
        if name in MODULES and name not in seen and (chain := chain_to_torch(name, seen)):
            return [module, *chain]
    return None


def is_torch_free(module: str) -> bool:
    inside = any(module == name or module.startswith(name + ".") for name in TORCH_FREE)
    return inside and module not in NEEDS_TORCH


@pytest.mark.parametrize("module", [name for name in MODULES if room(name)])
def test_arrows(module: str) -> None:
    mine = room(module)
    assert mine in MAY_IMPORT, f"{module} is in no room: add '{mine}' to MAY_IMPORT"
    named = {name for name in imports(module) if name.split(".")[0] == "headrace" and room(name)}
    wrong = sorted(name for name in named if room(name) != mine and room(name) not in MAY_IMPORT[mine])
    assert not wrong, f"{module} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("headrace.offload.")])
def test_arrows_within_offload(module: str) -> None:
    def part(name: str) -> str:
        return name.removeprefix("headrace.offload.").split(".")[0]

    mine = part(module)
    named = {part(name) for name in imports(module) if name.startswith("headrace.offload.")} & OFFLOAD_PARTS.keys()
    assert mine not in OFFLOAD_PARTS or named <= OFFLOAD_PARTS[mine] | {mine}


@pytest.mark.parametrize("module", [name for name in MODULES if is_torch_free(name)])
def test_imports_no_torch(module: str) -> None:
    chain = chain_to_torch(module, set())
    assert chain is None, " -> ".join(chain or [])


def test_no_torch_when_run() -> None:
    """The same, by importing them all."""
    wanted = [name for name in MODULES if is_torch_free(name)]
    code = f"import sys, {', '.join(wanted)}; print(*sorted({TORCH} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
