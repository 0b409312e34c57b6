"""Strategies that fork or spawn lose the trained module: they raise an error, and the suggested settings train."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _XLALauncher
from lightning.pytorch.trainer.connectors import accelerator_connector

from kit.actor_critic import TinyActorCritic, rollouts
from kit.dynamics import model_data
from kit.fake_data import FakeData
from kit.forks import Forked, as_script
from kit.replay import dqn, replay_data
from kit.runs import trainer
from kit.specs import TWO_CHOICES
from torchrl_lightning import BranchedReplay
from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning._core.launchers import restarts_script
from torchrl_lightning.agents import DynamicsEnsemble, MBPOModule, MLPNetwork, PPOModule, SACModule

NETWORK = MLPNetwork([8])
COPIES = [
    name for name in StrategyRegistry if StrategyRegistry[name]["init_params"].get("start_method", "popen") != "popen"
]


def no_environment() -> None:
    raise AssertionError("an environment was made")


def ppo() -> tuple[Any, Any]:
    return PPOModule(NETWORK), rollouts(env=no_environment)


RUNS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ppo": ppo,
    "dqn": lambda: (dqn(), replay_data(env=no_environment)),
    "sac": lambda: (SACModule(NETWORK), replay_data(env=no_environment)),
    "pets": lambda: (DynamicsEnsemble([8]), model_data(env=no_environment)),
    "mbpo": lambda: (MBPOModule(NETWORK), replay_data(env=no_environment, source=partial(BranchedReplay, max_size=8))),
    "module of the user": lambda: (TinyActorCritic(), rollouts(env=no_environment)),
    "data of the user": lambda: (PPOModule(NETWORK), FakeData(1, specs=TWO_CHOICES)),
}


def refused(folder: Path, strategy: Any, call: Callable[[L.Trainer, Any, Any], Any], run: Any = ppo, **own: Any) -> str:
    """Check that the call raises before it starts or builds anything; return the message."""
    module, data = run()
    running = multiprocessing.active_children()
    with pytest.raises(IncompatibleError, match=r"^strategy must .* got DDPStrategy") as error:
        call(trainer(folder, strategy=strategy, **{"devices": 2, **own}), module, data)
    assert multiprocessing.active_children() == running
    assert not getattr(module, "is_built", False)
    assert getattr(data, "frames", 0) == 0
    return str(error.value)


def fit(run: L.Trainer, module: Any, data: Any) -> None:
    run.fit(module, datamodule=data)


def test_lightning_has_strategies_that_fork_and_spawn() -> None:
    assert {"ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_notebook_find_unused_parameters_true"} <= set(COPIES)


@pytest.mark.parametrize("name", COPIES)
def test_each_name_of_a_strategy_is_refused(name: str, tmp_path: Path) -> None:
    refused(tmp_path, name, fit)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_strategy_objects_are_refused(method: Any, devices: int, tmp_path: Path) -> None:
    message = refused(tmp_path, DDPStrategy(start_method=method), fit, devices=devices)
    assert f"start method {method!r}" in message


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_each_learner_and_data_module_is_refused(run: Any, tmp_path: Path) -> None:
    refused(tmp_path, "ddp_fork", fit, run)


CALLS: dict[str, Callable[[L.Trainer, Any, Any], Any]] = {
    "positional data": lambda run, module, data: run.fit(module, data),
    "resumed": lambda run, module, data: run.fit(module, datamodule=data, ckpt_path="last.ckpt"),
    "validate": lambda run, module, data: run.validate(module, datamodule=data),
    "test": lambda run, module, data: run.test(module, datamodule=data),
    "predict": lambda run, module, data: run.predict(module, datamodule=data),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_method_of_the_trainer_is_refused(call: Any, tmp_path: Path) -> None:
    refused(tmp_path, "ddp_notebook", call)


@pytest.mark.parametrize("kind", [_MultiProcessingLauncher, _XLALauncher])
def test_each_launcher_of_copies_is_checked(kind: Any) -> None:
    launcher = kind.__new__(kind)
    launcher._start_method = "fork"
    run = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    with pytest.raises(IncompatibleError, match=r"^strategy must"):
        launcher.launch(no_environment, *ppo(), trainer=run)


def test_runs_of_other_libraries_are_forked_as_before(tmp_path: Path) -> None:
    module = BoringModel()
    before = module.layer.weight.detach().clone()
    trainer(tmp_path, devices=1, strategy="ddp_fork", max_steps=2, limit_val_batches=0).fit(module)
    assert not module.layer.weight.equal(before)


def test_only_ranks_that_lightning_starts_restart_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices, strategy in ((2, "auto"), (2, "ddp"), (2, "ddp_find_unused_parameters_true")):
        assert restarts_script(trainer(devices=devices, strategy=strategy))
    for devices, strategy in ((1, "auto"), (1, "ddp"), (2, "ddp_spawn")):
        assert not restarts_script(trainer(devices=devices, strategy=strategy))
    monkeypatch.setenv("LOCAL_RANK", "0")  # as in a process of another launcher
    assert not restarts_script(trainer(devices=2, strategy="ddp"))


def test_one_device_is_the_remedy_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    assert "strategy='auto' and devices=1 in a notebook" in refused(tmp_path, "auto", fit)  # a notebook forks
    module, data = PPOModule(NETWORK), rollouts(total_frames=64)
    trainer(tmp_path, devices=1, strategy="auto", limit_val_batches=0).fit(module, datamodule=data)
    assert data.frames == 64
    assert data.evaluate(module.policy, 1)["episode_return"] > 0


SCRIPT = """
import sys
import lightning as L
from torchrl_lightning import MLPNetwork, OnPolicyDataModule
from torchrl_lightning.agents import PPOModule
if __name__ == "__main__":
    data = OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=32, num_epochs=1, total_frames=64, seed=0)
    module = PPOModule(MLPNetwork([8]))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=-1, limit_val_batches=0, **quiet)
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        print(f"{data.frames} frames, return {data.evaluate(module.policy, 1)['episode_return'].item()}")
"""


def test_ddp_is_the_remedy_in_a_script(tmp_path: Path) -> None:
    assert "strategy='ddp' in a script" in refused(tmp_path, "ddp_spawn", fit)
    (tmp_path / "own.py").write_text(SCRIPT)
    process = Forked(as_script(tmp_path / "own.py", "ddp"), tmp_path)
    assert process.ends() == 0, process.said
    assert "64 frames, return " in process.said
