"""Batch sizes that do not suit a recurrent policy or windows of steps raise an error before collection."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.data import RandomSampler

from kit.dynamics import model_data
from kit.replay import BUFFERS, SIZE, dqn, experience, prioritized, recurrent, replay_data
from kit.runs import trainer
from torchrl_lightning import (
    DynamicsEnsemble,
    GAEBuffer,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    RecurrentNetwork,
    ReplayDataModule,
    build_actor,
    build_critic,
)
from torchrl_lightning.replay import SequenceSampler


class Counted(gym.Env[Any, Any]):
    """An environment that counts resets and steps over all copies; an episode has 20 steps."""

    observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
    calls = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        Counted.calls += 1
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        Counted.calls += 1
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, False, self.steps == 20, {}


class OwnRecurrent(L.LightningModule):
    """A module of a user that builds its recurrent policy in ``configure_model``, or early in its constructor."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.early = early
        self.seen: list[Any] = []
        if early:
            self.policy, self.critic = self.networks(OnPolicyDataModule(Counted, num_envs=1, frames_per_batch=4).specs)

    @staticmethod
    def networks(specs: Any) -> Any:
        actor = build_actor(specs, RecurrentNetwork("gru", 4))
        return actor, build_critic(specs, RecurrentNetwork("gru", 4), actor=actor)

    def configure_model(self) -> None:
        if not self.early:
            self.policy, self.critic = self.networks(self.trainer.datamodule.specs)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(tuple(batch.shape))
        return sum(parameter.sum() for parameter in self.parameters()) * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def ours() -> Any:
    return PPOModule(RecurrentNetwork("gru", 4))


def fit(module: Any, **settings: Any) -> Any:
    data = OnPolicyDataModule(Counted, **{"frames_per_batch": 64, "num_epochs": 1, "seed": 0, **settings})
    Counted.calls = 0
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    return data


MODULES = {"ours": ours, "own": OwnRecurrent, "own, built early": partial(OwnRecurrent, True)}
# Environments, number and size of mini-batches; the resulting number, or the start of the message.
BATCHES: list[tuple[int, Any, Any, Any]] = [
    (4, None, None, 4),
    (8, None, None, 4),
    (4, 1, None, 1),
    (4, 2, None, 2),
    (4, 4, None, 4),
    (4, None, 64, 1),
    (4, None, 63, 2),
    (4, None, 32, 2),
    (4, None, 16, 4),
    (4, 3, 1, 3),
    (4, 2, 2, 2),
    (4, 3, None, "num_mini_batch=3 must divide num_envs=4"),
    (4, 8, None, "num_mini_batch=8 must divide num_envs=4"),
    (1, 2, None, "num_mini_batch=2 must divide num_envs=1"),
    (4, None, 3, "mini_batch_size=3 must be the steps of complete environments, 16 each"),
    (4, None, 15, "mini_batch_size=15 must be"),
    (4, None, 24, "mini_batch_size=24 must be"),
    (4, 2, 3, "num_mini_batch=2 times mini_batch_size=3 must be at most num_envs=4"),
    (4, 1, 16, "num_mini_batch=1 times mini_batch_size=16 must be at most num_envs=4"),
    (2, None, None, "num_envs=2 must be a multiple of 4, the default of num_mini_batch"),
    (1, None, None, "num_envs=1 must be a multiple of 4, the default of num_mini_batch"),
    (16, 32, None, "num_mini_batch=32 must divide num_envs=16"),
]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(("num_envs", "number", "size", "expected"), BATCHES)
def test_mini_batches_of_incomplete_environments_are_refused_before_collection(
    kind: str, num_envs: int, number: Any, size: Any, expected: Any
) -> None:
    module, settings = MODULES[kind](), {"num_envs": num_envs, "num_mini_batch": number, "mini_batch_size": size}
    if isinstance(expected, int):
        data = fit(module, **settings)
        assert data.num_mini_batch == expected
        assert data.frames == 64
        if kind != "ours":
            assert len(module.seen) == expected
            assert all(len(shape) == 2 for shape in module.seen)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        fit(module, **settings)
    assert Counted.calls == 0


@pytest.mark.parametrize(("whole", "recurs"), [(True, False), (False, True)])
def test_buffer_overrides_the_content_of_mini_batches(whole: bool, recurs: bool) -> None:
    buffer = partial(GAEBuffer, recurrent=whole)
    module = ours() if recurs else PPOModule(MLPNetwork([4]))
    if whole:
        with pytest.raises(ValueError, match=r"num_mini_batch=3.*num_envs=4"):
            fit(module, buffer=buffer, num_envs=4, num_mini_batch=3)
        assert Counted.calls == 0
    else:
        assert fit(module, buffer=buffer, num_envs=4, num_mini_batch=3).frames == 64


def test_policy_without_a_memory_takes_any_mini_batches() -> None:
    assert fit(PPOModule(MLPNetwork([4])), num_envs=2, num_mini_batch=3).frames == 64


def replay(buffer: Any, **settings: Any) -> ReplayDataModule:
    Counted.calls = 0
    sizes = {"num_envs": 2, "batch_size": 4, "updates_per_epoch": 2, "warmup_frames": 60}
    return replay_data(buffer, env=Counted, eval_env=Counted, **{**sizes, **settings})


SINGLE = ["uniform", "prioritized", "three steps", "simple", recurrent, experience(RandomSampler)]


NAMES = [*SINGLE[:4], "recurrent", "random sampler"]


@pytest.mark.parametrize("buffer", SINGLE, ids=NAMES)
def test_recurrent_network_is_not_fitted_to_single_steps(buffer: Any) -> None:
    data = replay(buffer)
    with pytest.raises(ValueError, match="SequenceSampler"):
        trainer(max_epochs=1, limit_val_batches=0).fit(dqn(recurrent=True), datamodule=data)
    assert Counted.calls == 0


def test_user_hook_may_build_sequences_from_single_steps() -> None:
    data = replay("uniform")
    data.on_after_batch_transfer = lambda batch, index: batch.unsqueeze(1)  # type: ignore[method-assign]
    trainer(max_epochs=1, limit_val_batches=0).fit(dqn(recurrent=True), datamodule=data)
    assert data.updates == 2


SEQUENCES: dict[str, Any] = {
    "inside": lambda steps: SequenceSampler(steps),
    "across": lambda steps: SequenceSampler(steps, episode_ends="across"),
    "prioritized": lambda steps: prioritized(batch_length=steps),
}


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize(
    ("length", "warmup", "message"),
    [
        (8, 60, None),
        (8, 16, None),
        (8, 14, "batch_length=8 of .* before the first update each has made 7. Raise warmup_frames to 16"),
        (SIZE // 2 + 1, 1000, "batch_length must be at most .* 200, got 201"),
    ],
)
def test_windows_that_do_not_fit_are_refused_before_collection(
    length: int, warmup: int, message: str | None, kind: str, recurs: bool
) -> None:
    data = replay(experience(partial(SEQUENCES[kind], length)), warmup_frames=warmup)
    run, module = trainer(max_epochs=1, limit_val_batches=0), dqn(recurrent=recurs)
    if message is None:
        run.fit(module, datamodule=data)
        assert data.updates == 2
        return
    with pytest.raises(ValueError, match=message):
        run.fit(module, datamodule=data)
    assert Counted.calls == 0


def test_windows_and_the_ignored_steps_before_them_fit_into_the_cells_of_one_environment() -> None:
    sampler = partial(prioritized, batch_length=SIZE // 2, num_earliest_frames_ignored=1)
    data = replay(experience(sampler), warmup_frames=SIZE + 2)
    with pytest.raises(ValueError, match=r"needs 201 steps of one environment, but .* at most 200"):
        trainer(max_epochs=1, limit_val_batches=0).fit(dqn(), datamodule=data)
    assert Counted.calls == 0


def test_padded_windows_need_no_more_than_the_burn_in() -> None:
    sampler = partial(SequenceSampler, 50, episode_ends="pad", burn_in=2)
    data = replay(experience(sampler), warmup_frames=8)
    trainer(max_epochs=1, limit_val_batches=0).fit(dqn(recurrent=True), datamodule=data)
    assert data.updates == 2


@pytest.mark.parametrize("buffer", sorted(BUFFERS))
def test_network_without_a_memory_learns_from_all_buffers(buffer: str) -> None:
    data = replay(buffer, batch_size=8)
    trainer(max_epochs=1, limit_val_batches=0).fit(dqn(), datamodule=data)
    assert data.updates == 2


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("max_validation", [3, 5000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_part_of_the_first_fit_is_known_beforehand(seed: int, max_validation: int, num_envs: int) -> None:
    sizes: dict[str, Any] = {"num_envs": num_envs, "seed": seed, "max_validation": max_validation, "frames_per_fit": 8}
    shown = model_data(**sizes, batch_size=1)
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(DynamicsEnsemble([4]), datamodule=shown)
    training = len(shown._training)
    assert 0 < training < 40
    trainer(max_epochs=1, limit_val_batches=0).fit(
        DynamicsEnsemble([4]), datamodule=model_data(**sizes, batch_size=training)
    )
    data = model_data(**sizes, batch_size=training + 1)
    with pytest.raises(ValueError, match=rf"batch_size={training + 1}.*{training}.*40"):
        trainer(max_epochs=1, limit_val_batches=0).fit(DynamicsEnsemble([4]), datamodule=data)
    assert data.frames == 0
