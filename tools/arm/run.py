"""Builds the kernels for 64-bit ARM and runs kernel tests on them under emulation.

    python tools/arm/run.py [pytest arguments]

Needs Debian or a relative of it with the packages g++-aarch64-linux-gnu and qemu-user-static. Python for ARM and its
libraries come from the distribution's mirror, without a change to this system; torch and the rest from PyPI. All of it
stays in build/arm. Slow: an emulated instruction costs ten to fifty times a real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import nanobind
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TORCH = "torch==2.10.0"  # the last whose wheel for ARM on PyPI has no CUDA in it
WANTED = ("headrace", "hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")
TESTS = [str(path) for path in sorted((ROOT / "tests" / "cpu").glob("test_kernels*.py"))]


def command(*words: str | Path, **more: object) -> None:
    if subprocess.run(list(map(str, words)), **more).returncode:  # type: ignore[call-overload]
        sys.exit(f"failed: {' '.join(map(str, words))}")


def system() -> Path:
    """The root of an ARM system with Python in it."""
    root, state, cache = BUILD / "root", BUILD / "apt" / "state", BUILD / "apt" / "cache"
    if (root / "usr" / "bin" / PYTHON).exists():
        return root
    for folder in (state / "lists" / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True, exist_ok=True)
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": cache,
    }
    apt = ["apt-get", "-qq", "-y", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    command(*apt, "update")
    packages = (PYTHON, f"lib{PYTHON}-dev", "libgomp1", "libstdc++6")
    command(*apt, "--no-install-recommends", "--download-only", "install", *packages)
    for package in sorted((cache / "archives").glob("*.deb")):
        command("dpkg-deb", "-x", package, root)
    return root


def closure(names: tuple[str, ...]) -> dict[str, str]:
    """The distributions that these need, in the versions that are installed here."""
    found: dict[str, str] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = version(name)
        needs = map(Requirement, requires(name) or ())
        todo += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def packages() -> Path:
    """The folder with torch and what the tests need."""
    site = BUILD / "site"
    if site.exists():
        return site
    known = closure(WANTED)
    wanted = [TORCH, *(f"{name}=={known[name]}" for name in sorted(known) if name not in ("headrace", "torch"))]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 37)] + [
        "--platform=manylinux2014_aarch64"
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command(*pip, "--only-binary=:all:", *platforms, "--target", BUILD / "site.part", *wanted)
    (BUILD / "site.part").rename(site)
    return site


def package(root: Path) -> Path:
    """The folder with a headrace whose kernels are ARM's."""
    headers, cmake, out = root / "usr" / "include", BUILD / "cmake", BUILD / "package"
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "CMAKE_CXX_FLAGS": f"-isystem {headers} -Werror",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": BUILD / "install",
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": headers / PYTHON,
        "nanobind_DIR": nanobind.cmake_dir(),
    }
    command("cmake", "-S", ROOT, "-B", cmake, *(f"-D{key}={value}" for key, value in settings.items()))
    command("cmake", "--build", cmake, "--parallel")
    command("cmake", "--install", cmake)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "src", out, ignore=shutil.ignore_patterns("__pycache__", "_cpu*.so", "_unbuilt.txt"))
    shutil.copy(BUILD / "install" / "headrace" / "kernels" / "_cpu.abi3.so", out / "headrace" / "kernels")
    return out


def main() -> None:
    missing = [tool for tool in (COMPILER, EMULATOR, "cmake", "apt-get", "dpkg-deb") if not shutil.which(tool)]
    if missing:
        sys.exit(f"not found: {', '.join(missing)}; Debian has g++-aarch64-linux-gnu, qemu-user-static and cmake")
    root = system()
    paths, python = [package(root), packages()], BUILD / "python"
    python.write_text(f'#!/bin/sh\nexec {EMULATOR} -L "{root}" "{root}/usr/bin/{PYTHON}" "$@"\n')
    python.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command(python, "-c", "from headrace.kernels import extension; extension.require()", env=variables)
    print("arm: built, and the kernels load; tests:", flush=True)
    # Tests that start an interpreter of their own get an emulated one too.
    code = f"import sys, pytest; sys.executable = {str(python)!r}; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "--timeout=0"]
    words = [str(python), "-c", code, *options, *(sys.argv[1:] or TESTS)]
    sys.exit(subprocess.run(words, cwd=ROOT, env=variables).returncode)


if __name__ == "__main__":
    main()
