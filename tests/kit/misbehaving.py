"""An environment with one fault, and a list of all faults."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


@dataclass(frozen=True)
class Fault:
    """One fault of an environment.

    Args:
        call: The faulty call: ``make``, ``reset``, ``step`` or ``close``.
        does: A function that the call runs.
        becomes: Changes the returned value of the call.
        at: The first step of the episode with the fault.
        says: A pattern of the error message.
        space: The observation space: ``box`` or ``count``.
    """

    call: str
    says: str
    does: Callable[[], object] | None = None
    becomes: Callable[[Any], Any] | None = None
    at: int = 1
    space: str = "box"


class Misbehaving(gymnasium.Env[Any, Any]):
    """Returns zeros in episodes of six steps, with one fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.t = fault, 0
        box = spaces.Box(-9, 9, (3,), np.float32)
        self.observation_space: Any = {"box": box, "count": spaces.Discrete(5)}[fault.space]
        self.action_space: Any = spaces.Discrete(2)
        self._do("make", None)

    def _do(self, call: str, returned: Any) -> Any:
        if call != self.fault.call or (call == "step" and self.t < self.fault.at):
            return returned
        if self.fault.does is not None:
            self.fault.does()
        return returned if self.fault.becomes is None else self.fault.becomes(returned)

    def _shown(self) -> Any:
        return np.zeros(3, np.float32) if self.fault.space == "box" else np.int64(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._do("reset", (self._shown(), {}))

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._do("step", (self._shown(), 1.0, self.t == 6, False, {}))

    def close(self) -> None:
        self._do("close", None)


def raises() -> None:
    raise ArithmeticError("too much")


def leaves() -> None:
    sys.exit(3)


def dies() -> None:
    os._exit(3)


def sleeps() -> None:
    time.sleep(600)


def insists() -> None:
    """Sleep, and ignore every exception that interrupts it."""
    while True:
        with suppress(Exception):
            time.sleep(600)


def _put(index: int, value: Any) -> Callable[[Any], Any]:
    return lambda returned: (*returned[: index % len(returned)], value, *returned[index % len(returned) + 1 :])


_NAN, _INF = (np.array([0, bad, 0], np.float32) for bad in (np.nan, np.inf))
_WIDE, _DEEP = np.zeros(4, np.float32), np.zeros((1, 3), np.float32)
_TEXT = np.array(["a", "b", "c"])


def _returned(call: str) -> dict[str, Fault]:
    """Return the faults that ``reset`` and ``step`` share."""
    what = {
        "nothing": (lambda _: None, "None"),
        "the observation alone": (lambda returned: returned[0], "ndarray|shape|values"),
        "a value too many": (lambda returned: (*returned, 0), "tuple|values"),
        "a value too few": (lambda returned: returned[:-1], "tuple|values"),
        "no observation": (_put(0, None), "None"),
        "an observation of another type": (_put(0, "here"), "<U|str|text"),
        "a longer observation": (_put(0, _WIDE), "shape|size|broadcast"),
        "a deeper observation": (_put(0, _DEEP), r"shape \(1, 3\)|size"),
        "a ragged observation": (_put(0, [[1.0], [1.0, 2.0]]), "object|inhomogeneous|shape"),
        "an observation of texts": (_put(0, _TEXT), "U1|str"),
        "an observation of complex numbers": (_put(0, np.zeros(3, np.complex64)), "complex"),
        "an observation of another structure": (_put(0, {"x": 0}), "dict|object|invalid values"),
        "NaN": (_put(0, _NAN), "nan"),
        "infinity": (_put(0, _INF), "inf"),
        "no info": (_put(-1, None), "None"),
        "info as a list": (_put(-1, [1]), "list"),
    }
    return {f"{call} returns {name}": Fault(call, says, becomes=becomes) for name, (becomes, says) in what.items()}


def _of_step() -> dict[str, Fault]:
    what = {
        "a reward for each of two": (1, np.zeros(2), "shape|reward"),
        "a reward of one row": (1, np.zeros((1, 1)), "shape|reward"),
        "no reward": (1, None, "None"),
        "a reward as text": (1, "1.0", "reward|str"),
        "NaN as reward": (1, float("nan"), "nan"),
        "infinity as reward": (1, float("inf"), "inf"),
        "terminated as text": (2, "yes", "terminated|str"),
        "terminated as None": (2, None, "terminated|None"),
        "terminated for each of two": (2, np.array([True, False]), "shape|terminated"),
        "truncated as text": (3, "no", "truncated|str"),
        "truncated as a number": (3, 0.5, "truncated|float"),
    }
    return {
        f"step returns {name}": Fault("step", says, becomes=_put(index, value))
        for name, (index, value, says) in what.items()
    }


FAULTS: dict[str, Fault] = {
    **{
        f"{call} raises": Fault(call, "ArithmeticError.* too much", raises)
        for call in ("make", "reset", "step", "close")
    },
    "step raises later": Fault("step", r"ArithmeticError in step \(misbehaving.py", raises, at=4),
    **{f"{call} exits": Fault(call, "SystemExit|exit code 3", leaves) for call in ("make", "reset", "step", "close")},
    **_returned("reset"),
    **_returned("step"),
    **_of_step(),
    "step returns no observation later": Fault("step", "None", becomes=_put(0, None), at=4),
    "step returns a longer observation at the end": Fault("step", "shape|size", becomes=_put(0, _WIDE), at=6),
    "reset returns a count outside its space": Fault("reset", "9|less", becomes=_put(0, np.int64(9)), space="count"),
    "step returns a count outside its space": Fault("step", "9|less", becomes=_put(0, np.int64(9)), space="count"),
}
HANGS = {call: Fault(call, "did not return", sleeps) for call in ("make", "reset", "step", "close")}
