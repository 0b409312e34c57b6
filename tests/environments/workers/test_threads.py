from __future__ import annotations

import pytest
import torch
from torchrl.envs import ParallelEnv, SerialEnv, TransformedEnv

from kit.torchrl_envs import Walk
from torchrl_lightning import EnvironmentRecipe
from torchrl_lightning.environments import close_environment, make_environment
from torchrl_lightning.environments.env_errors import EnvironmentFault

pytestmark = pytest.mark.usefixtures("three_threads")


def started(env):
    """Pretend that its processes run: it has taken two threads."""
    torch.set_num_threads(1)
    env.is_closed = False


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_number_of_threads_is_restored(wrapped, fails, monkeypatch) -> None:
    env = parallel = ParallelEnv(2, Walk, mp_start_method="spawn")
    if wrapped:
        env = TransformedEnv(parallel)
    make_environment(env, 2)  # looks at it
    started(parallel)

    def shut_down():
        torch.set_num_threads(7)
        if fails:
            raise OSError("a process is gone")

    monkeypatch.setattr(parallel, "_shutdown_workers", shut_down, raising=False)
    if fails:
        with pytest.raises(EnvironmentFault, match="gone"):
            close_environment(env)
        parallel.is_closed = True
    else:
        close_environment(env)
    assert torch.get_num_threads() == 3


def test_unrecorded_number_of_threads_is_left_to_torchrl(monkeypatch) -> None:
    env = ParallelEnv(2, Walk, mp_start_method="spawn")
    started(env)
    monkeypatch.setattr("torchrl._THREAD_POOL_INIT", 2)
    monkeypatch.setattr(env, "_shutdown_workers", lambda: None, raising=False)
    close_environment(env)
    assert torch.get_num_threads() == 2


def test_serial_environment_keeps_the_number_of_threads(monkeypatch) -> None:
    monkeypatch.setattr("torchrl._THREAD_POOL_INIT", 8)
    for env in (SerialEnv(2, Walk), make_environment(Walk, 2)):
        env.reset()
        close_environment(env)
        assert torch.get_num_threads() == 3


def test_started_processes_keep_the_number_of_threads() -> None:
    env = make_environment(EnvironmentRecipe(Walk, vectorization="async"), 2)
    assert env.num_threads == 3
    close_environment(env)
