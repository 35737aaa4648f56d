"""Who may import whom (docs/architecture.md), read from the sources without running them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SOURCE = Path(__file__).parents[2] / "src"
BASE = {
    "arrival",
    "errors",
    "structured",
    "texts",
    "types",
    "pooling",
    "outputs",
    "cgroups",
    "version",
    "stats",
    "strategies",
    "config",
    "logs",
    "files",
    "cores",
    "host",
    "memory",
    "device",
    "progress",
}
CORE = BASE | {"kernels.registry", "kernels.records", "kernels", "kv", "attention"}
BELOW_ENGINE = CORE | {"models", "planner", "parallel", "offload", "assets"}

MAY_IMPORT = {
    "arrival": set(),
    "errors": set(),
    "structured": {"errors"},
    "texts": {"errors"},
    "types": {"errors", "structured", "texts"},
    "pooling": set(),
    "outputs": {"types"},
    "version": set(),
    "stats": {"types"},
    "strategies": set(),
    "kernels.registry": set(),
    "config": {"types", "strategies", "kernels.registry"},
    "memory": set(),
    "device": {"memory"},
    "progress": {"types"},
    "logs": set(),
    "files": set(),
    "cgroups": set(),
    "cores": {"cgroups"},
    "host": {"cgroups"},
    "console": BASE,
    "assets": BASE,
    "kernels.records": {"types"},
    "kernels": BASE | {"kernels.records", "kernels.registry"},
    "kv": BASE | {"kernels.records"},
    "planner": BASE,
    "attention": BASE | {"kernels.records", "kernels", "kv"},
    "models": CORE,
    "parallel": CORE | {"models", "planner"},
    "offload": CORE | {"models", "planner"},
    "engine": BELOW_ENGINE | {"console"},
    "server": BELOW_ENGINE | {"engine"},
    "bench": BELOW_ENGINE | {"engine", "console"},
    "doctor": BELOW_ENGINE | {"engine", "server"},
    "cli": BELOW_ENGINE | {"engine", "server", "console", "bench", "doctor"},
}
"""Room -> rooms it may import, besides itself. The package's own __init__ may import anything."""

OFFLOAD_PARTS: dict[str, set[str]] = {
    "tiers": set(), "weights": set(), "restore": {"tiers"}, "streaming": {"weights"},
}  # fmt: skip
"""Part of the room offload -> parts it may import, besides itself and what lies beside the parts."""

TORCH = {"torch", "transformers", "safetensors"}
TORCH_FREE = ("headrace.types", "headrace.progress", "headrace.stats", "headrace.strategies", "headrace.config",
              "headrace.kv", "headrace.kernels.registry",
              "headrace.planner", "headrace.attention.plan", "headrace.engine.scheduler", "headrace.bench.registry",
              "headrace.bench.tuning", "headrace.engine.stored_prefixes", "headrace.engine.preflight",
              "headrace.engine.torchrun", "headrace.parallel.torchrun_environment")  # fmt: skip
NEEDS_TORCH = ("headrace.kv.storage", "headrace.kv.chunk_copies")


def modules() -> dict[str, Path]:
    """Every module of the package by name."""
    found = {}
    for path in sorted(SOURCE.glob("headrace/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    """headrace.kv.tree -> kv; kernels.records and kernels.registry are rooms of their own; '' is the package itself."""
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


def test_arrows() -> None:
    """Each module imports from its own room and from those that MAY_IMPORT names for it."""
    unknown = sorted({room(module) for module in MODULES if room(module)} - set(MAY_IMPORT))
    assert not unknown, f"rooms without an entry in MAY_IMPORT: {', '.join(unknown)}"
    wrong = [
        f"{module} imports {name}: {room(module)} -> {room(name)} is no arrow"
        for module in MODULES
        if room(module)
        for name in imports(module)
        if name in MODULES and room(name) and room(name) not in MAY_IMPORT[room(module)] | {room(module)}
    ]
    assert not wrong, "\n".join(wrong)


def test_arrows_within_offload() -> None:
    def part(name: str) -> str:
        return name.removeprefix("headrace.offload.").split(".")[0] if name.startswith("headrace.offload.") else ""

    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if part(module) in OFFLOAD_PARTS
        for name in imports(module)
        if part(name) in OFFLOAD_PARTS.keys() - OFFLOAD_PARTS[part(module)] - {part(module)}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    """Nor in a circle of several, with the imports inside functions and those for types counted."""
    graph = {module: {name for name in imports(module) if name in MODULES} - {module} for module in MODULES}
    assert circle(graph) is None, " -> ".join(circle(graph) or [])


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Modules each of which imports the next, the first and last being the same; None where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # it lists the imported one first
    return None


def test_a_circle_is_found_and_told() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    found = circle(graph) or []
    assert set(found) == {"a", "b", "c"} and all(name in graph[module] for module, name in pairwise(found))
    assert circle({"a": {"b"}, "b": set()}) is None


def test_only_the_command_line_imports_typer() -> None:
    users = {room(module) for module in MODULES if any(name.split(".")[0] == "typer" for name in imports(module))}
    assert users == {"cli"}


def test_imports_no_torch() -> None:
    chains = [chain_to_torch(module, set()) for module in MODULES if is_torch_free(module)]
    assert not any(chains), "\n".join(" -> ".join(chain) for chain in chains if chain)


def test_no_torch_when_run() -> None:
    """The same, by importing them all."""
    wanted = [name for name in MODULES if is_torch_free(name)]
    code = f"import sys, {', '.join(wanted)}; print(*sorted({TORCH} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
