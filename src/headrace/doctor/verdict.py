"""What stands above all findings: whether this machine is in order, and if not what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.doctor.settings import UNKNOWN

Found = dict[str, dict[str, Any]]
"""headrace.doctor.machine.findings(): section -> name -> what was found."""

LITTLE_GIB = 2.0
BUSY = 1.5
"""Load for each core of the machine from which figures are worth little."""

SHORT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that costs speed or fails later, and what to do about it."""

    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


def headline(found: Found, warned: list[Warned]) -> str:
    """'OK: this machine serves models with the C++ kernels (amx), 2 cores, 21.9 GiB free'."""
    count = f"; {len(warned)} finding{'s' * (len(warned) > 1)}:" if warned else ""
    cores, free = found["processor"]["cores usable"], found["memory"]["free GiB"]
    return (
        f"{'WARN' if warned else 'OK'}: this machine serves {_served(found)} with {_kernels(found)}, "
        f"{cores} core{'s' * (cores != 1)}, {free:,.1f} GiB free{count}"
    )


def _served(found: Found) -> str:
    return str(found["model"]["name"]) if "model" in found else "models"


def _kernels(found: Found) -> str:
    told = str(found["kernels"].get("C++ kernels", ""))
    cpp = "the C++ kernels " + told.removeprefix("available ") if told.startswith("available") else "torch's kernels"
    gpu = [what.split(",")[0] for name, what in found["accelerators"].items() if name.startswith("cuda:")]
    triton = str(found["kernels"].get("Triton kernels", "")).startswith("available")
    return f"{cpp} and Triton's on {gpu[0]}" if gpu and triton else cpp


def warnings(found: Found) -> list[Warned]:
    """All that is to be told, the costliest first."""
    return [each for check in CHECKS for each in check(found)]


def _no_kernels(found: Found) -> Iterator[Warned]:
    kernels = found["kernels"]
    if "kernels" in kernels:
        why = str(kernels["kernels"])
        yield Warned(f"the kernels {why}", "unset HEADRACE_ISA" if "HEADRACE_ISA" in why else "install Headrace again")
        return
    told = str(kernels["C++ kernels"])
    if not told.startswith("available"):
        yield Warned(
            f"the C++ kernels are {told}, and torch computes several times slower",
            "install a C++ compiler (g++ or clang) and then Headrace again: pip install -e .",
        )
        return
    used, best = (
        told.removeprefix("available (").removesuffix(")"),
        str(kernels["C++ instructions here"]).split(", ")[-1],
    )
    if used != best:
        yield Warned(f"HEADRACE_ISA has the kernels use {used}, and this processor has {best}", "unset HEADRACE_ISA")
    elif used == "portable":
        yield Warned("the C++ kernels use no vector instructions", "take a processor with AVX2")


def _few_cores(found: Found) -> Iterator[Warned]:
    facts = found["processor"]
    quota, cores, threads = facts["CPU quota of the container"], facts["cores usable"], facts["torch threads"]
    if isinstance(quota, float) and quota < cores:
        yield Warned(
            f"the container's CPU quota is {quota:g} cores, so {cores} threads are paused now and then",
            f"give it whole cores: docker run --cpus {cores}",
        )
    if cores == 1:
        yield Warned("1 core is usable", "give the process more: one computes while it also answers")
    if threads < cores:
        limit = facts["OMP_NUM_THREADS"]
        why = f"OMP_NUM_THREADS is {limit}" if limit != "not set" else "torch chose so"
        yield Warned(
            f"{threads} of {cores} usable cores compute ({why})", f"unset OMP_NUM_THREADS, or give --threads {cores}"
        )


def _busy(found: Found) -> Iterator[Warned]:
    load = found["processor"]["load of the machine's cores"]
    if load > BUSY:
        yield Warned(
            f"other work is running, {load:.1f} tasks for each core",
            "answers take longer meanwhile, and figures are worth little",
        )


def _little_memory(found: Found) -> Iterator[Warned]:
    free, limit = found["memory"]["free GiB"], found["memory"]["limit of the container GiB"]
    if free < LITTLE_GIB:
        raised = ", or raise the container's limit" if isinstance(limit, float) else ""
        yield Warned(f"only {free:.1f} GiB of memory are free", f"end other processes{raised}, or take small models")
    if found["memory"]["transparent huge pages"] == "never":
        yield Warned(
            "huge pages are off, which costs 5 to 20 % of decoding",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _settings(found: Found) -> Iterator[Warned]:
    """Settings that cannot work make both ranks and tiers say so, in the same words, with the remedy."""
    told = [found["ranks"].get("ranks", ""), found["tiers"].get("tiers", "")]
    for reason in dict.fromkeys(each.split(": ", 1)[1] for each in told if each.startswith("cannot be ")):
        yield Warned("the environment's settings cannot work", reason)


def _ranks(found: Found) -> Iterator[Warned]:
    ranks, cores = found["ranks"].get("ranks on this host", 1), found["processor"]["cores usable"]
    if ranks > cores:
        yield Warned(
            f"{ranks} ranks share {cores} core{'s' * (cores != 1)} and take turns",
            f"ask for at most {cores} on this machine",
        )


OF_TIERS = {
    "MORE THAN IS FREE": "lower --kv-offloading-size",
    "LESS THAN MAY BE USED": "lower --kv-offload-disk-size, or make room",
    "CANNOT BE USED": "give --kv-offload-path a directory that can be written",
    "REFUSES US": "give --kv-remote-url the user and the password that the server asks for",
    "CANNOT BE REACHED": "start the server, or correct --kv-remote-url",
    "the disk is full": "make room",
}
"""What a finding of a tier says where it does not work -> the remedy."""


def _tiers(found: Found) -> Iterator[Warned]:
    for name, told in found["tiers"].items():
        for phrase, remedy in OF_TIERS.items():
            if phrase in str(told):
                yield Warned(f"{name} {str(told).replace(phrase, phrase.lower())}", remedy)
                break


def _unknown_settings(found: Found) -> Iterator[Warned]:
    for name, told in found["settings"].items():
        if told.startswith(UNKNOWN):
            meant = told.removeprefix(UNKNOWN).removeprefix("; ")
            yield Warned(f"{name} is set, and nothing reads it", meant or "unset it")


def _short_context(found: Found) -> Iterator[Warned]:
    facts = found.get("model")
    if (
        facts
        and facts["longest context here"] < SHORT_CONTEXT
        and facts["longest context is limited by"] != "the model"
    ):
        yield Warned(
            f"the longest context here is {facts['longest context here']:,} tokens",
            "free memory, or take --kv-cache-dtype int8",
        )


CHECKS: tuple[Callable[[Found], Iterable[Warned]], ...] = (
    _no_kernels, _few_cores, _little_memory, _settings, _ranks, _tiers, _unknown_settings, _short_context, _busy,
)  # fmt: skip
