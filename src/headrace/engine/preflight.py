"""What can be said of settings and a model before anything is started. Imports no torch: it takes a tenth of a second.

The engine checks again what it depends on. This is for people: they hear of a mistake at once, in one line.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from headrace.config import EngineConfig
from headrace.config.environment import warn_of_unknown
from headrace.engine.adapters import read_adapters
from headrace.engine.draft_facts import DraftFacts
from headrace.engine.folders import model_folder
from headrace.engine.footprint import Footprint, gib, ranks_here
from headrace.engine.outside import ExpertsOutside
from headrace.engine.template_file import given_template
from headrace.host import GIB
from headrace.models.files import check_whole, weight_files
from headrace.models.plain_config import plain_config
from headrace.models.shards import Share, shard
from headrace.models.sizes import BYTES, compute_type, expert_bytes, refuse_rounding, refuse_slots
from headrace.models.slots import expected, expert_of
from headrace.models.spec import ModelConfig
from headrace.offload.sessions.session_folder import make_folder
from headrace.parallel.interfaces import interface_name
from headrace.planner.machine import ModelShape
from headrace.planner.tuned_table import TableStamp, load_table
from headrace.strategies import RECURRENT, SPARSE
from headrace.types import CHUNK
from headrace.version import __version__

log = logging.getLogger(__name__)

BLOBS = "blobs"
"""What a directory that a disk tier has filled holds (offload.tiers.files)."""

GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")
"""What a machine with a GPU has one of in /dev."""

_passed: set[str] = set()


def check(config: EngineConfig) -> None:
    """Raises ValueError, or UnsupportedModel, which says what is wrong and the remedy. What has passed in this process
    is not looked at again: an engine that is started anew finds other memory free than the first."""
    name = repr(sorted(config.flat.items()))
    if name in _passed:
        return
    warn_of_unknown()
    if config.model.chat_template is not None:
        given_template(Path(config.model.chat_template))
    folder = model_folder(config.model.folder)
    model = plain_config(folder)
    draft = DraftFacts.of(config)
    for path in (*weight_files(folder), *(() if draft is None else weight_files(draft.folder))):
        check_whole(path)
    check_fit(config, model)
    read_adapters(config)
    _check_devices(config)
    _check_ranks(config, model)
    Footprint.of(config, model).check()
    _check_disk(config)
    make_folder(config.sessions.path)
    _check_expert_file(config, model)
    _passed.add(name)


def refuse_for_hybrids(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for what a model with recurrent layers does not do yet, and for states that a model has not."""
    if model.recurrent is None:
        if config.cache.states is not None:
            raise ValueError(f"recurrent_states: {model.architecture} has no recurrent layers; leave it out")
        return
    tiers = config.tiers
    strategy = config.ranks.strategy
    if config.ranks.context > 1 and strategy not in ("auto", *RECURRENT):
        raise ValueError(
            f"prefill_strategy {strategy}: {model.architecture} has recurrent layers, whose rows are computed in their "
            f"order, from rank to rank; use auto, {' or '.join(RECURRENT)}"
        )
    found = {
        "offload_schedule": config.streaming is not None,
        "kv_offload_activations": tiers is not None and tiers.activations == "on",
    }
    asked = next((name for name, on in found.items() if on), None)
    if asked is not None:
        told = "its states are whole, in memory and in tiers"
        raise ValueError(f"{asked}: {model.architecture} has recurrent layers, and {told}; leave it out")
    if config.speculation.on and config.cache.states == 1:
        raise ValueError(
            f"recurrent_states 1: {model.architecture} has recurrent layers, and a draft takes a state beside that of "
            f"its sequence; set recurrent_states to 2 at least, or leave out speculative"
        )


def refuse_for_mixed(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for what a model whose layers differ in their heads, or share keys and values, does not do."""
    if not model.value_norm:
        return
    why = f"{model.architecture} has layers that differ in their heads or share keys and values"
    if config.streaming is not None:
        raise ValueError(f"offload_schedule: {why}, and streamed decoding stages layers that are alike; leave it out")
    if config.model.on_gpu and config.ranks.count > 1:
        raise ValueError(f"attention_backend 'triton' with several ranks: {why}; use one rank, or 'auto'")


def refuse_for_indexed(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for what a model whose rows choose the keys that they attend to does not do."""
    if model.attention.index is None:
        return
    strategy, by_blocks = config.ranks.strategy, model.attention.index.block > 1
    if config.ranks.context > 1 and strategy not in ("auto", *SPARSE):
        raise ValueError(
            f"prefill_strategy {strategy}: {model.architecture} has sparse attention, and each row of a prompt would "
            f"have thousands of keys sent to it; use auto, {', '.join(SPARSE)}"
        )
    found = {
        "attention_backend triton": config.model.on_gpu,
        "offload_schedule": config.streaming is not None,
        "tensor_parallel_size": config.ranks.tensor > 1 and by_blocks,
    }
    asked = next((name for name, on in found.items() if on), None)
    if asked is not None:
        told = "whose rows choose among all keys of a pool, on a CPU"
        raise ValueError(f"{asked}: {model.architecture} has sparse attention, {told}; leave it out")


def refuse_for_gpu_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for what several ranks on GPUs do not do yet."""
    if config.ranks.transport == "nccl" and not config.model.on_gpu:
        raise ValueError("rank_transport nccl is for ranks on GPUs: leave it out, or set attention_backend triton")
    if not config.model.on_gpu or config.ranks.count == 1:
        return
    several, spec, size = "several ranks on GPUs", model.recurrent, config.ranks.tensor
    if spec is not None and spec.kind == "mamba2" and spec.normed and size > spec.key_heads:  # else its norm is joined
        raise ValueError(
            f"tensor_parallel_size {size}: {model.architecture} norms {spec.key_heads} groups of heads, and on GPUs a "
            f"group is one rank's; use {spec.key_heads} or fewer, or context_parallel_size"
        )
    if config.ranks.launcher == "ray":
        raise ValueError(f"distributed_backend ray finds places by CPUs, not for {several}; use mp, or torchrun")


def refuse_for_gpu_drafts(config: EngineConfig) -> None:
    """Raises ValueError for a draft model on a GPU whose memory the pool, or what streams it, has all of."""
    if config.speculation.model is None or not config.model.on_gpu:
        return
    for asked, what in ((config.ranks.count > 1, "several ranks"), (config.streaming is not None, "streamed KV")):
        if asked:
            raise ValueError(
                f"speculative {config.speculation.model}: on GPUs {what} leave a draft model no memory yet; use ngram "
                f"or suffix"
            )


def check_fit(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for settings that the model rules out: a type of the cache that is not computed in, a sequence
    longer than the model's, or than the KV cache holds, products of FP8 on a CPU."""
    refuse_for_hybrids(config, model)
    refuse_for_mixed(config, model)
    refuse_for_indexed(config, model)
    refuse_for_gpu_ranks(config, model)
    refuse_for_gpu_drafts(config)
    refuse_rounding(model, config.model.quantization)
    if (draft := DraftFacts.of(config)) is not None:
        draft.check(model)
        refuse_for_mixed(config, draft.model)
        refuse_for_indexed(config, draft.model)
    asked, tokens, kv_dtype = config.model.max_len, config.cache.tokens, config.cache.dtype
    compute = compute_type(model, config.model.dtype)
    if kv_dtype not in ("auto", "int8", compute):
        raise ValueError(
            f"kv_cache_dtype {kv_dtype}: keys and values are kept in the compute type, which is {compute}, or as int8; "
            f"leave it out, or set dtype {kv_dtype}"
        )
    if config.model.quantization == "fp8_rowwise" and not config.model.on_gpu:
        raise ValueError(
            "quantization fp8_rowwise: only a GPU multiplies FP8; set attention_backend 'triton', or use w8a8"
        )
    if config.model.on_gpu and config.expert_folder is not None and model.experts is not None:
        _check_experts_of_gpu(config, model)
    if asked is None:
        return
    if asked > model.max_model_len:
        raise ValueError(f"max_model_len {asked} exceeds the model's {model.max_model_len}: lower it, or leave it out")
    if tokens is not None and config.streaming is None and asked > tokens // CHUNK * CHUNK * config.ranks.context:
        raise ValueError(
            f"kv_cache_tokens {tokens} holds no sequence of max_model_len {asked}: raise the one or lower the other"
        )


def _check_experts_of_gpu(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for experts in a file that a GPU does not read, or without room for them, as far as that is
    known: of codes it is when the first expert has been read."""
    if config.streaming is not None:
        setting = "expert_offload_path" if config.experts.path is not None else "kv_offload_path"
        raise ValueError(
            f"{setting}: where a GPU streams KV it reads no experts in a file; leave it out, or keep all weights in "
            "host memory by weight_offload with kv_offloading_size"
        )
    if config.experts.memory is None:
        raise ValueError(
            "expert_offload_path: set expert_memory_size, the GPU's memory for experts in use; the cache gets the rest"
        )
    if model.stored is None and config.model.quantization == "none" and model.experts is not None:
        every = expert_bytes(model, compute_type(model, config.model.dtype), ranks=config.ranks.tensor)
        layers, count = len({of[0] for name in expected(model) if (of := expert_of(name))}), model.experts.count
        refuse_slots(int(config.experts.memory * GIB), count, every // layers // count)


def _check_devices(config: EngineConfig) -> None:
    """Packages and devices that the settings ask for."""
    if config.model.on_gpu and not any(any(Path("/dev").glob(name)) for name in GPU_DEVICES):
        raise ValueError("attention_backend 'triton': no CUDA device; use 'auto'")
    if config.ranks.launcher == "ray" and config.ranks.count > 1 and find_spec("ray") is None:
        raise ValueError("distributed_backend ray needs the package: pip install 'headrace[ray]'")
    kinds = {own.kind for own in config.tiers.each} if config.tiers is not None else set()
    if "remote" in kinds and find_spec("redis") is None:
        raise ValueError("KV on a remote server needs redis-py 5.3 or later: pip install 'headrace[remote]'")


def _check_ranks(config: EngineConfig, model: ModelConfig) -> None:
    ranks = config.ranks
    if ranks.count > 1:
        interface_name(ranks.interface)
    if ranks.tensor > 1:
        for rank in range(ranks.tensor):
            Share(model, rank, ranks.tensor)
    if ranks.table is not None:
        _check_table(config, model, Path(ranks.table))


def _check_table(config: EngineConfig, model: ModelConfig, path: Path) -> None:
    """All of the table's stamp but the machine, which the ranks measure."""
    table = load_table(path)
    own = replace(model, attention=shard(model, 0, config.ranks.tensor))
    shape = ModelShape.of(own, BYTES[compute_type(model, config.model.dtype)])
    table.check(stamp(config, shape, table.stamp.machine))


def stamp(config: EngineConfig, shape: ModelShape, machine: str, date: str = "") -> TableStamp:
    """What a tuned table of this group is made for; machine: Machine.fingerprint."""
    link = f"gloo on {config.ranks.interface}"
    if config.model.on_gpu:
        link += f", tensors by {config.ranks.transport}"
    return TableStamp(
        machine=machine, model=model_folder(config.model.folder).name, shape=shape, ranks=config.ranks.context,
        link=link, version=__version__, date=date,
    )  # fmt: skip


def _check_expert_file(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for a directory in which nothing can be written, or with less room than the experts take."""
    asked = ExpertsOutside.of(config, model)
    if asked is None or config.experts.path is None:
        return
    folder = Path(asked.folder)
    _check_directory(folder, "expert_offload_path")
    size, free = asked.outside * ranks_here(config), shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"expert_offload_path {folder}: the experts take {gib(size)}, {gib(free)} are free there; make room, or "
            f"name another directory"
        )


def _check_disk(config: EngineConfig) -> None:
    """Raises ValueError for a directory in which nothing can be written; says where it has less room than allowed."""
    outside = config.tiers or config.streaming
    for own in outside.each if outside is not None else ():
        if own.kind == "disk":
            folder = Path(own.place)
            _check_directory(folder)
            usage = shutil.disk_usage(folder)
            new = not any(folder.iterdir())
            if own.size * GIB > (usage.free if new else usage.total):
                log.warning(
                    "kv_offload_disk_size %g GiB is more than the disk of %s has: %s %s", own.size, folder,
                    gib(usage.free if new else usage.total), "are free" if new else "in all",
                )  # fmt: skip


def _check_directory(folder: Path, setting: str = "kv_offload_path") -> None:
    """Makes it, as the tier will, and writes a file there. What an earlier engine stored can be read all the same."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise ValueError(f"{setting} {folder} is not a directory; name another") from None
    except NotADirectoryError:
        raise ValueError(f"{setting} {folder}: a part of the path is a file; name another directory") from None
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else str(error)
        if not (folder / BLOBS).is_dir():
            raise ValueError(f"{setting} {folder}: nothing can be written there ({told}); name another") from None
        log.warning("%s %s: nothing can be written there (%s); what it holds is read", setting, folder, told)
