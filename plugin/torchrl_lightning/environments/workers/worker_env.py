"""Gymnasium vector environment with one process for each copy, the pipes to the processes, and their errors."""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import wait
from operator import itemgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from torchrl_lightning._core.processes import (
    check_descriptors,
    end_processes,
    end_with_parent,
    exit_description,
    is_main_thread,
)
from torchrl_lightning.environments.env_errors import (
    EnvironmentFault,
    WorkerFault,
    env_errors,
    guard_calls,
    reraise_as_env_error,
)
from torchrl_lightning.environments.workers.time_limits import OverdueError, TimedCalls, set_overdue_handler

_PATIENCE = 5.0  # seconds for a process to close its environment
Factory = Callable[[], gymnasium.Env[Any, Any]]


_STEP, _STEPPED = b"s", b"r"  # first byte of messages that are not pickled; pickles begin with another byte
_RESULT = struct.Struct("d??")


class StepPipe:
    """A connection that sends actions, rewards and end flags as bytes, and pickles other messages.

    If observations are in shared memory, only a non-empty info is pickled, because pickling would take most of the
    message's time.

    Args:
        connection: One end of a pipe.
        space: The action space; actions that are not a single array are pickled.

    Examples:
        >>> from multiprocessing import Pipe
        >>> ours, theirs = (StepPipe(end, spaces.Discrete(3)) for end in Pipe())
        >>> ours.send(("step", np.int64(2)))
        >>> theirs.recv()
        ('step', np.int64(2))
        >>> theirs.send(((None, 1.0, False, True, {}), True))
        >>> ours.recv()
        ((None, 1.0, False, True, {}), True)
    """

    def __init__(self, connection: Any, space: spaces.Space[Any]) -> None:
        self._connection = connection
        is_array = isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        self._dtype = np.dtype(space.dtype) if is_array else None
        self._shape = space.shape or ()
        self._is_box = isinstance(space, spaces.Box)
        self._steps = False  # whether the last received message was a step

    def send(self, message: Any) -> None:
        """Send a command or its result."""
        kind, content = message
        is_array = self._dtype is not None and isinstance(content, np.ndarray | np.generic)
        if kind == "step" and is_array and content.dtype == self._dtype:
            return self._connection.send_bytes(_STEP + content.tobytes())
        if self._steps and content:
            observation, reward, terminated, truncated, info = kind
            try:
                result = _RESULT.pack(reward, terminated, truncated)
            except struct.error:
                return self._connection.send(message)
            if observation is None:
                return self._connection.send_bytes(_STEPPED + result + (pickle.dumps(info) if info else b""))
        return self._connection.send(message)

    def recv(self) -> Any:
        """Receive a command or its result."""
        data = self._connection.recv_bytes()
        kind = data[:1]
        self._steps = kind == _STEP
        if kind == _STEP:
            action = np.frombuffer(data, self._dtype, offset=1).reshape(self._shape)
            return "step", action.copy() if self._is_box or self._shape else action[()]
        if kind == _STEPPED:
            end = 1 + _RESULT.size
            info = pickle.loads(data[end:]) if len(data) > end else {}
            return (None, *_RESULT.unpack(data[1:end]), info), True
        return pickle.loads(data)

    @property
    def closed(self) -> bool:
        """Return whether the connection is closed."""
        return bool(self._connection.closed)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Return whether a message has arrived."""
        return bool(self._connection.poll(timeout))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class WorkerVectorEnv(AsyncVectorEnv):
    """An ``AsyncVectorEnv`` in mode ``SAME_STEP`` with one-line errors that name the failed environment.

    Its processes end when this process ends. They have five seconds to close their environments. ``step_timeout``
    limits the wait for a process that has stopped.
    """

    processes: list[Any] = []  # empty until the processes start

    def __init__(self, factories: Sequence[Factory], step_timeout: float | None = None) -> None:
        # Each process limits its own calls. This longer limit applies if a process cannot end its call.
        self._wait_limit = None if step_timeout is None else TimedCalls(2 * step_timeout + _PATIENCE)
        check_descriptors(len(factories), 2)  # two for each process: a pipe and a sentinel
        try:
            # copy=False: the caller copies each observation into its own memory immediately.
            with env_errors("close"):  # Gymnasium makes and closes one environment here
                super().__init__(
                    [partial(_make_guarded, factory, index) for index, factory in enumerate(factories)],
                    copy=False,
                    context="spawn",
                    worker=partial(_run_environment, os.getpid(), is_main_thread()),
                    autoreset_mode=AutoresetMode.SAME_STEP,
                )
        except BaseException:
            self.closed = True
            end_processes(self.processes, 0.0)
            raise
        pipes: Any = [StepPipe(pipe, self.single_action_space) for pipe in self.parent_pipes]
        self.parent_pipes = pipes

    def reset_async(self, seed: Any = None, options: Any = None) -> None:
        """Send every process a reset."""
        try:
            super().reset_async(seed, options)
        except OSError as error:
            raise self._exit_error() from error

    def reset_wait(self, timeout: float | None = None) -> Any:
        """Wait for the resets."""
        try:
            with nullcontext() if self._wait_limit is None else self._wait_limit.running():
                return super().reset_wait(timeout)
        except OverdueError as error:
            raise self._timeout_error("reset") from error
        except (EOFError, OSError) as error:
            raise self._exit_error() from error

    def step_async(self, actions: Any) -> None:
        """Send every process a step."""
        try:
            super().step_async(actions)
        except OSError as error:
            raise self._exit_error() from error

    def step_wait(self, timeout: float | None = None) -> Any:
        """Wait for the steps."""
        try:
            with nullcontext() if self._wait_limit is None else self._wait_limit.running():
                return super().step_wait(timeout)
        except OverdueError as error:
            raise self._timeout_error("step") from error
        except (EOFError, OSError) as error:
            raise self._exit_error() from error

    def _check_spaces(self) -> None:
        try:
            super()._check_spaces()
        except (EOFError, OSError) as error:
            raise self._exit_error() from error

    def _exit_error(self) -> EnvironmentFault:
        """Return the fault that an ended process has sent, or a fault with the reason for its end."""
        ended = wait([process.sentinel for process in self.processes], _PATIENCE)
        if not self.error_queue.empty():
            return self._receive_fault(1)
        index = next(index for index, process in enumerate(self.processes) if process.sentinel in ended)
        return WorkerFault(f"the process of environment {index} {exit_description(self.processes[index])}")

    def _timeout_error(self, call: str) -> EnvironmentFault:
        index = next((index for index, pipe in enumerate(self.parent_pipes) if not pipe.poll()), 0)
        end_processes(self.processes, 0.0)
        return WorkerFault(
            f"the process of environment {index} did not return from {call} in time and was terminated. Fix the "
            "environment, or increase step_timeout of its recipe."
        )

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        failed = [index for index, success in enumerate(successes) if not success]
        if failed:
            self._state = AsyncState.DEFAULT
            raise self._receive_fault(len(failed))

    def _receive_fault(self, count: int) -> EnvironmentFault:
        """Receive the faults of ``count`` failed processes, and return the fault of the first environment."""
        received = sorted([self.error_queue.get(timeout=_PATIENCE) for _ in range(count)], key=itemgetter(0))
        for index, *_ in received:
            self.parent_pipes[index].close()
        fault: EnvironmentFault = received[0][1]
        return fault

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close every environment and end the processes, immediately if ``terminate``, else after a grace period."""
        for pipe in self.parent_pipes:
            with suppress(OSError):  # the process has died, or its pipe was closed with its fault
                pipe.send(("close", None))
        end_processes(self.processes, 0.0 if terminate else _PATIENCE)
        for pipe in self.parent_pipes:
            pipe.close()
        self.closed = True
        if not self.error_queue.empty():
            raise self._receive_fault(1)


def _make_guarded(factory: Factory, index: int) -> gymnasium.Env[Any, Any]:
    env = factory()
    guard_calls(env, index, checks=True)
    return env


def _run_environment(
    parent: int,
    by_signal: bool,
    index: int,
    factory: Factory,
    pipe: Any,
    parent_pipe: Any,
    shared: Any,
    errors: Any,
    mode: AutoresetMode,
    semaphore: Any,
) -> None:
    """Run one environment like Gymnasium's worker, and send its errors as faults."""
    end_with_parent(parent, by_signal)
    # Ctrl-C reaches the whole process group; the parent ends the processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fault_queue: Any = _FaultQueue(errors)

    def report_overdue(message: str) -> None:
        fault_queue.put((index, WorkerFault, WorkerFault(message), ""))
        errors.close()
        errors.join_thread()
        pipe.send((None, False))

    set_overdue_handler(report_overdue)
    try:
        env = factory()
    except Exception as error:
        fault_queue.put((index, type(error), error, ""))
        pipe.recv()
        pipe.send((None, False))
        return
    steps: Any = StepPipe(pipe, env.action_space)
    try:
        with env_errors("close", index=index):
            _async_worker(index, lambda: env, steps, parent_pipe, shared, fault_queue, mode, semaphore)
    except EnvironmentFault as fault:
        fault_queue.put((index, type(fault), fault, ""))


class _FaultQueue:
    """An error queue that sends faults of an environment instead of the exceptions that Gymnasium caught."""

    def __init__(self, errors: Any) -> None:
        self._errors = errors

    def put(self, caught: tuple[int, type[Exception], Exception, str]) -> None:
        index, kind, error, _ = caught
        try:
            reraise_as_env_error(error, "step", f"environment {index}")
            if not isinstance(error, EnvironmentFault):
                error = WorkerFault(f"the process of environment {index} failed: {kind.__name__}: {error}")
        except EnvironmentFault as fault:
            error = fault
        self._errors.put((index, error.to_remote()))
