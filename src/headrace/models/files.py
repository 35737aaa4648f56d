"""The files of a model, a folder or a GGUF file: what it says of itself, and which files hold the weights. Imports no
torch."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.files import open_given, read_given
from headrace.logs import shown
from headrace.models.gguf.architectures import config_fields
from headrace.models.gguf.header import SUFFIX, open_gguf, parts_of
from headrace.models.quantised import BESIDE, FIELDS
from headrace.types import UnsupportedModel

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER = 32 << 20
"""Bytes; some 200,000 tensors. safetensors itself takes 100 MB."""
QUICK_HEADER = 1 << 20
"""Bytes of a header that is looked through before anything is started; safetensors reads longer ones as it loads."""
POINTER = b"version https://git-lfs"
MAX_JSON = 32 << 20
"""Bytes of a JSON file; an index of 200,000 tensors has half of it."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file if it is not there or holds something else."""
    try:
        data = read_given(path, MAX_JSON)
        value = json.loads(data.decode())
        if b"\\ud" in data.lower():  # half a surrogate pair is no text, and half of what reads it here would fail
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a model folder in Hugging Face form is needed") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; download it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def is_gguf(model: Path) -> bool:
    """Whether a model is a GGUF file, and no folder."""
    return model.suffix == SUFFIX and not model.is_dir()


def raw_config(model: Path) -> tuple[dict[str, Any], Path]:
    """The fields of config.json, or what a GGUF file says instead, and the file that says it. Raises as read_json and
    config_fields do."""
    if is_gguf(model):
        return config_fields(*map(open_gguf, parts_of(model))), model
    path = model / "config.json"
    raw, beside = read_json(path), model / BESIDE
    if not any(raw.get(name) for name in FIELDS) and beside.is_file():
        said = read_json(beside).get("quantization")
        raw |= {FIELDS[0]: {"quant_method": "modelopt"} | (said if isinstance(said, dict) else {})}
    return raw, path


def config_content(model: Path, most: int = MAX_JSON) -> bytes:
    """What tells one model's configuration from another's; b"" where the weights' file has it. Raises OSError."""
    return b"" if is_gguf(model) else read_given(model / "config.json", most)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, one or all shards, or all parts of a GGUF file. Refuses folders with pickled
    weights only."""
    if is_gguf(folder):
        return parts_of(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"{folder}: {pickles[0]} holds pickled weights, which can run code when read and are refused. Convert them "
            f"where you trust them: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, "
            f"safe_serialization=True), and copy the tokenizer files"
        )
    raise ValueError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}; {_other_weights(folder)}")


def _other_weights(folder: Path) -> str:
    """What there is instead."""
    for pattern, told in (
        ("*.safetensors", "the index of {} is missing; download the folder again, whole"),
        ("*.gguf", "give the file {} itself"),
        ("*.h5", "{} is of TensorFlow; download the safetensors files"),
        ("*.msgpack", "{} is of Flax; download the safetensors files"),
    ):
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            return told.format(shown(found[0]))
    return "download them too"


def check_whole(path: Path) -> None:
    """Raises ValueError for a file that by its beginning and its size cannot be a whole safetensors or GGUF file."""
    if is_gguf(path):
        open_gguf(path)
        return
    try:
        size = path.stat().st_size
        with open_given(path) as file:
            begin = file.read(len(POINTER))
        length = struct.unpack("<Q", begin[:8])[0]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except struct.error:
        raise ValueError(f"{path} is empty or cut short; download it again") from None
    if begin == POINTER:
        raise ValueError(f"{path} is a pointer of Git LFS, not the file; `git lfs pull` fetches it")
    if length + 8 > size:
        raise ValueError(f"{path} is not a safetensors file, or is cut short; download it again")
    if length <= QUICK_HEADER:
        _check_size(path, length, size)


def _check_size(path: Path, length: int, size: int) -> None:
    try:
        with open_given(path) as file:
            file.seek(8)
            tensors = json.loads(file.read(length))
        ends = [item["data_offsets"][1] for name, item in tensors.items() if name != "__metadata__"]
        short = max(ends, default=0) + 8 + length - size
    except (OSError, ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError):
        raise ValueError(f"{path} is not a safetensors file, or is damaged; download it again") from None
    if short > 0:
        raise ValueError(f"{path} is cut short: {short:,} bytes are missing; download it again")


def placed(folder: Path) -> dict[str, str]:
    """Which of several files the index names for each tensor; {} where there is one file. Raises ValueError."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return {}
    found = read_json(folder / INDEX).get("weight_map", {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError(f"{folder / INDEX}: weight_map must map tensors to file names; download the file again")
    return found


def _shards(folder: Path) -> list[Path]:
    names = sorted(set(placed(folder).values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names {shown(repr(name))}, which is outside the folder")
        if len(name) > 255 or "\0" in name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {shown(name)}, which is missing; download the folder again")
    if not names:
        raise ValueError(f"{folder / INDEX} has an empty weight_map")
    return [folder / name for name in names]


def stored_types(paths: Sequence[Path]) -> dict[str, int]:
    """Bytes of the tensors in these files by their type, as the format calls it."""
    found: Counter[str] = Counter()
    for path in paths:
        if is_gguf(path):
            for info in open_gguf(path).tensors.values():
                found[info.type.name] += info.size
            continue
        for tensor in _tensors(path):
            begin, end = tensor["data_offsets"]
            found[str(tensor["dtype"])] += end - begin
    return dict(found)


def first_dtype(path: Path) -> str:
    """Type of the first tensor in a safetensors file, as the format calls it."""
    tensors = _tensors(path)
    return str(tensors[0]["dtype"]) if tensors else "F32"


def _tensors(path: Path) -> list[dict[str, Any]]:
    """What the header of a safetensors file says of each of its tensors, their dtype and data_offsets checked."""
    try:
        with open_given(path) as file:
            size = file.read(8)
            length = struct.unpack("<Q", size)[0] if len(size) == 8 else MAX_HEADER + 1
            text = file.read(length) if length <= MAX_HEADER else b""
        tensors = [item for name, item in json.loads(text).items() if name != "__metadata__"]
        if all(0 <= begin <= end and item["dtype"] for item in tensors for begin, end in [item["data_offsets"]]):
            return tensors
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"{path} is not a safetensors file, or is cut short; download it again")
