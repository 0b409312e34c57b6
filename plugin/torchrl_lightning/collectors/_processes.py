"""A pool of worker processes: started together, read in turn, ended together."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

from tensordict import TensorDict

from torchrl_lightning.collectors._shared import SharedWeights
from torchrl_lightning.collectors._worker import WorkerTask, run_worker


class WorkerPool:
    """Worker processes and the rollouts that they pass through shared memory.

    Each worker has its own pipe, so that a process that is killed cannot keep a common lock.

    Args:
        payloads: The pickled environment, policy and arguments of each worker.
        batches: How many batches each worker collected in earlier runs.
        slots: How many rollouts each worker may have in flight.
        weights: Shared memory from which the workers read their weights.
        shape: ``[T, N]`` of a rollout.
    """

    def __init__(
        self,
        payloads: Sequence[bytes],
        batches: Sequence[int],
        slots: int,
        weights: SharedWeights,
        shape: Sequence[int],
    ) -> None:
        self._shape = list(shape)
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        self._slots: list[list[TensorDict]] = []
        context = multiprocessing.get_context("spawn")
        try:
            for worker, (payload, before) in enumerate(zip(payloads, batches, strict=True)):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                self._slots.append([])
                task = WorkerTask(payload, before, worker, len(payloads), slots, os.getpid())
                process = context.Process(
                    target=run_worker, args=(task, weights, theirs), name=f"collector-{worker}", daemon=True
                )
                with _without_interrupts():
                    process.start()
                theirs.close()  # so that the pipe ends when the worker does
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def receive(self, worker: int) -> TensorDict:
        """Wait for a worker's next rollout and return a copy, time-major ``[T, N]``.

        Raises:
            RuntimeError: The worker failed or died.
        """
        while True:
            kind, content = self._message(worker)
            if kind == "rollout":
                rollout = self._slots[worker][content].clone()
                self._send(worker, content)
                return rollout
            if kind == "error":
                raise RuntimeError(f"Collector worker {worker} failed:\n\n{content}")
            self._slots[worker] = [_as_tensordict(leaves, self._shape) for leaves in content]
            self._send(worker, 0)

    def close(self) -> None:
        """End all processes; terminate those that do not exit within a second."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._slots = [], [], []

    def _message(self, worker: int) -> tuple[str, Any]:
        connection, process = self._connections[worker], self._processes[worker]
        multiprocessing.connection.wait([connection, process.sentinel])
        try:
            # A worker that has exited may have left its last message in the pipe.
            if connection.poll():
                message: tuple[str, Any] = connection.recv()
                return message
        except (EOFError, OSError):
            pass
        process.join(1.0)
        raise RuntimeError(
            f"Collector worker {worker} died with exit code {process.exitcode}. A negative code is the signal that "
            "killed it; -9 is often the system's memory limit."
        )

    def _send(self, worker: int, message: int) -> None:
        with suppress(OSError):  # if the worker has died, reading its next message reports that
            self._connections[worker].send(message)


def _as_tensordict(leaves: dict[Any, Any], shape: list[int]) -> TensorDict:
    result = TensorDict({}, shape)
    for key, value in leaves.items():
        result[key] = value
    return result


@contextmanager
def _without_interrupts() -> Iterator[None]:
    # The process inherits the mask, so that Ctrl-C cannot hit it during its imports; here Ctrl-C is only delayed.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # if it started within the block, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
