"""Updates per step of Lightning: chosen automatically, but one if each step must be an update."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, Timer

from kit.replay import dqn, experience, fit, replay_data
from kit.runs import parameters
from torchrl_lightning import (
    DQNModule,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    ReplayDataModule,
    SACModule,
    VTraceBuffer,
    VTraceModule,
)
from torchrl_lightning.datamodules import updates_per_step


def sac() -> SACModule:
    torch.manual_seed(0)
    return SACModule(MLPNetwork([8], "relu"))


def pendulum(**settings: Any) -> ReplayDataModule:
    sizes = {"num_envs": 2, "batch_size": 8, "updates_per_epoch": 10, "warmup_frames": 40, "eval_episodes": 2}
    return ReplayDataModule("Pendulum-v1", buffer=experience(), seed=0, **{**sizes, **settings})


def steps_of(run: L.Trainer) -> int:
    return run.fit_loop.epoch_loop.batch_progress.total.completed


@pytest.mark.parametrize(("make", "module"), [(replay_data, dqn), (pendulum, sac)])
def test_weights_do_not_depend_on_updates_per_step(make: Any, module: Any, tmp_path: Path) -> None:
    found = []
    for number in (1, "auto", 3):
        data = make(updates_per_step=number)
        learner, run = fit(tmp_path, data, module())
        found.append(parameters(learner))
        assert run.global_step > 0
        assert steps_of(run) == {1: 20, "auto": 2, 3: 8}[number]
        assert (data.updates, data.frames) == (20, 60)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("target_kl", [None, 1e-5])
def test_on_policy_weights_do_not_depend_on_updates_per_step(target_kl: float | None, tmp_path: Path) -> None:
    found = []
    for number, steps in ((1, 12), ("auto", 2), (4, 4)):
        torch.manual_seed(0)
        sizes = {"num_envs": 2, "frames_per_batch": 32, "mini_batch_size": 16, "num_epochs": 3}
        data = OnPolicyDataModule("CartPole-v1", seed=0, updates_per_step=number, **sizes)
        learner, run = fit(tmp_path, data, PPOModule(MLPNetwork([8]), learning_rate=0.01, target_kl=target_kl))
        found.append(parameters(learner))
        made = int(next(iter(run.optimizers[0].state.values()))["step"])
        assert (made < 12) == (target_kl is not None)
        assert (steps_of(run), data.frames) == (steps, 64)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rollouts_between_two_steps_are_estimated_again_as_with_one_update(tmp_path: Path) -> None:
    found = []
    for number in (1, 6):  # V-trace recomputes its targets before each pass, within a step
        torch.manual_seed(0)
        buffer = partial(VTraceBuffer, gamma=0.9)
        sizes = {"num_envs": 2, "frames_per_batch": 32, "num_mini_batch": 2, "num_epochs": 3}
        data = OnPolicyDataModule("CartPole-v1", buffer=buffer, seed=0, updates_per_step=number, **sizes)
        found.append(parameters(fit(tmp_path, data, VTraceModule(MLPNetwork([8]), learning_rate=0.01))[0]))
    assert torch.equal(*found)


@pytest.mark.parametrize(("most", "steps"), [(2**30, 1), (100, 2), (1, 10)])
def test_number_follows_from_the_size_of_an_update(
    most: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_per_step, "TABLE", ((most, 16), (10 * most, 8)))  # the size of an update is 58 * 8
    _, run = fit(tmp_path, replay_data(updates_per_step="auto"), max_epochs=1)
    assert steps_of(run) == steps  # of ten updates


class Stepping(DQNModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class Looping(Stepping):
    loops_over_updates = True


class Seeing(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class SeeingBar(ProgressBar):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Apart(L.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_steps": 5}, "max_steps or min_steps counts the steps"),
        ({"val_check_interval": 3, "limit_val_batches": 1}, "val_check_interval=3 counts the steps"),
        ({"val_check_interval": 0.5, "limit_val_batches": 1}, "val_check_interval=0.5 counts the steps"),
        ({"limit_train_batches": 4}, "limit_train_batches=4 counts the steps"),
        ({"callbacks": [lambda: ModelCheckpoint(every_n_train_steps=2)]}, "every_n_train_steps of ModelCheckpoint"),
        ({"callbacks": [Seeing]}, "Seeing has hooks on batches"),
        ({"callbacks": [SeeingBar], "enable_progress_bar": True}, "SeeingBar has hooks on batches"),
        ({"module": Stepping}, "Stepping does not declare loops_over_updates"),
        ({"callbacks": [lambda: ModelCheckpoint(every_n_epochs=1), Apart, Timer]}, None),
        ({"module": Looping}, None),
    ],
)
def test_number_is_one_if_each_step_must_be_an_update(
    settings: dict[str, Any], reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_epochs": 1, **settings}
    settings["callbacks"] = [make() for make in settings.get("callbacks", ())]
    data, module = replay_data(updates_per_step="auto"), dqn(settings.pop("module", DQNModule))
    with caplog.at_level(logging.INFO, "torchrl_lightning"):
        fit(tmp_path, data, module, **settings)
    assert data.batches_per_epoch == (10 if reason else 1)
    assert reason is None or reason in caplog.text


def test_resumed_run_keeps_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = fit(tmp_path, replay_data(updates_per_step="auto"), max_epochs=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    monkeypatch.setattr(updates_per_step, "TABLE", ())
    data = replay_data(updates_per_step="auto")
    _, run = fit(tmp_path, data, ckpt_path=tmp_path / "one.ckpt")
    assert (steps_of(run), data.updates) == (2, 20)


def test_user_number_replaces_the_number_of_a_checkpoint(tmp_path: Path) -> None:
    _, run = fit(tmp_path, replay_data(updates_per_step=5), max_epochs=1)
    run.save_checkpoint(tmp_path / "five.ckpt")
    data = replay_data(updates_per_step=2)
    _, run = fit(tmp_path, data, ckpt_path=tmp_path / "five.ckpt", max_epochs=2)
    assert (data.updates, steps_of(run)) == (20, 2 + 5)  # ten updates in each epoch


class StoppedWithinStep(DQNModule):
    """Writes a checkpoint before an update, then fails."""

    checkpoint, at = Path(), -1
    loops_over_updates = True

    def step_optimizers(self, *, inner: bool = False) -> dict[str, torch.Tensor]:
        if self.updates == self.at:
            self.trainer.save_checkpoint(self.checkpoint)
            raise RuntimeError("stopped")
        return super().step_optimizers(inner=inner)


@pytest.mark.parametrize("at", [2, 13])
def test_run_that_stops_within_a_step_completes_the_step_after_a_resume(at: int, tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None, at: int = -1) -> torch.Tensor:
        module = dqn(StoppedWithinStep)
        module.checkpoint, module.at = tmp_path / "within.ckpt", at
        data = replay_data(updates_per_step=5, reset_at_each_batch=True, frames_per_batch=8)
        learner, _ = fit(tmp_path, data, module, ckpt_path)
        assert (learner.updates, data.updates) == (20, 20)
        return parameters(learner)

    whole = run()
    with pytest.raises(RuntimeError, match="stopped"):
        run(at=at)
    assert torch.equal(run(tmp_path / "within.ckpt"), whole)


@pytest.mark.parametrize("value", ["automatic", 0, 2.5, True])
def test_invalid_number_of_updates_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"updates_per_step must be 'auto' or a positive integer, got "):
        replay_data(updates_per_step=value)
