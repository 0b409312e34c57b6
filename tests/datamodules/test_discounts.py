"""The learner owns the discount where it has one: everything that discounts takes it, and none differs from it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from datamodules.replay_parts import trainer
from kit.normalized import Checking, recording
from torchrl_lightning import (
    DQNModule,
    EpisodicReplayBuffer,
    EpisodicReturn,
    ExperienceBuffer,
    GAEBuffer,
    MixedReplay,
    OnPolicyDataModule,
    PPOBuffer,
    PPODBuffer,
    PPOModule,
    RecurrentReplayBuffer,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    SimpleReplayBuffer,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
)

PPO_BUFFER = partial(PPOBuffer, obs_dim=None, act_dim=None, batch_size=8)
ON_POLICY = [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer, PPODBuffer, PPO_BUFFER]


class Discounting(PPOModule):
    """An on-policy learner of somebody's own with discounts."""

    gamma = 0.9
    gamma_intrinsic = 0.8


def replayed(buffer: Any, **options: Any) -> ReplayDataModule:
    settings: dict[str, Any] = {"num_envs": 2, "batch_size": 8, "updates_per_epoch": 4, "warmup_frames": 40, "seed": 0}
    return ReplayDataModule("CartPole-v1", buffer=buffer, **{**settings, **options})


def rollouts(buffer: Any, **options: Any) -> OnPolicyDataModule:
    return OnPolicyDataModule(
        "CartPole-v1", buffer=buffer, num_envs=2, frames_per_batch=32, num_mini_batch=2, seed=0, **options
    )


def fitted(tmp_path: Any, data: Any, learner: L.LightningModule, **settings: Any) -> Any:
    trainer(tmp_path, max_epochs=1, **settings).fit(learner, datamodule=data)
    return data


class Recorder(DQNModule):
    """Keeps what it learns from."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("seen", []).append(batch)
        super().training_step(batch, batch_idx)


def test_n_step_returns_take_the_learners_discount(tmp_path):
    learner = Recorder(gamma=0.5)
    data = fitted(tmp_path, replayed(partial(ExperienceBuffer, n_steps=3)), learner)
    assert data.buffer.gamma == 0.5
    batch = torch.cat(learner.seen)
    torch.testing.assert_close(batch["gamma"], 0.5 ** batch["steps_to_next_obs"].float())
    assert batch["steps_to_next_obs"].max() == 3


@pytest.mark.parametrize("buffer", ON_POLICY)
def test_estimates_take_the_learners_discounts(tmp_path, buffer):
    data = fitted(tmp_path, rollouts(buffer), Discounting())
    assert (data.buffer.gamma, data.buffer.gamma_intrinsic) == (0.9, 0.8)
    assert data.buffer.estimator().gamma == 0.9
    assert data.buffer.intrinsic.gamma == 0.8


def recorded(num_envs: int, gamma: float | None = None) -> ExperienceBuffer:
    buffer = ExperienceBuffer(storage=RingStorage(1000), writer=RingWriter(num_envs, track_episodes=True))
    EpisodicReturn(buffer.storage, gamma=gamma)
    return buffer


def test_recorded_returns_take_the_learners_discount(tmp_path):
    for make in (
        lambda num_envs, gamma: EpisodicReplayBuffer(None, num_envs, record_episodic_return=True, gamma=gamma),
        lambda num_envs, gamma=None: EpisodicReplayBuffer(None, num_envs, record_episodic_return=True, gamma=gamma),
    ):
        assert fitted(tmp_path, replayed(make), DQNModule(gamma=0.5)).buffer.returns.gamma == 0.5
    with pytest.raises(ValueError, match=r"gamma=0.99 of the buffer differs from gamma=0.5 of DQNModule"):
        fitted(tmp_path, replayed(lambda num_envs: recorded(num_envs)), DQNModule(gamma=0.5))


@pytest.mark.parametrize(
    "buffer",
    [
        ExperienceBuffer,
        lambda num_envs: ExperienceBuffer(num_envs=num_envs),
        partial(RecurrentReplayBuffer, 1000, None, None, None),
        partial(SimpleReplayBuffer, None, None, 1000, 8),
    ],
    ids=["experience", "callable", "recurrent", "simple"],
)
def test_the_scale_of_rewards_takes_the_learners_discount(tmp_path, buffer):
    options = {"collector": recording(2, 2, init_random_frames=40), "checkpoint_buffer": "none"}
    data, checking = (
        replayed(buffer, normalize_reward=True, **options),
        Checking(observation=False, gamma=0.5),
    )
    fitted(tmp_path, data, DQNModule(gamma=0.5), callbacks=[checking])
    assert checking.checks == 1


def test_the_scale_of_an_on_policy_learners_rewards_takes_its_discount(tmp_path):
    data = rollouts(GAEBuffer, normalize_reward=True, collector=recording(2, 32))
    checking = Checking(observation=False, gamma=0.9)
    fitted(tmp_path, data, Discounting(), callbacks=[checking])
    assert checking.checks == 1


@pytest.mark.parametrize("buffer", ON_POLICY)
def test_without_a_learners_discount_the_buffers_own_counts(tmp_path, buffer):
    assert fitted(tmp_path, rollouts(buffer), PPOModule()).buffer.gamma == 0.99
    assert fitted(tmp_path, rollouts(partial(buffer, gamma=0.7)), PPOModule()).buffer.gamma == 0.7


def test_without_a_learner_the_documented_discount_counts():
    for data, expected in ((replayed(partial(ExperienceBuffer, n_steps=3)), 0.99), (rollouts(GAEBuffer), 0.99)):
        data.setup("fit")
        assert data.buffer.gamma == expected
        data.close()
    assert PPO_BUFFER(size=3).gamma == GAEBuffer(3).gamma == ExperienceBuffer().gamma == 0.99
    assert EpisodicReturn(recorded(1).storage).gamma == 0.99


REFUSED = [
    (lambda: replayed(partial(ExperienceBuffer, gamma=0.95)), DQNModule, 0.95, 0.99),
    (lambda: replayed(partial(ExperienceBuffer, n_steps=3, gamma=0.99)), partial(DQNModule, gamma=0.9), 0.99, 0.9),
    (
        lambda: replayed(lambda num_envs: ExperienceBuffer(n_steps=3, num_envs=num_envs)),
        partial(DQNModule, gamma=0.9),
        0.99,
        0.9,
    ),
    (lambda: rollouts(partial(GAEBuffer, gamma=0.95)), Discounting, 0.95, 0.9),
    (lambda: rollouts(lambda size: GAEBuffer(size)), Discounting, 0.99, 0.9),
    (
        lambda: replayed(
            partial(ExperienceBuffer, n_steps=3),
            source=partial(MixedReplay, others=[ExperienceBuffer(n_steps=3)], ratios=[0.5, 0.5]),
        ),
        partial(DQNModule, gamma=0.9),
        0.99,
        0.9,
    ),
]


@pytest.mark.parametrize(("make", "learner", "own", "discount"), REFUSED)
def test_another_discount_of_the_buffers_is_refused_with_the_mend(tmp_path, make, learner, own, discount):
    learner = learner()
    kind = type(learner).__name__
    expected = rf"^gamma={own} of the buffer differs from gamma={discount} of {kind}, .* model.gamma={own}"
    with pytest.raises(ValueError, match=expected):
        fitted(tmp_path, make(), learner)


def test_the_same_discount_may_be_given_twice(tmp_path):
    data = fitted(tmp_path, replayed(partial(ExperienceBuffer, n_steps=3, gamma=0.9)), DQNModule(gamma=0.9))
    assert data.buffer.gamma == 0.9


def test_a_second_learner_with_another_discount_is_refused(tmp_path):
    data = fitted(tmp_path, replayed(partial(ExperienceBuffer, n_steps=3)), DQNModule(gamma=0.9))
    with pytest.raises(ValueError, match=r"gamma=0.9 of the buffer differs from gamma=0.8"):
        fitted(tmp_path, data, DQNModule(gamma=0.8))


def test_what_is_no_discount_is_refused_or_left_alone(tmp_path):
    class Focal(PPOModule):
        gamma = 2.0

    with pytest.raises(ValueError, match=r"Focal.gamma must be between 0 and 1, got 2.0"):
        fitted(tmp_path, rollouts(GAEBuffer), Focal())

    class Named(PPOModule):
        gamma = "third"

    assert fitted(tmp_path, rollouts(GAEBuffer), Named()).buffer.gamma == 0.99


def test_a_checkpoint_is_checked_for_a_learner_before_there_is_a_trainer(tmp_path):
    learner = DQNModule(gamma=0.9)
    state = fitted(tmp_path, replayed(partial(ExperienceBuffer, n_steps=3)), learner).state_dict()
    fresh = replayed(partial(ExperienceBuffer, n_steps=3))
    fresh.check_state(state, learner)
    with pytest.raises(ValueError, match=r"written with gamma=0.9, but this run has gamma=0.8"):
        fresh.check_state(state, DQNModule(gamma=0.8))
    fresh.close()


def test_a_resumed_run_has_its_discount(tmp_path):
    make = partial(replayed, partial(ExperienceBuffer, n_steps=3))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(DQNModule(gamma=0.9), datamodule=make())
    run.save_checkpoint(tmp_path / "run.ckpt")
    data = make()
    trainer(tmp_path, max_epochs=2).fit(DQNModule(gamma=0.9), datamodule=data, ckpt_path=tmp_path / "run.ckpt")
    assert (data.buffer.gamma, data.updates) == (0.9, 8)


def test_lightnings_cli_hands_the_learners_discount_over(tmp_path):
    from lightning.pytorch.cli import LightningCLI

    def run(*args: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's own, about jsonargparse
            cli = LightningCLI(
                DQNModule,
                ReplayDataModule,
                run=False,
                save_config_callback=None,
                args=[
                    "--data.env=CartPole-v1",
                    "--data.buffer=torchrl_lightning.ExperienceBuffer",
                    "--data.buffer.n_steps=3",
                    "--data.updates_per_epoch=2",
                    "--data.warmup_frames=20",
                    "--model.gamma=0.9",
                    *args,
                ],
            )
        return fitted(tmp_path, cli.datamodule, cli.model)

    assert run().buffer.gamma == 0.9
    with pytest.raises(ValueError, match=r"gamma=0.95 of the buffer differs"):
        run("--data.buffer.gamma=0.95")
