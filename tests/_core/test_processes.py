"""Processes end with their parent process or on request, whatever their environments do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.forks import Forked, forked_workers
from kit.misbehaving import Fault, Misbehaving, insists
from kit.processes import members, survivors
from torchrl_lightning._core.processes import end_processes
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


def hangs_in_a_worker(make: Callable[[Any], Any], in_thread: bool) -> None:
    def hang() -> None:
        sys.stdout.write("hangs\n")
        sys.stdout.flush()
        insists()

    def collect() -> None:
        with forked_workers():
            make(partial(Misbehaving, Fault("step", "", hang))).rollout()

    if in_thread:
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
    else:
        collect()


COLLECTORS: dict[str, Callable[[Any], Any]] = {
    "async": lambda env: GymnasiumCollector(env, frames_per_batch=4, vectorization="async"),
    "workers": lambda env: AsynchronousCollector(env, num_workers=1, frames_per_batch=4),
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("kind", COLLECTORS)
def test_workers_end_with_their_parent_while_an_environment_hangs(kind: str, in_thread: bool, tmp_path: Path) -> None:
    end_with_its_leader(Forked(partial(hangs_in_a_worker, COLLECTORS[kind], in_thread), tmp_path, session=True))


def end_with_its_leader(process: Forked) -> None:
    """Kill the first process of a session while another one hangs; check that all processes end."""
    try:
        process.waits_for(lambda: "hangs" in process.said, 30)
        assert len(members(process.pid)) > 1
        process.send(signal.SIGKILL)
        process.ends(10)
        assert survivors(process.pid, 10) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)


def reads_and_hangs() -> None:
    def read(buffer: ExperienceBuffer) -> None:
        buffer.sample(1)
        sys.stdout.write("hangs\n")
        sys.stdout.flush()
        insists()

    buffer = ExperienceBuffer(storage=RingStorage(4), batch_size=1)
    buffer.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    process = multiprocessing.get_context("fork").Process(target=read, args=(buffer.share(),))
    process.start()
    process.join()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_reader_of_a_shared_buffer_ends_with_its_parent(tmp_path: Path) -> None:
    end_with_its_leader(Forked(reads_and_hangs, tmp_path, session=True))


def _ignores_what_it_is_told() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def test_process_that_does_not_end_is_killed() -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=does, daemon=True)
        for does in (_ignores_what_it_is_told, lambda: None)
    ]
    for process in processes:
        process.start()
    time.sleep(0.1)
    end_processes(processes, 0.1)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0]


SHARED = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
LACKS: dict[str, tuple[Exception, str]] = {
    "files": (OSError(errno.EMFILE, "Too many open files"), r"no more files can be opened .*ulimit -n"),
    "processes": (
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        r"cannot start more processes .*ulimit -u",
    ),
    "torch's shared memory": (RuntimeError(SHARED), r"/dev/shm.* is full .*--shm-size"),
    "read-only shared memory": (OSError(errno.EROFS, "Read-only", "/dev/shm/pym-1"), r"/dev/shm.* cannot be written"),
    "disk": (OSError(errno.ENOSPC, "No space left on device", "x.ckpt"), r"No space left on device: 'x.ckpt'"),
}


@pytest.mark.parametrize("name", LACKS)
def test_missing_system_resource_is_reported_in_one_line(name: str) -> None:
    error, message = LACKS[name]
    with pytest.raises(SystemExit, match=rf"^error.*{message}"), exit_with_one_line():
        raise error


@pytest.mark.parametrize("error", [RuntimeError("another"), OSError(errno.EIO, "broken"), PermissionError(13, "no")])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, exit_with_one_line():
        raise error
    assert raised.value is error


def raise_lack(steps: TensorDict) -> TensorDict:
    raise RuntimeError(SHARED)


def test_worker_without_shared_memory_reports_it() -> None:
    with forked_workers():
        collector = AsynchronousCollector("CartPole-v1", raise_lack, num_workers=1, frames_per_batch=4)
        with pytest.raises(ValueError, match="0: /dev/shm") as error:
            collector.rollout()
        collector.shutdown(raise_on_error=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", COLLECTORS.values(), ids=COLLECTORS)
def test_descriptor_limit_is_checked_before_processes_start(make: Callable[[Any], Any]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"need about \d+ open files, but the limit is \d+\. .*ulimit -n \d+"):
            make("CartPole-v1").rollout()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not multiprocessing.active_children()
