"""Report errors and invalid return values of environments in one line, with the environment's number and the step.

Code that calls one of several environments stores the environment's number in :data:`position`.
:func:`reraise_as_env_error` turns an error of a call into an :class:`EnvironmentFault`. The loop over the steps adds
the number of the step with :meth:`EnvironmentFault.with_prefix`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import format_exception, walk_tb
from types import FrameType
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from torchrl_lightning._core.errors import UserError
from torchrl_lightning.environments.copies import copied

_CALLS = {"reset": "reset", "step": "step", "_reset": "reset", "_step": "step", "close": "close"}
_RETURNS = {"reset": "(observation, info)", "step": "(observation, reward, terminated, truncated, info)"}
# Modules that call environments (_CALLERS), and Gymnasium's modules that wrap environments (_AROUND).
_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = ("contextlib", "functools", "multiprocessing", "numpy", "tensordict", "torch", "torchrl")
_CALLERS = (*_LIBRARIES, "gymnasium.vector", _PACKAGE)
_WRAPPERS = ("gymnasium.core", "gymnasium.utils", "gymnasium.wrappers", "gymnasium.envs.registration")


class Position(threading.local):
    """The last environment that a thread called, and its step in the rollout; None if unknown."""

    environment: int | None = None
    step: int | None = None


position = Position()


class EnvironmentFault(UserError):
    """An environment violated its interface; the message is one line with the environment's number and a remedy.

    An exception of the environment becomes the cause; its traceback contains only frames of the environment's code.
    """

    def with_prefix(self, prefix: str) -> Self:
        """Put a prefix in front of the message, and return the fault."""
        self.args = (f"{prefix}{self}",)
        return self

    def to_remote(self) -> WorkerFault:
        """Return the fault in a form for another process, with the cause as a note."""
        fault = WorkerFault(str(self))
        if self.__cause__ is not None:
            fault.add_note("".join(format_exception(self.__cause__)))
        return fault


class WorkerFault(EnvironmentFault, RuntimeError):
    """A process that steps environments failed or died."""


@contextmanager
def env_errors(call: str, subject: str = "the environment", index: int | None = None) -> Iterator[None]:
    """Apply :func:`reraise_as_env_error` to errors of a block that calls the environment with number ``index``."""
    position.environment = index
    try:
        yield
    except (Exception, SystemExit) as error:
        reraise_as_env_error(error, call, subject)
        raise


def reraise_as_env_error(error: BaseException, call: str, subject: str = "the environment") -> None:
    """Raise an EnvironmentFault for an error of an environment; return if the environment did not cause it.

    The message has the number of the environment at :data:`position`. An error in the calling code is also a fault of
    the environment, because the calling code could not use the returned values.

    Args:
        error: the exception of a call of one or several environments.
        call: ``make``, ``reset``, ``step`` or ``close``; the traceback of the error may name another call.
        subject: the name of the environment if its number is not known.

    Examples:
        >>> with env_errors("step", index=3):
        ...     _, _, _, _, _ = (0, 1.0, False)
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.env_errors.EnvironmentFault: environment 3 returned invalid values from \
step: not enough values to unpack (expected 5, got 3); expected (observation, reward, terminated, truncated, info). \
Fix its step.
    """
    if isinstance(error, UserError) or (isinstance(error, SystemExit) and type(error) is not SystemExit):
        return  # the error is already reported, or must end the process after SIGTERM
    trace, innermost = error.__traceback__, [frame for frame, _ in walk_tb(error.__traceback__)][-1]
    if (call == "make" and not isinstance(error, TimeoutError)) and (
        isinstance(error, ImportError | gymnasium.error.Error)
        or _is_in_modules(innermost, ("gymnasium", "torchrl", _PACKAGE))
    ):
        return  # the caller reports it
    while trace is not None and _is_in_modules(trace.tb_frame, _CALLERS):
        trace = trace.tb_next
    index = position.environment
    names = (frame.f_code.co_name for frame, _ in walk_tb(trace))
    call = next((_CALLS[name] for name in names if name in _CALLS), call)
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(trace)
        if not _is_in_modules(frame, (*_CALLERS, *_WRAPPERS))
    ]
    subject = subject if index is None else f"environment {index}"
    detail = " ".join(str(error).split()).rstrip(".")
    if frames:
        file, line = ([location for location in frames if not _is_installed(location[0])] or frames)[-1]
        where = f"{call} ({file.replace(chr(92), '/').rpartition('/')[2]}, line {line})"
        cause = f"{type(error).__name__} in {where}" + (f": {detail}" if detail else "")
        raise EnvironmentFault(f"{subject} raised {cause}. Fix the environment there.") from error.with_traceback(trace)
    if call in _RETURNS and (trace is not None or index is not None):
        raise EnvironmentFault(
            f"{subject} returned invalid values from {call}: {detail}; expected {_RETURNS[call]}. Fix its {call}."
        ) from error.with_traceback(trace)


def reraise_step_error(error: BaseException, prefix: str) -> None:
    """Apply :func:`reraise_as_env_error` to an error of a TorchRL step, and begin the message with a prefix."""
    try:
        reraise_as_env_error(error, "step")
    except EnvironmentFault as fault:
        error = fault
    if isinstance(error, EnvironmentFault):
        raise error.with_prefix(prefix)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<frozen", os.path.dirname(os.__file__)))


def _is_in_modules(frame: FrameType, modules: Iterable[str]) -> bool:
    name = f"{frame.f_globals.get('__name__')}."
    return name.startswith(tuple(f"{module}." for module in modules))


def check_returned(space: spaces.Space[Any], returned: Any, call: str, subject: str) -> None:
    """Validate the values that ``reset`` or ``step`` returned; raise EnvironmentFault if they violate the interface.

    Examples:
        >>> check_returned(spaces.Discrete(2), (0, 1.0, "yes", False, {}), "step", "environment 3")
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.env_errors.EnvironmentFault: environment 3 returned terminated as str 'yes' \
from step, expected True or False. Fix its step.
    """
    names = _RETURNS[call][1:-1].split(", ")
    problem = None
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        actual = f"a tuple of {len(returned)}" if isinstance(returned, tuple | list) else _describe(returned)
        problem = f"{actual} from {call}, expected {_RETURNS[call]}"
    elif not isinstance(returned[-1], Mapping):
        problem = f"info as {_describe(returned[-1])} from {call}, expected a dict"
    elif call == "step":
        for name, value in zip(names[1:4], returned[1:4], strict=True):
            array = np.asarray(value)
            kind = "array" if array.ndim else array.dtype.kind
            if name == "reward" and kind not in "biuf":
                problem = f"reward as {_describe(value)} from step, expected a number"
            elif name != "reward" and kind != "b" and not (kind in "iu" and value in (0, 1)):
                problem = f"{name} as {_describe(value)} from step, expected True or False"
    if problem is not None:
        raise EnvironmentFault(f"{subject} returned {problem}. Fix its {call}.")
    check_observation(space, returned[0], subject)


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, np.ndarray) and value.shape:
        return f"an array of shape {value.shape}"
    return f"{type(value).__name__} {value!r:.40}"


def check_observation(space: spaces.Space[Any], observation: Any, subject: str) -> None:
    """Validate an observation's shape and dtype against its space.

    Floats of another precision and integers of another size are allowed, because Gymnasium's vector environments cast
    them.

    Raises:
        EnvironmentFault: the shape differs or the dtype cannot be cast. The message names the entry, the returned shape
            and dtype, and the expected ones.

    Examples:
        >>> check_observation(spaces.Box(0, 1, (2,)), [0.0, 1.0, 0.0], "environment 3")
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.env_errors.EnvironmentFault: environment 3 returned observation 'observation' \
of shape (3,) and dtype float64, expected shape (2,) and dtype float32 as in its space. Fix observation_space or the \
wrapper that changes the observation.
    """
    mismatch = _mismatch(space, observation, "observation")
    if mismatch is not None:
        raise EnvironmentFault(
            f"{subject} returned observation {mismatch} as in its space. Fix observation_space or the wrapper that "
            "changes the observation."
        )


def _mismatch(space: spaces.Space[Any], value: Any, name: str) -> str | None:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name!r} as {type(value).__name__}, expected a dict of {sorted(space.spaces)}"
        missing = sorted(set(space.spaces) - set(value))
        if missing:
            return f"{name!r} without {missing}, expected a dict of {sorted(space.spaces)}"
        return next(filter(None, (_mismatch(entry, value[key], key) for key, entry in space.spaces.items())), None)
    if value is None:
        return f"{name!r} as None, expected shape {space.shape} and dtype {space.dtype}"
    try:
        array = np.asarray(value)
    except ValueError:  # rows of unequal lengths
        array = np.asarray(value, dtype=object)
    if array.shape == space.shape and (space.dtype is None or np.can_cast(array.dtype, space.dtype, "same_kind")):
        return None
    return (
        f"{name!r} of shape {array.shape} and dtype {array.dtype}, expected shape {space.shape} and dtype {space.dtype}"
    )


class GuardedCall:
    """The ``reset`` or ``step`` of an environment; each call stores the environment's number in :data:`position`.

    The last step of an episode is returned as a copy, because the following reset may overwrite it.

    Args:
        env: the environment.
        name: ``reset`` or ``step``.
        index: the number of the environment.
        checks: whether to check the first result, because Gymnasium casts and broadcasts it into shared memory.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, index: int, checks: bool = False) -> None:
        self._call: Callable[..., Any] = env.reset if name == "reset" else env.step
        self._env, self._name, self._index, self._checks = env, name, index, checks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the environment's method."""
        position.environment = self._index
        returned = self._call(*args, **kwargs)
        if self._checks:
            check_returned(self._env.observation_space, returned, self._name, f"environment {self._index}")
            self._checks = False
        if self._name == "reset":
            return returned
        _, _, terminated, truncated, _ = returned
        return copied(returned) if terminated or truncated else returned


def guard_calls(env: gymnasium.Env[Any, Any], index: int, checks: bool = False) -> None:
    """Replace ``reset`` and ``step`` of an environment by :class:`GuardedCall`, unless they are already replaced."""
    if not isinstance(env.step, GuardedCall):
        env.reset = GuardedCall(env, "reset", index, checks)  # type: ignore[method-assign]
        env.step = GuardedCall(env, "step", index, checks)  # type: ignore[method-assign]
