"""What is said of a disk, and of processes that ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine import messages, preflight, process, worker
from headrace.engine.capacity import model_folder
from headrace.host import told_signal
from headrace.models.plain_config import plain_config

pytestmark = pytest.mark.unit

KILLED = " by SIGKILL (out of memory? the kernel's log, `dmesg`, tells)"


def test_a_disk_with_less_room_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preflight.check(EngineConfig(kv_offload_path=str(tmp_path / "kv"), kv_offload_disk_size="1000000TiB"))
    assert "GiB is more than the disk of" in caplog.text and "are free" in caplog.text
    assert os.listdir(tmp_path / "kv") == []
    caplog.clear()
    preflight.check(EngineConfig(kv_offload_path=str(tmp_path / "kv"), kv_offload_disk_size="1MiB"))
    assert not caplog.records


def test_only_a_gpu_multiplies_fp8() -> None:
    model = plain_config(model_folder("tiny"))
    with pytest.raises(ValueError, match="only a GPU multiplies FP8; set attention_backend 'triton', or use w8a8"):
        preflight.check_fit(EngineConfig(quantization="fp8_rowwise"), model)
    preflight.check_fit(EngineConfig(attention_backend="triton", quantization="fp8_rowwise"), model)


@pytest.mark.parametrize(
    ("script", "told"), [("kill -KILL $$", KILLED), ("kill -SEGV $$", " by SIGSEGV"), ("exit 3", " with code 3")]
)
def test_how_a_process_ended(script: str, told: str) -> None:
    made = subprocess.Popen(["sh", "-c", script])
    assert process.how_ended(made, 10) == told  # before it is waited for
    made.wait()
    assert process.how_ended(made, 0) == told


def test_a_process_that_goes_on_has_not_ended() -> None:
    made = subprocess.Popen(["sleep", "60"])
    try:
        assert process.how_ended(made, 0.02) == ""
    finally:
        made.kill()
        made.wait()


def test_signals_without_a_name() -> None:
    assert told_signal(signal.SIGTERM) == "SIGTERM" and told_signal(200) == "signal 200"


@pytest.mark.parametrize(
    ("error", "serving", "told"),
    [
        (ValueError("the checkpoint"), False, messages.EngineFailed("the checkpoint", True)),
        (MemoryError("no room"), False, messages.EngineFailed("MemoryError: no room", False)),
        (KeyError("x"), True, messages.EngineFailed("KeyError: 'x'", False)),
    ],
)
def test_what_stops_an_engine_from_loading_is_told_without_a_traceback(
    error: Exception, serving: bool, told: messages.EngineFailed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert worker._failure(error, serving=serving) == told
    assert [record.levelno for record in caplog.records] == [logging.ERROR if serving else logging.DEBUG]
