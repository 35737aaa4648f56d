"""Sets up the clients that `make test-clients` tries: .venv-clients from requirements.txt, .venv-clients-newest from
requirements-newest.txt, build/clients-node by npm.

    python3 tools/clients/install.py          # does nothing where all are as the files say
    python3 tools/clients/install.py --lock   # solves the requirements anew and writes locked.txt, locked-newest.txt

uv is used where it is there, else pip. Without node and npm the clients of JavaScript are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NODE = ROOT / "build/clients-node"
HEAD = "# Versions of everything that {} brings (tools/clients/install.py --lock).\n"
KINDS = ("", "-newest")
"""Of environments: the frameworks, and what needs newer clients than they do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", action="store_true", help="solve the requirements anew and write what was found")
    args = parser.parse_args()
    for kind in KINDS:
        wanted, locked = HERE / f"requirements{kind}.txt", HERE / f"locked{kind}.txt"
        environment(ROOT / f".venv-clients{kind}", wanted, locked, args.lock)
    node_clients()


def environment(venv: Path, wanted: Path, locked: Path, lock: bool) -> None:
    if lock:
        shutil.rmtree(venv, ignore_errors=True)
        python_clients(venv, wanted, [])
        locked.write_text(HEAD.format(wanted.name) + installed(venv))
    elif stale(venv, wanted, locked):
        python_clients(venv, wanted, ["--constraint", str(locked)])
    mark(venv, wanted, locked)


def python_clients(venv: Path, wanted: Path, constraints: list[str]) -> None:
    print(f"setting up {venv.name} (some minutes where packages have to be loaded)", flush=True)
    python, uv = str(venv / "bin/python"), shutil.which("uv")
    if uv:
        run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(venv)])
        run([uv, "pip", "install", "--quiet", "--python", python, "--requirement", str(wanted), *constraints])
    else:
        run([sys.executable, "-m", "venv", str(venv)])
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off"]
        run([*pip, "--requirement", str(wanted), *constraints])


def installed(venv: Path) -> str:
    """name==version, a line each."""
    listed = (
        "import importlib.metadata as m\n"
        "print(*sorted({f'{d.name}=={d.version}' for d in m.distributions()}, key=str.lower), sep='\\n')"
    )
    python = str(venv / "bin/python")
    lines = subprocess.run([python, "-c", listed], capture_output=True, text=True, check=True).stdout
    return "".join(line for line in lines.splitlines(True) if line.split("==")[0] not in {"pip", "setuptools"})


def node_clients() -> None:
    files = [HERE / "node" / name for name in ("package.json", "package-lock.json")]
    npm = shutil.which("npm") if shutil.which("node") else None
    if npm is None:
        print("no node or no npm: the clients of JavaScript are left out")
    elif stale(NODE, *files):
        NODE.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, NODE)
        run([npm, "ci", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(NODE)])
        mark(NODE, *files)


def run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}")


def stale(folder: Path, *files: Path) -> bool:
    """Whether what the files say has not been installed into the folder."""
    mark_file = folder / ".installed"
    return not mark_file.exists() or mark_file.read_text() != digest(*files)


def mark(folder: Path, *files: Path) -> None:
    (folder / ".installed").write_text(digest(*files))


def digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


if __name__ == "__main__":
    main()
