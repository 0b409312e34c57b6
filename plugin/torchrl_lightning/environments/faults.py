"""What an environment does wrong, told in one line: what it raises, what it returns, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import format_exception, walk_tb
from types import FrameType
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces

from torchrl_lightning.environments.copies import CopiedEnds, copied
from torchrl_lightning.fitting import Fault

_RETURNS = {"reset": "(observation, info)", "step": "(observation, reward, terminated, truncated, info)"}
_CALLS = {"reset": "reset", "step": "step", "_reset": "reset", "_step": "step", "close": "close"}
# The loops over environments, by what they count with, and the loop over the steps of a rollout.
_LOOPS = ("SyncVectorEnv.reset", "SyncVectorEnv.step", "ResumableVectorEnv.step", "ResumableVectorEnv.step_some")
_COUNTED = {**dict.fromkeys((*_LOOPS, "SerialEnv._reset", "SerialEnv._step"), "i"), "_async_worker": "index"}
_STEPS = "RolloutLoop._steps", "t"
# Whose code calls environments; of Gymnasium's, what surrounds one.
_OURS = __name__.partition(".")[0]
_LIBRARIES = ("contextlib", "functools", "multiprocessing", "numpy", "tensordict", "torch", "torchrl")
_CALLERS = (*_LIBRARIES, "gymnasium.vector", _OURS)
_AROUND = ("gymnasium.core", "gymnasium.utils", "gymnasium.wrappers", "gymnasium.envs.registration")


class EnvironmentFault(Fault):
    """An environment did what it may not; the message is one line that names it and how to mend it.

    Where it raised an exception, that is the cause, with the frames of its own code alone.
    """

    def within(self, place: str) -> Self:
        """Return the fault with words in front that say where it happened."""
        fault = type(self)(f"{place}{self}")
        fault.__cause__ = self.__cause__
        for note in getattr(self, "__notes__", ()):
            fault.add_note(note)
        return fault

    def sent(self) -> WorkerFault:
        """Return the fault as another process raises it: what was its cause is a note."""
        fault = WorkerFault(str(self))
        if self.__cause__ is not None:
            fault.add_note("".join(format_exception(self.__cause__)))
        return fault


class WorkerFault(EnvironmentFault, RuntimeError):
    """A process that steps environments failed or died."""


@contextmanager
def blaming(call: str, whose: str = "the environment") -> Iterator[None]:
    """Let :func:`blame` see what a block raises that calls an environment."""
    try:
        yield
    except (Exception, SystemExit) as error:
        blame(error, call, whose)
        raise


def blame(error: BaseException, call: str, whose: str = "the environment", place: str = "") -> None:
    """Raise an EnvironmentFault in the place of an error of an environment; do nothing if the error is no such one.

    Args:
        error: what a call of an environment, or of several, has raised.
        call: the call; where the error shows that another one was at fault, that is named.
        whose: the environment; where the error shows its number, that is named.
        place: words in front that say where it happened.

    Examples:
        >>> import random
        >>> with blaming("step", "environment 3"):
        ...     random.choice([])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.faults.EnvironmentFault: environment 3 raised IndexError in step (random.py, \
line ...): Cannot choose from an empty sequence. Mend the environment there.
    """
    if isinstance(error, Fault) or (isinstance(error, SystemExit) and type(error) is not SystemExit):
        return  # known already; a signal's
    frames, trace = list(frames_of(error)), error.__traceback__
    number = numbered(frames)[0]
    if (call == "make" and not isinstance(error, TimeoutError)) and (
        isinstance(error, ImportError | gymnasium.error.Error) or _is_of(frames[-1], ("gymnasium", "torchrl", _OURS))
    ):
        return  # told where it is made
    while trace is not None and _is_of(trace.tb_frame, _CALLERS):
        trace = trace.tb_next
    behind = list(walk_tb(trace))
    own = [(frame, line) for frame, line in behind if not _is_of(frame, (*_CALLERS, *_AROUND))]
    call = next((_CALLS[name] for frame, _ in behind if (name := frame.f_code.co_name) in _CALLS), call)
    if number is not None:
        whose = f"environment {number}"
    whose = f"{place}{whose}"
    said = " ".join(str(error).split())
    if own:
        places = [(frame.f_code.co_filename, line) for frame, line in own]
        file, line = ([place for place in places if not _is_installed(place[0])] or places)[-1]
        where = f"{call} ({file.replace(chr(92), '/').rpartition('/')[2]}, line {line})"
        what = f"{type(error).__name__} in {where}" + (f": {said.rstrip('.')}" if said else "")
        raise EnvironmentFault(f"{whose} raised {what}. Mend the environment there.") from error.with_traceback(trace)
    if call in _RETURNS and (behind or number is not None):
        raise EnvironmentFault(
            f"{whose} returned from {call} what does not fit: {said.rstrip('.')}; expected {_RETURNS[call]}. Mend what "
            f"its {call} returns."
        ) from error.with_traceback(trace)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<frozen", os.path.dirname(os.__file__)))


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an error has passed, the innermost one last."""
    return (frame for frame, _ in walk_tb(error.__traceback__))


def numbered(frames: Iterable[FrameType]) -> tuple[int | None, int | None]:
    """Return which environment of several frames of a call are at, and which step of a rollout; None for unknown."""
    environment = step = None
    for frame in frames:
        name = frame.f_code.co_qualname
        if name in _COUNTED:
            environment = frame.f_locals.get(_COUNTED[name])
        elif name == _STEPS[0]:
            step = frame.f_locals.get(_STEPS[1])
    return environment, step


def _is_of(frame: FrameType, modules: Iterable[str]) -> bool:
    name = f"{frame.f_globals.get('__name__')}."
    return name.startswith(tuple(f"{module}." for module in modules))


def check_returned(space: spaces.Space[Any], returned: Any, call: str, whose: str) -> None:
    """Refuse what an environment returned from ``reset`` or ``step`` by an EnvironmentFault, if it may not.

    Examples:
        >>> check_returned(spaces.Discrete(2), (0, 1.0, "yes", False, {}), "step", "environment 3")
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.faults.EnvironmentFault: environment 3 returned terminated as str 'yes' from \
step, expected True or False: mend its step.
    """
    names = _RETURNS[call][1:-1].split(", ")
    wrong = None
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        came = f"a tuple of {len(returned)}" if isinstance(returned, tuple | list) else _named(returned)
        wrong = f"{came} from {call}, expected {_RETURNS[call]}"
    elif not isinstance(returned[-1], Mapping):
        wrong = f"info as {_named(returned[-1])} from {call}, expected a dict"
    elif call == "step":
        for name, value in zip(names[1:4], returned[1:4], strict=True):
            shown = np.asarray(value)
            kind = "array" if shown.ndim else shown.dtype.kind
            if name == "reward" and kind not in "biuf":
                wrong = f"reward as {_named(value)} from step, expected a number"
            elif name != "reward" and kind != "b" and not (kind in "iu" and value in (0, 1)):
                wrong = f"{name} as {_named(value)} from step, expected True or False"
    if wrong is not None:
        raise EnvironmentFault(f"{whose} returned {wrong}: mend its {call}.")
    check_observation(space, returned[0], whose)


def _named(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} {value!r:.40}" if not shape else f"an array of shape {tuple(shape)}"


def check_observation(space: spaces.Space[Any], observation: Any, whose: str) -> None:
    """Refuse an observation of another shape than its space says, or of a dtype that the space's cannot hold.

    Floats of another precision are rounded, and integers of another size cast, as Gymnasium's vector environments do.

    Raises:
        EnvironmentFault: the message names the entry, what came and what was expected.

    Examples:
        >>> check_observation(spaces.Box(0, 1, (2,)), [0.0, 1.0, 0.0], "environment 3")
        Traceback (most recent call last):
            ...
        torchrl_lightning.environments.faults.EnvironmentFault: environment 3 returned observation 'observation' of \
shape (3,) and dtype float64, expected shape (2,) and dtype float32 as its space says: fix observation_space or the \
wrapper that changes the observation.
    """
    misfit = _misfit(space, observation, "observation")
    if misfit is not None:
        raise EnvironmentFault(
            f"{whose} returned observation {misfit} as its space says: fix observation_space or the wrapper that "
            "changes the observation."
        )


def _misfit(space: spaces.Space[Any], value: Any, name: str) -> str | None:
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{name!r} as {type(value).__name__}, expected a dict of {sorted(space.spaces)}"
        missing = sorted(set(space.spaces) - set(value))
        if missing:
            return f"{name!r} without {missing}, expected a dict of {sorted(space.spaces)}"
        return next(filter(None, (_misfit(entry, value[key], key) for key, entry in space.spaces.items())), None)
    if value is None:
        return f"{name!r} as None, expected shape {space.shape} and dtype {space.dtype}"
    try:
        came = np.asarray(value)
    except ValueError:  # rows of unequal lengths
        came = np.asarray(value, dtype=object)
    if came.shape == space.shape and (space.dtype is None or np.can_cast(came.dtype, space.dtype, "same_kind")):
        return None
    return (
        f"{name!r} of shape {came.shape} and dtype {came.dtype}, expected shape {space.shape} and dtype {space.dtype}"
    )


class CheckedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Check the first reset and the first step of an environment in another process, and copy the end of each episode.

    There Gymnasium would cast and broadcast observations into shared memory, and reset before it sends the last one.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._whose = f"environment {index}"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the first episode."""
        returned = self.env.reset(seed=seed, options=options)
        check_returned(self.observation_space, returned, "reset", self._whose)
        self.reset = self.env.reset  # type: ignore[method-assign]
        return returned

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Make the first step."""
        returned = self.env.step(action)
        check_returned(self.observation_space, returned, "step", self._whose)
        self.step = CopiedEnds(self.env.step)  # type: ignore[method-assign]
        return copied(returned)
