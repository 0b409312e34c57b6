"""Environments of TorchRL's and the threads of this process, which stay as they were before an environment started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from torchrl_lightning.environments.faults import blaming

# Of each ParallelEnv that was seen before it started: how many threads there were.
_BEFORE: WeakKeyDictionary[EnvBase, int] = WeakKeyDictionary()


@contextmanager
def kept_threads() -> Iterator[None]:
    """Give the process back the number of threads that it has now, also after an exception."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def note_threads(env: EnvBase) -> None:
    """Remember how many threads there are, if the environment may take some of them when it starts, and has not yet."""
    base = _base(env)
    if isinstance(base, ParallelEnv) and base.is_closed:
        _BEFORE[base] = torch.get_num_threads()


def close_environment(env: VectorEnv[Any, Any, Any] | EnvBase) -> None:
    """Close an environment, if it is open, and give back the threads that it took.

    One of TorchRL's takes them when it starts, and returns others when it closes. What it took of a process that
    started it before it came here is unknown: there TorchRL's own number stays. What it raises is an EnvironmentFault.
    """
    if not isinstance(env, EnvBase):
        with blaming("close"):
            env.close()
        return
    base = _base(env)
    unknown = isinstance(base, ParallelEnv) and not base.is_closed and base not in _BEFORE
    threads = _BEFORE.pop(base, torch.get_num_threads())
    try:
        if not env.is_closed:
            with blaming("close"):
                env.close()
    finally:
        if not unknown:
            torch.set_num_threads(threads)


def _base(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
