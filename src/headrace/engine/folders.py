"""Where a model is, and what to do where it is not: folders, GGUF files, names of models that were fetched."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headrace.logs import shown
from headrace.models.gguf.header import PART, SUFFIX, parts_of
from headrace.models.hub_cache import gguf_of_the_hub, hub_cache, revisions
from headrace.models.hub_names import HubName, hub_name
from headrace.models.published import PUBLISHED
from headrace.progress import sized

SHIPPED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}
"""Models that come with the package, by name."""

FORM = "a folder in Hugging Face form (config.json, safetensors files, tokenizer.json) or a GGUF file"


def model_folder(model: str) -> Path:
    """The folder of a model, or its GGUF file: a shipped one by name, a path, what `headrace pull` has fetched, what
    Hugging Face's tools have downloaded under a name of the hub. Raises ValueError if there is none."""
    path = SHIPPED.get(model, Path(model).expanduser())
    try:
        found = _model_at(path)
        if found is None and not path.exists():
            found = _fetched(model)
        told = _why(model, path) if found is None else ""
    except (OSError, RuntimeError) as error:
        found, told = None, getattr(error, "strerror", None) or str(error)
    except ValueError as error:
        found, told = None, str(error)
    if found is None:
        raise ValueError(f"model {shown(repr(model))}: {told}")
    return found


def _fetched(model: str) -> Path | None:
    if model in PUBLISHED:
        path = PUBLISHED[model].path
        return path if path.is_file() else None
    name = hub_name(model)
    return _of_the_hub(name) if name is not None else None


def _model_at(path: Path) -> Path | None:
    """A folder with a config.json, a GGUF file, or the one that a folder holds; of several parts the first."""
    if (path / "config.json").is_file():
        return path
    if path.is_file():
        return parts_of(path)[0] if path.suffix == SUFFIX else None
    models = _gguf_models(path)
    return models[0] if len(models) == 1 else None


def _gguf_models(folder: Path) -> list[Path]:
    """GGUF files of a folder, of those in parts the first."""
    found = sorted(folder.glob(f"*{SUFFIX}"))
    return [path for path in found if (part := PART.fullmatch(path.name)) is None or int(part["number"]) == 1]


def _why(model: str, folder: Path) -> str:
    """Why this is no model's folder, and what to give instead."""
    if folder.is_dir():
        return _folder_without_config(folder)
    if folder.exists():
        return f"this is a file; give its folder, {folder.parent}, or a GGUF file"
    if model in PUBLISHED:
        return f"not here yet: `headrace pull {model}` fetches it ({sized(PUBLISHED[model].size)})"
    if hub_name(model) is not None:
        return (
            f"there is no such folder, and nothing of this name in {hub_cache()}: "
            f"`headrace pull {model}` fetches it, or give the folder where it is"
        )
    names = (*SHIPPED, *PUBLISHED)
    near = get_close_matches(model, names, 1)
    meant = f"did you mean {near[0]}?" if near else f"give a path, or one of: {', '.join(names)}"
    return f"no folder with a config.json; {meant}"


def _folder_without_config(folder: Path) -> str:
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime)
    if snapshots:
        return f"no config.json here; give the folder {snapshots[-1].parent}"
    inside = sorted(folder.glob("*/config.json"))
    if len(inside) == 1:
        return f"no config.json here; give the folder {inside[0].parent}"
    models = _gguf_models(folder)
    if models:
        return f"the folder holds several GGUF files; give one of them: {', '.join(str(path) for path in models[:5])}"
    if (folder / "adapter_config.json").is_file():
        return "the folder holds an adapter (LoRA), not a model; give its model, and --lora-modules NAME=FOLDER"
    return f"the folder has no config.json; what is needed is {FORM}"


def hub_folder(name: str, file: str) -> Path | None:
    """What has been downloaded under a name of the hub, and holds such a file; None where nothing has."""
    known = hub_name(name)
    if known is None or known.quant is not None:
        return None
    return next((path for path in revisions(known.repo) if (path / file).is_file()), None)


def _of_the_hub(name: HubName) -> Path | None:
    """The model that has been downloaded under a name of the hub: a folder, or a GGUF file."""
    if name.quant is None:
        folders = [path for path in revisions(name.repo) if (path / "config.json").is_file()]
        whole = [path for path in folders if next(path.glob("*.safetensors"), None) is not None]
        return next(iter(whole), None) or gguf_of_the_hub(name) or next(iter(folders), None)
    return gguf_of_the_hub(name)
