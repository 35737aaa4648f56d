"""`headrace doctor`: whole screens of fixed findings, what is warned of, and what fits into memory."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import doctor
from headrace.cli.doctor import kv_per_token
from headrace.config import AttentionSpec, EngineConfig
from headrace.doctor import machine, model, settings
from headrace.doctor.verdict import Found, warnings
from headrace.host import GIB
from headrace.models.spec import ModelConfig

pytestmark = pytest.mark.unit

FOUND: Found = {
    "processor": {
        "name": "AMD EPYC 9755", "architecture": "x86_64", "cores usable": 8, "CPU quota of the container": "none",
        "torch threads": 8, "OMP_NUM_THREADS": "not set", "load of the machine's cores": 0.1, "instructions": "avx2",
    },
    "memory": {
        "total GiB": 31.3, "free GiB": 21.9, "limit of the container GiB": "none", "transparent huge pages": "madvise",
        "read bandwidth GB/s": 48.25,
    },
    "accelerators": {"CUDA": "none: torch is built without CUDA"},
    "kernels": {
        "C++ kernels": "available (avx512bf16)", "C++ instructions here": "portable, avx2, avx512bf16",
        "Triton kernels": "not available: no CUDA device", "attend": "cpu: C++ avx512bf16",
        "linear": "cpu: C++ avx512bf16, packed weights", "layer": "cpu: C++ avx512bf16, two calls",
    },
    "ranks": {"by the environment's settings": "1 rank, no links", "ranks on this host": 1},
    "tiers": {"tiers": "none: set kv_offloading_size, kv_offload_path or kv_remote_url (docs/offload.md)"},
    "settings": {"variables": "none: every setting by default"},
    "software": {"headrace": "0.1.0", "python": "3.12.4", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
}  # fmt: skip

SPEC = AttentionSpec(32, 32, 8, 128, 1.0, (None,) * 32)
FACTS = ModelConfig(
    "LlamaForCausalLM", 128_256, 4096, 14_336, 4096, 32, 131_072, SPEC, "bfloat16", "rope", "rms", 1e-5, "silu", True
)
WEIGHTS = 16_060_522_496


def with_model(free: int = 48 * GIB, **given: Any) -> Found:
    facts = {
        "name": "llama", **model.shape_of(FACTS), "tokenizer": "chat template", "weights GiB": f"{WEIGHTS / GIB:.3f}",
        "weights bytes": WEIGHTS, **model.room(FACTS, EngineConfig(**given), free, WEIGHTS),
    }  # fmt: skip
    return {"model": facts} | FOUND


def shown(found: Found, width: int, *, verbose: bool = False, terminal: bool = False, colours: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, no_color=not colours, highlight=False, soft_wrap=True,
        color_system="standard" if terminal else "auto", legacy_windows=False,
    )  # fmt: skip
    doctor.show(console, found, warnings(found), verbose)
    return file.getvalue()


def changed(section: str, name: str, value: Any) -> Found:
    found = copy.deepcopy(FOUND)
    found[section][name] = value
    return found


MACHINE_80 = """\
OK: this machine serves models with the C++ kernels (avx512bf16), 8 cores, 21.9 GiB free

processor    AMD EPYC 9755, 8 cores usable, 8 threads
memory       21.9 of 31.3 GiB free, read at 48.2 GB/s
accelerator  none: torch is built without CUDA
kernels      all 3 operations: C++ avx512bf16
ranks        1 rank, no links
tiers        none: set kv_offloading_size, kv_offload_path or kv_remote_url
             (docs/offload.md)
settings     none: every setting by default
software     headrace 0.1.0, python 3.12.4, torch 2.13.0+cpu, transformers
             5.24.0

-v shows every finding, --json all of them as one object
"""


def test_a_machine_in_order() -> None:
    assert shown(FOUND, 80) == MACHINE_80
    assert shown(FOUND, 120) == MACHINE_80.replace("\n             (", " (").replace("\n             5", " 5")


def test_colours_are_for_terminals_that_want_them() -> None:
    assert shown(FOUND, 80, terminal=True, colours=True).startswith("\x1b[1;32mOK:\x1b[0m this")
    plain = shown(FOUND, 80, terminal=True)
    assert plain.startswith("\x1b[1mOK:") and plain.replace("\x1b[1m", "").replace("\x1b[0m", "") == MACHINE_80
    bad = changed("memory", "free GiB", 0.9)
    assert "\x1b[1;33mWARN:" in shown(bad, 80, terminal=True, colours=True) and "\x1b" not in shown(bad, 80)


MODEL_80 = """
model            LlamaForCausalLM, 32 layers, 32 heads and 8 KV heads of 128,
                 vocabulary 128,256, chat template
weights          14.958 GiB (16,060,522,496 bytes), bfloat16
KV per token     131,072 bytes in bf16, 67,584 in int8 (--kv-cache-dtype int8)
longest context  98,304 tokens, limited by memory, of the model's 131,072;
                 --kv-cache-tokens 131072 for more
KV cache         98,304 tokens, a quarter of the free memory

requests at once, by tokens of each with its answer (more where prompts begin alike)
   tokens  bf16  int8  bf16, all free memory  int8, all free memory
    2,048    48    93                    131                    254
    8,192    12    23                     32                     63
   32,768     3     5                      8                     15
  131,072     0     1                      2                      3
  at most 256 run at once (--max-sequences)
"""


def test_a_model() -> None:
    text = shown(with_model(), 80)
    assert MODEL_80 in text and text.startswith("OK: this machine serves llama with")
    wide = shown(with_model(), 120)
    assert MODEL_80.partition("requests at once")[2] in wide, "the table needs no more room"
    assert "  98,304 tokens, limited by memory, of the model's 131,072; --kv-cache-tokens 131072 for more\n" in wide


def test_everything() -> None:
    text = shown(with_model(), 80, verbose=True)
    for title, rows in with_model().items():
        assert f"\n\n{title}\n" in text
        assert all(f"\n  {name} " in text for name, value in rows.items() if not isinstance(value, list))
    assert (
        "  read bandwidth GB/s         48.2\n" in text
        and "  KV cache tokens                           98,304\n" in text
    )
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("kernels", "C++ kernels", "not available: extension not built: no compiler",
         "the C++ kernels are not available: extension not built: no compiler, and torch computes several times "
         "slower: install a C++ compiler (g++ or clang) and then Headrace again: pip install -e ."),
        ("kernels", "C++ kernels", "available (avx2)",
         "HEADRACE_ISA has the kernels use avx2, and this processor has avx512bf16: unset HEADRACE_ISA"),
        ("kernels", "kernels", "cannot be used: broken", "the kernels cannot be used: broken: install Headrace again"),
        ("processor", "CPU quota of the container", 1.5,
         "the container's CPU quota is 1.5 cores, so 8 threads are paused now and then: "
         "give it whole cores: docker run --cpus 8"),
        ("processor", "torch threads", 1,
         "1 of 8 usable cores compute (torch chose so): unset OMP_NUM_THREADS, or give --threads 8"),
        ("processor", "load of the machine's cores", 2.25,
         "other work is running, 2.2 tasks for each core: answers take longer meanwhile, and figures are worth little"),
        ("memory", "free GiB", 0.9, "only 0.9 GiB of memory are free: end other processes, or take small models"),
        ("memory", "transparent huge pages", "never",
         "huge pages are off, which costs 5 to 20 % of decoding: "
         "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        ("ranks", "ranks on this host", 9, "9 ranks share 8 cores and take turns: ask for at most 8 on this machine"),
        ("ranks", "ranks", "cannot be started: no interface 10.0.0.1",
         "the environment's settings cannot work: no interface 10.0.0.1"),
        ("tiers", "disk", "/kv CANNOT BE USED: Permission denied",
         "disk /kv cannot be used: Permission denied: give --kv-offload-path a directory that can be written"),
        ("tiers", "host memory", "64 of 21.9 GiB free: MORE THAN IS FREE",
         "host memory 64 of 21.9 GiB free: more than is free: lower --kv-offloading-size"),
        ("settings", "HEADRACE_PROT", settings.UNKNOWN + "; did you mean HEADRACE_PORT?",
         "HEADRACE_PROT is set, and nothing reads it: did you mean HEADRACE_PORT?"),
    ],
)  # fmt: skip
def test_each_finding_has_its_remedy(section: str, name: str, value: Any, told: str) -> None:
    found = changed(section, name, value)
    assert [str(each) for each in warnings(found)] == [told]
    assert shown(found, 80).splitlines()[:2] == [
        shown(found, 80).splitlines()[0].replace("OK", "WARN").removesuffix("; 1 finding:") + "; 1 finding:",
        f"  - {told}",
    ]


def test_settings_that_cannot_work_are_told_once() -> None:
    found = changed("ranks", "ranks", "cannot be started: both")
    found["tiers"]["tiers"] = "cannot be used: both"
    assert [str(each) for each in warnings(found)] == ["the environment's settings cannot work: both"]


def test_kernels_of_several_kinds() -> None:
    text = shown(changed("kernels", "linear", "torch: not built"), 80)
    assert "kernels      attend, layer: C++ avx512bf16\n             linear: torch: not built\n" in text


def test_variables_and_their_secrets() -> None:
    told = settings.findings({"HEADRACE_PORT": "1", "HEADRACE_PROT": "1", "HEADRACE_API_KEY": "s", "PATH": "/",
                              "HEADRACE_KV_REMOTE_URL": "redis://u:p@h", "HEADRACE_RANK_SECRET": "s"})  # fmt: skip
    assert told == {
        "HEADRACE_API_KEY": "set", "HEADRACE_KV_REMOTE_URL": "set", "HEADRACE_PORT": "1",
        "HEADRACE_PROT": settings.UNKNOWN + "; did you mean HEADRACE_PORT?", "HEADRACE_RANK_SECRET": "set",
    }  # fmt: skip
    assert settings.findings({}) == {"variables": "none: every setting by default"}


def test_what_fits() -> None:
    rooms = model.room(FACTS, EngineConfig(kv_cache_tokens=10_000, max_sequences=3), 48 * GIB, WEIGHTS)
    assert rooms["longest context here"] == 9984 and rooms["longest context is limited by"] == "kv_cache_tokens"
    assert rooms["requests at once"][0]["by default, bf16"] == 3, "no more than max_sequences"
    assert rooms["requests at once"][1]["by default, bf16"] == 1
    bounded = model.room(FACTS, EngineConfig(max_model_len=5000), 48 * GIB, WEIGHTS)
    assert (bounded["longest context here"], bounded["longest context is limited by"]) == (5000, "max_model_len")
    assert [row["tokens"] for row in bounded["requests at once"]] == [2048, 5000]
    full = model.room(FACTS, EngineConfig(dtype="float32"), 48 * GIB, WEIGHTS)
    assert full["KV bytes per token (as computed)"] == full["KV bytes per token (fp32)"] == "262,144"
    assert kv_per_token(full) == "262,144 bytes in fp32, 67,584 in int8"
    assert "by default, fp32" in full["requests at once"][0]
    short = warnings(with_model(free=16 * GIB, kv_cache_tokens=1024))
    assert [each.finding for each in short] == ["the longest context here is 1,024 tokens"]


def test_a_model_larger_than_memory_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'tiny' cannot be served here: its weights take 0.0 GiB, and 0.1 GiB are free"
    ):
        model.check_model("tiny", free=GIB // 8)


def test_json_has_the_verdict_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "findings", lambda: changed("memory", "free GiB", 0.9))
    doctor.run(None, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert list(told)[:2] == ["verdict", "warnings"] and set(FOUND) < set(told)
    remedy = "end other processes, or take small models"
    assert told["verdict"] == "WARN"
    assert told["warnings"] == [{"finding": "only 0.9 GiB of memory are free", "remedy": remedy}]


def test_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path / "enabled")
    assert machine._huge_pages() == "unknown"
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert machine._huge_pages() == "never"
