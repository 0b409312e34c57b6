"""Worker processes of the asynchronous collector, and their shared memory."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_lightning._core.import_stubs import CollectingTarget
from torchrl_lightning._core.processes import (
    check_descriptors,
    end_processes,
    end_with_parent,
    exit_description,
    is_main_thread,
    resource_error,
)
from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.environments.env_errors import EnvironmentFault, WorkerFault
from torchrl_lightning.environments.workers.time_limits import TimedCalls, set_overdue_handler

_PATIENCE = 30.0  # seconds; a copy takes milliseconds, so a process that holds the lock longer has died
_ENTRIES = 8  # minimum number of entries of a rollout; each is a separate file in shared memory
_NO_LIMIT, _AFTER_SIGTERM = 1e6, 8.0  # time limits of a rollout in seconds
_FAULT_EXIT_CODE = 1  # exit code of a worker after it sent a fault


class SharedWeights:
    """A copy of a module's parameters and buffers in one block of shared memory, with a version number.

    Pass it as an argument when you start a process.
    """

    def __init__(self, module: object, version: int) -> None:
        self._weights = TensorDict(_tensors(module)).to("cpu").consolidate(share_memory=True)
        self._version = torch.tensor(version).share_memory_()
        self._lock: Any = multiprocessing.get_context("spawn").Lock()

    def publish(self, module: object, version: int) -> None:
        """Copy a module's weights into shared memory as a new version."""
        with self._locked():
            for name, value in _tensors(module).items():
                self._weights[name].copy_(value)
            self._version.fill_(version)

    def fetch(self, module: object, known: int) -> int:
        """Copy the published weights into a module, unless ``known`` is their version; return their version."""
        with self._locked():
            version = int(self._version.item())
            if version != known:
                for name, value in _tensors(module).items():
                    value.copy_(self._weights[name])
        return version

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_PATIENCE):
            raise RuntimeError("A process died while it copied the policy's weights. Restart the collector.")
        try:
            yield
        finally:
            self._lock.release()


def _tensors(module: object) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        return {}  # a policy without weights
    return {name: value.detach() for name, value in module.state_dict().items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class WorkerTask:
    """Start arguments of a worker process."""

    payload: bytes  # the pickled environment, policy and keyword arguments of its GymnasiumCollector
    num_begun: int  # number of rollouts that the worker began before this start
    worker: int  # index of the worker
    num_workers: int
    slots: int  # maximum number of rollouts in flight
    parent: int  # id of the parent process; the worker ends with it
    by_signal: bool  # True if the parent's main thread starts the worker


def run_worker(task: WorkerTask, weights: SharedWeights, connection: Connection) -> None:
    """Collect rollouts into shared memory until the parent closes the connection or sends ``None``.

    The worker sends ``("slots", [TensorDict])`` once, then ``("rollout", slot)`` for each rollout. After an error it
    sends ``("fault", EnvironmentFault)`` or ``("error", text)``. The parent sends the index of a released slot, a byte
    tensor with pickled replay changes, or ``None`` to end the worker.
    """
    end_with_parent(task.parent, task.by_signal)
    set_overdue_handler(lambda line: connection.send(("fault", WorkerFault(line))))
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _collect(task, weights, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has exited or closed the connection
    except EnvironmentFault as fault:
        with suppress(OSError):
            connection.send(("fault", fault.to_remote()))
        sys.exit(_FAULT_EXIT_CODE)
    except BaseException as error:
        reason = resource_error(error)
        message = ("error", traceback.format_exc()) if reason is None else ("fault", WorkerFault(reason))
        with suppress(OSError):
            connection.send(message)
    finally:
        connection.close()


def _collect(task: WorkerTask, weights: SharedWeights, connection: Connection) -> None:
    worker = Worker(task.payload, task.worker, task.num_workers, task.num_begun)
    free = list(range(task.slots))
    slots: list[TensorDict] = []
    version = -1
    try:
        while True:
            while not free or connection.poll():
                message = connection.recv()
                if message is None:
                    return worker.collector.shutdown()
                if isinstance(message, Tensor):
                    worker.apply_delta(message.numpy().tobytes())
                else:
                    free.append(message)
            version = weights.fetch(worker.policy, version)
            rollout = worker.rollout(version)
            if not slots:
                slots = [rollout.transpose(0, 1).clone().share_memory_() for _ in range(task.slots)]
                connection.send(("slots", slots))
                while isinstance(message := connection.recv(), Tensor):
                    worker.apply_delta(message.numpy().tobytes())
                if message is None:  # any other message means that the parent has mapped the slots
                    return worker.collector.shutdown()
            slot = free.pop(0)
            slots[slot].update_(rollout.transpose(0, 1))
            connection.send(("rollout", slot))
    finally:
        worker.collector.shutdown(raise_on_error=False)


class WorkerPool:
    """Worker processes that pass rollouts through shared memory.

    Each worker has a separate pipe, so a killed process cannot hold a common lock. ``payloads`` and ``num_begun`` have
    one entry for each worker. ``slots`` is the maximum number of rollouts in flight per worker.
    """

    def __init__(self, payloads: Sequence[bytes], num_begun: Sequence[int], slots: int, weights: SharedWeights) -> None:
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._slots: list[list[TensorDict]] = []
        context = multiprocessing.get_context("spawn")
        check_descriptors(len(payloads), 2 + _ENTRIES * slots)
        self._waiting = TimedCalls(_NO_LIMIT, _AFTER_SIGTERM)
        try:
            for worker, (payload, begun_rollouts) in enumerate(zip(payloads, num_begun, strict=True)):
                parent_end, child_end = context.Pipe()
                self._connections.append(parent_end)
                self._slots.append([])
                task = WorkerTask(payload, begun_rollouts, worker, len(payloads), slots, os.getpid(), is_main_thread())
                target = CollectingTarget(f"{__name__}:{run_worker.__name__}")
                arguments = task, weights, child_end
                process = context.Process(target=target, args=arguments, name=f"collector-{worker}", daemon=True)
                with _without_interrupts():
                    process.start()
                child_end.close()  # so that the pipe closes when the worker exits
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def receive(self, worker: int) -> TensorDict:
        """Return a copy ``[T, N]`` of a worker's next rollout; raise RuntimeError if the worker failed or died."""
        while True:
            kind, content = self._message(worker)
            if kind == "rollout":
                rollout = self._slots[worker][content].clone()
                self._send(worker, content)
                return rollout
            if kind == "fault":
                raise content.with_prefix(f"In collector worker {worker}: ")
            if kind == "error":
                raise RuntimeError(f"Collector worker {worker} failed:\n\n{content}")
            self._slots[worker] = content
            self._send(worker, 0)

    def send_delta(self, worker: int, delta: bytes) -> None:
        """Send pickled replay changes to a worker, which applies them before its next rollout."""
        # Use shared memory, because a full pipe would block the parent until the worker has finished its rollout.
        self._send(worker, torch.frombuffer(bytearray(delta), dtype=torch.uint8).share_memory_())

    def close(self) -> None:
        """End all processes; terminate every process that does not exit within a second.

        Raises:
            EnvironmentFault: an environment failed to close.
        """
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        end_processes(self._processes, 1.0)
        errors = []
        for worker, (process, connection) in enumerate(zip(self._processes, self._connections, strict=False)):
            with suppress(Exception):  # receiving tensors fails if their process has already exited
                while process.exitcode == _FAULT_EXIT_CODE and connection.poll():
                    kind, content = connection.recv()
                    if kind == "fault":
                        errors.append(content.with_prefix(f"In collector worker {worker}: "))
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._slots = [], [], []
        if errors:
            raise errors[0]

    def _message(self, worker: int) -> tuple[str, Any]:
        connection, process = self._connections[worker], self._processes[worker]
        with self._waiting.running():
            multiprocessing.connection.wait([connection, process.sentinel])
        try:
            # The last message of an exited worker may still be in the pipe.
            if connection.poll():
                message: tuple[str, Any] = connection.recv()
                return message
        except (EOFError, OSError):
            pass
        raise WorkerFault(f"Collector worker {worker} {exit_description(process)}")

    def _send(self, worker: int, message: int | Tensor) -> None:
        with suppress(OSError):  # reading the next message reports a dead worker
            self._connections[worker].send(message)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    # The child inherits the signal mask, so Ctrl-C cannot interrupt its imports. In this process Ctrl-C is delayed.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # if the tracker started within the block, it would remove the mask
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
