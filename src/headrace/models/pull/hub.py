"""Models from the hub (Hugging Face's, or what HF_ENDPOINT names), by huggingface_hub, into its cache: what the engine
reads of a repository and nothing else, so no code and no pickles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headrace.models.files import INDEX, SINGLE, read_json
from headrace.models.hub_cache import stored
from headrace.models.hub_names import HubName, chosen, quants

BESIDE = (".json", ".jinja")
"""Endings of what lies beside the weights: configuration, tokenizer, templates."""
TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.txt", "merges.txt", "tiktoken.model")
NOT_READ = ("pytorch_model.bin.index.json", "tf_model.h5.index.json", "trainer_state.json")
ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is fetched of a repository. commit: of its main branch; files: names -> bytes; hashes: names -> SHA-256 of
    those that the hub has one of; chosen: the GGUF model among several, else None."""

    repo: str
    commit: str
    files: dict[str, int]
    hashes: dict[str, str]
    chosen: str | None

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self.files.values())


def find(name: HubName) -> Wanted:
    """Asks the hub what there is. Raises ValueError where there is nothing to fetch or it may not be, RuntimeError
    where the hub cannot be asked."""
    from huggingface_hub import HfApi

    with _told(name.repo):
        info = HfApi().model_info(name.repo, files_metadata=True)
        files = {each.rfilename: each for each in info.siblings or () if _within(PurePosixPath(each.rfilename))}
        model, names = _read_by_us(name, list(files))
    return Wanted(
        name.repo, str(info.sha), {each: files[each].size or 0 for each in names},
        {each: lfs.sha256 for each in names if (lfs := files[each].lfs) is not None}, model,
    )  # fmt: skip


def fetch(wanted: Wanted) -> Path:
    """Fetches the files and compares them; gives their folder. Raises as find does."""
    from glob import escape

    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    with _told(wanted.repo), disable_progress_bars():
        folder = Path(snapshot_download(wanted.repo, allow_patterns=[escape(name) for name in wanted.files]))
    if folder.name != wanted.commit:
        raise RuntimeError(f"{wanted.repo} was changed meanwhile: pull it again")
    for name, size in wanted.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or not _is(path, wanted.hashes.get(name)):
            path.resolve().unlink(missing_ok=True)
            raise RuntimeError(f"{wanted.repo}: {name} did not arrive as it was published; pull it again")
    return folder


def here(wanted: Wanted) -> int:
    """Bytes of the large files that have come so far, or were there before."""
    known = set(wanted.hashes.values())
    blobs = (stored(wanted.repo) / "blobs").glob("*")
    return sum(path.stat().st_size for path in blobs if path.name.split(".")[0] in known)


def _is(path: Path, sha256: str | None) -> bool:
    if sha256 is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _read_by_us(name: HubName, files: list[str]) -> tuple[str | None, list[str]]:
    """The GGUF model that was chosen, if it is one, and the files."""
    models = quants(files)
    if name.quant is not None or (models and not {SINGLE, INDEX, ADAPTER} & set(files)):
        model = chosen(models, name.quant)
        return model, models[model]
    weights = _weights(name.repo, files)
    beside = [each for each in files if _lies_beside(PurePosixPath(each))]
    return None, sorted({*weights, *beside})


def _within(path: PurePosixPath) -> bool:
    """The hub's word is not taken for where a file belongs."""
    return not path.is_absolute() and ".." not in path.parts


def _lies_beside(path: PurePosixPath) -> bool:
    """At the top, or the configuration of a module of sentence-transformers."""
    if len(path.parts) == 1:
        return (path.suffix in BESIDE and path.name not in NOT_READ) or path.name in TOKENIZERS
    return len(path.parts) == 2 and path.name == "config.json" and path.parts[0][:1].isdigit()


def _weights(repo: str, files: list[str]) -> list[str]:
    if INDEX in files:
        from huggingface_hub import hf_hub_download

        placed = read_json(Path(hf_hub_download(repo, INDEX))).get("weight_map", {})
        return sorted({str(shard) for shard in placed.values()} & set(files))
    found = [each for each in (SINGLE, ADAPTER) if each in files]
    if not found:
        kinds = sorted({suffix for each in files if (suffix := PurePosixPath(each).suffix) in (".bin", ".pt", ".pth")})
        told = f" (weights in {', '.join(kinds)} can run code when read, and are refused)" if kinds else ""
        raise ValueError(f"it holds no {SINGLE}, no {INDEX} and no GGUF file{told}")
    return found


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """What the hub's errors mean for a user."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{repo} is given to those who agree to its terms: agree at {hub}/{repo}, then `hf auth login` or HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{hub} has no {repo}, or shows it to its owners alone (`hf auth login`, HF_TOKEN)") from None
    except errors.OfflineModeIsEnabled:
        raise ValueError("HF_HUB_OFFLINE is set, and nothing is fetched") from None
    except ValueError as error:
        raise ValueError(f"{repo}: {error}") from None
    except Exception as error:  # of the library, its HTTP client, the file system
        raise RuntimeError(f"{repo} cannot be fetched from {hub}: {_first_line(error)}") from error


def _first_line(error: Any) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
