"""Keep the number of threads of this process when TorchRL environments start and close."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from torchrl_lightning.environments.env_errors import env_errors

# Number of threads before the start of each ParallelEnv, if record_num_threads was called before the start.
_RECORDED: WeakKeyDictionary[EnvBase, int] = WeakKeyDictionary()


@contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Restore the current number of threads at the end of the block, also after an exception."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def record_num_threads(env: EnvBase) -> None:
    """Store the number of threads before a ParallelEnv starts, because its start may reduce the number."""
    base = _base(env)
    if isinstance(base, ParallelEnv) and base.is_closed:
        _RECORDED[base] = torch.get_num_threads()


def close_environment(env: VectorEnv[Any, Any, Any] | EnvBase) -> None:
    """Close an environment, if it is open, and restore the number of threads.

    A ParallelEnv reduces the number when it starts, and sets another number when it closes. If it started before
    :func:`record_num_threads`, the original number is unknown, and TorchRL's number is kept. Errors of the environment
    become EnvironmentFaults.
    """
    if not isinstance(env, EnvBase):
        with env_errors("close"):
            env.close()
        return
    base = _base(env)
    is_unrecorded = isinstance(base, ParallelEnv) and not base.is_closed and base not in _RECORDED
    threads = _RECORDED.pop(base, torch.get_num_threads())
    try:
        if not env.is_closed:
            with env_errors("close"):
                env.close()
    finally:
        if not is_unrecorded:
            torch.set_num_threads(threads)


def _base(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
