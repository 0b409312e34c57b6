"""Torch's global settings, callbacks and the trainer's settings work, or raise an error immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor

from kit.actor_critic import TinyActorCritic, rollouts
from kit.counting import CountingEnv
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import parameters, trainer
from torchrl_lightning.agents import CrossEntropyPlanner, DynamicsEnsemble, MLPNetwork, PPOModule

STEPS = 0


class CountedEnv(CountingEnv):
    """Counts the steps of all its copies."""

    def step(self, action: Any) -> Any:
        global STEPS
        STEPS += 1
        return super().step(action)


def ppo() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return PPOModule(MLPNetwork([8])), rollouts(env=CountedEnv, updates_per_step=1)


def deep_q() -> tuple[Any, Any]:
    return dqn(), replay_data(env=CountedEnv, updates_per_step=1)


def dynamics() -> tuple[Any, Any]:
    torch.manual_seed(0)
    planner = partial(CrossEntropyPlanner, horizon=2, candidates=8, elites=2, iterations=1)
    return DynamicsEnsemble(hidden_sizes=[4], planner=planner), model_data()


STREAMS = {"ppo": ppo, "dqn": deep_q, "dynamics": dynamics}
streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)


@pytest.fixture(autouse=True)
def torch_defaults() -> Iterator[None]:
    global STEPS
    STEPS = 0
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def check_nothing_collected(data: Any) -> None:
    assert STEPS == 0
    assert data.frames == 0
    assert data.collector is None


@streams
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("when", ["before construction", "before fit"])
def test_another_default_dtype_is_refused(when: str, dtype: torch.dtype, make: Any) -> None:
    if when == "before construction":
        torch.set_default_dtype(dtype)
    module, data = make()
    torch.set_default_dtype(dtype)
    with pytest.raises(ValueError, match=rf"dtype.*torch.float32.*{dtype}"):
        trainer().fit(module, datamodule=data)
    check_nothing_collected(data)


@streams
def test_dtype_that_was_the_default_only_at_construction_has_no_effect(make: Any) -> None:
    expected, data = make()
    run = trainer(max_epochs=1)
    run.fit(expected, datamodule=data)
    torch.set_default_dtype(torch.float64)
    module, data = make()
    torch.set_default_dtype(torch.float32)
    trainer(max_epochs=1).fit(module, datamodule=data)
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    assert torch.equal(parameters(module), parameters(expected))


def test_foreign_module_learns_the_same_under_another_default_dtype() -> None:
    class Single(TinyActorCritic):
        def configure_model(self) -> None:
            super().configure_model()
            self.float()
            torch.manual_seed(1)
            for each in self.parameters():
                each.data.copy_(torch.rand(each.shape, dtype=torch.float32))

    fitted = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        module = Single()
        settings = {"normalize_observation": True, "normalize_reward": True}
        trainer(max_epochs=2).fit(module, datamodule=rollouts(env=CountedEnv, **settings))
        fitted.append(parameters(module))
    assert torch.equal(*fitted)


@streams
def test_another_default_device_is_refused(make: Any) -> None:
    module, data = make()
    torch.set_default_device("meta")
    with pytest.raises(ValueError, match="device"):
        trainer().fit(module, datamodule=data)
    with pytest.raises(ValueError, match="device"):
        rollouts(env=CountedEnv)
    check_nothing_collected(data)


@streams
def test_fit_in_inference_mode_is_refused(make: Any) -> None:
    module, data = make()
    with torch.inference_mode(), pytest.raises(ValueError, match="mode"):
        trainer().fit(module, datamodule=data)
    check_nothing_collected(data)


def strict_numpy() -> Any:
    return np.errstate(all="raise")


class Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


@streams
@pytest.mark.parametrize("around", [strict_numpy, Deterministic, torch.no_grad])
def test_other_global_settings_change_nothing(around: Any, make: Any) -> None:
    expected, data = make()
    trainer(max_epochs=2).fit(expected, datamodule=data)
    module, data = make()
    with around():
        trainer(max_epochs=2).fit(module, datamodule=data)
    assert torch.equal(parameters(module), parameters(expected))


def test_working_directory_may_change_before_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, data = ppo()
    trainer(tmp_path).fit(expected, datamodule=data)
    module, data = ppo()
    run = trainer(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.fit(module, datamodule=data)
    assert torch.equal(parameters(module), parameters(expected))
    assert not any(Path().iterdir())


REFUSED: dict[str, Callable[[], Any]] = {
    "BackboneFinetuning": callbacks.BackboneFinetuning,
    "BatchSizeFinder": callbacks.BatchSizeFinder,
    "GradientAccumulationScheduler": lambda: callbacks.GradientAccumulationScheduler({0: 2}),
    "LearningRateFinder": callbacks.LearningRateFinder,
    "ModelPruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "SpikeDetection": SpikeDetection,
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(1e-3),
}


@streams
@pytest.mark.parametrize("name", REFUSED)
def test_callback_that_cannot_have_its_effect_is_refused(name: str, make: Any) -> None:
    module, data = make()
    with pytest.raises(ValueError, match=rf"callbacks.*{name}.*[^.]\.$"):
        trainer(callbacks=[REFUSED[name]()]).fit(module, datamodule=data)
    check_nothing_collected(data)


class ReadsParameters(L.Callback):
    """Read the names of the trained parameters before all other hooks."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.names = [name for name, _ in pl_module.named_parameters()]


@streams
def test_callback_finds_the_parameters_in_setup(make: Any) -> None:
    expected, data = make()
    trainer(max_epochs=1).fit(expected, datamodule=data)
    module, data = make()
    reads = ReadsParameters()
    trainer(max_epochs=1, callbacks=[reads]).fit(module, datamodule=data)
    assert reads.names == [name for name, _ in module.named_parameters()]
    assert torch.equal(parameters(module), parameters(expected))


class Follows(L.Callback):
    """Averages the parameters after each step, as :class:`Averages` does."""

    def __init__(self) -> None:
        self.average: Tensor | None = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        now = parameters(pl_module)
        self.average = now if self.average is None else torch.lerp(self.average, now, 0.5)


@streams
@pytest.mark.filterwarnings("ignore:.*WeightAveraging callback with a model that overrides")
def test_weight_averaging_ends_with_the_average(make: Any) -> None:
    follows = Follows()
    module, data = make()
    trainer(max_epochs=2, callbacks=[follows], limit_val_batches=0).fit(module, datamodule=data)
    module, data = make()
    averages = callbacks.EMAWeightAveraging(decay=0.5, use_buffers=False)
    trainer(max_epochs=2, callbacks=[averages], limit_val_batches=0).fit(module, datamodule=data)
    assert follows.average is not None
    torch.testing.assert_close(parameters(module), follows.average)


@streams
def test_clipping_algorithm_without_a_value_is_refused(make: Any) -> None:
    module, data = make()
    with pytest.raises(ValueError, match=r"gradient_clip_val must .* gradient_clip_algorithm='value'"):
        trainer(gradient_clip_algorithm="value").fit(module, datamodule=data)
    check_nothing_collected(data)


def test_dynamics_refuse_to_reload_more_rarely_than_each_epoch() -> None:
    module, data = dynamics()
    with pytest.raises(ValueError, match=r"reload_dataloaders_every_n_epochs.*0.*1"):
        trainer(reload_dataloaders_every_n_epochs=2).fit(module, datamodule=data)
    check_nothing_collected(data)


@streams
def test_evaluations_may_come_by_time(make: Any) -> None:
    module, data = make()
    run = trainer(val_check_interval="00:00:10:00", max_epochs=2)
    run.fit(module, datamodule=data)
    assert run.current_epoch == 2
