"""A learner's discount applies to every component that discounts; another value raises an error."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from kit import actor_critic, replay
from kit.normalized import Checking, recording
from torchrl_lightning import (
    DQNModule,
    EpisodicReplayBuffer,
    EpisodicReturn,
    ExperienceBuffer,
    GAEBuffer,
    MixedReplay,
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
THREE_STEPS = partial(ExperienceBuffer, n_steps=3)
rollouts = partial(actor_critic.rollouts, num_envs=2, frames_per_batch=32, mini_batch_size=16, num_epochs=1)
replayed = partial(replay.replay_data, updates_per_epoch=4)


class Discounting(PPOModule):
    """An on-policy learner of a user, with discounts."""

    gamma = 0.9
    gamma_intrinsic = 0.8


def fitted(folder: Any, data: Any, learner: Any, **settings: Any) -> Any:
    actor_critic.fit(folder, data, learner, max_epochs=1, **settings)
    return data


class Recorder(DQNModule):
    """A learner that stores its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("seen", []).append(batch)
        super().training_step(batch, batch_idx)


def test_n_step_returns_take_the_learners_discount(tmp_path):
    learner = Recorder(gamma=0.5)
    assert fitted(tmp_path, replayed(THREE_STEPS), learner).buffer.gamma == 0.5
    batch = torch.cat(learner.seen)
    torch.testing.assert_close(batch["gamma"], 0.5 ** batch["steps_to_next_obs"].float())
    assert batch["steps_to_next_obs"].max() == 3


@pytest.mark.parametrize("buffer", ON_POLICY)
def test_estimates_take_the_learners_discounts_else_the_buffers_own(tmp_path, buffer):
    taken = fitted(tmp_path, rollouts(buffer=buffer), Discounting()).buffer
    assert (taken.gamma, taken.gamma_intrinsic) == (0.9, 0.8)
    assert taken.normalizer.gamma == 0.8
    for own, gamma in ((buffer, 0.99), (partial(buffer, gamma=0.7), 0.7)):
        assert fitted(tmp_path, rollouts(buffer=own), PPOModule()).buffer.gamma == gamma


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
    with pytest.raises(ValueError, match=r"gamma=0.99.*gamma=0.5.*DQNModule"):
        fitted(tmp_path, replayed(lambda num_envs: recorded(num_envs)), DQNModule(gamma=0.5))


@pytest.mark.parametrize(
    "buffer",
    [
        ExperienceBuffer,
        lambda num_envs: ExperienceBuffer(num_envs=num_envs),
        partial(RecurrentReplayBuffer, 1000, None, None, None),
        partial(SimpleReplayBuffer, None, None, 1000, 8),
        GAEBuffer,
    ],
    ids=["experience", "callable", "recurrent", "simple", "on-policy"],
)
def test_scale_of_rewards_takes_the_learners_discount(tmp_path, buffer):
    if buffer is GAEBuffer:
        learner, data = Discounting(), rollouts(buffer=buffer, normalize_reward=True, collector=recording(2, 32))
    else:
        collector = recording(2, 2, init_random_frames=40)
        settings = {"normalize_reward": True, "checkpoint_buffer": "none", "collector": collector}
        learner, data = DQNModule(gamma=0.5), replayed(buffer, **settings)
    checking = Checking(observation=False, gamma=learner.gamma)
    fitted(tmp_path, data, learner, callbacks=[checking])
    assert checking.checks == 1


def test_discount_without_a_learner_is_the_documented_default():
    for data in (replayed(THREE_STEPS), rollouts()):
        data.setup("fit")
        assert data.buffer.gamma == 0.99
        data.close()
    assert PPO_BUFFER(size=3).gamma == GAEBuffer(3).gamma == ExperienceBuffer().gamma == 0.99
    assert EpisodicReturn(recorded(1).storage).gamma == 0.99


def mixed() -> ReplayDataModule:
    return replayed(THREE_STEPS, source=partial(MixedReplay, others=[THREE_STEPS()], ratios=[0.5, 0.5]))


SHORT = partial(DQNModule, gamma=0.9)


@pytest.mark.parametrize(
    ("make", "learner", "own", "discount"),
    [
        (lambda: replayed(partial(ExperienceBuffer, gamma=0.95)), DQNModule, 0.95, 0.99),
        (lambda: replayed(partial(THREE_STEPS, gamma=0.99)), SHORT, 0.99, 0.9),
        (lambda: replayed(lambda num_envs: THREE_STEPS(num_envs=num_envs)), SHORT, 0.99, 0.9),
        (lambda: rollouts(buffer=partial(GAEBuffer, gamma=0.95)), Discounting, 0.95, 0.9),
        (lambda: rollouts(buffer=lambda size: GAEBuffer(size)), Discounting, 0.99, 0.9),
        (mixed, SHORT, 0.99, 0.9),
    ],
)
def test_discount_of_the_buffer_that_differs_is_refused(tmp_path, make, learner, own, discount):
    learner = learner()
    kind = type(learner).__name__
    expected = rf"^gamma={own} of the buffer differs from gamma={discount} of {kind}, .* model.gamma={own}"
    with pytest.raises(ValueError, match=expected):
        fitted(tmp_path, make(), learner)


def test_equal_discounts_are_accepted_and_a_second_learners_is_refused(tmp_path):
    data = fitted(tmp_path, replayed(partial(THREE_STEPS, gamma=0.9)), DQNModule(gamma=0.9))
    assert data.buffer.gamma == 0.9
    with pytest.raises(ValueError, match=r"gamma=0.9.*gamma=0.8"):
        fitted(tmp_path, data, DQNModule(gamma=0.8))


def test_invalid_discount_is_refused_or_ignored(tmp_path):
    class Focal(PPOModule):
        gamma = 2.0

    with pytest.raises(ValueError, match=r"Focal.gamma.*0.*1.*2.0"):
        fitted(tmp_path, rollouts(), Focal())

    class Named(PPOModule):
        gamma = "third"

    assert fitted(tmp_path, rollouts(), Named()).buffer.gamma == 0.99


def test_checkpoint_is_checked_for_a_learner_and_resumes_with_its_discount(tmp_path):
    _, run = actor_critic.fit(tmp_path, replayed(THREE_STEPS), DQNModule(gamma=0.9), max_epochs=1)
    run.save_checkpoint(tmp_path / "run.ckpt")
    state, data = run.datamodule.state_dict(), replayed(THREE_STEPS)
    data.check_state(state, DQNModule(gamma=0.9))
    with pytest.raises(ValueError, match=r"gamma=0.9.*gamma=0.8"):
        data.check_state(state, DQNModule(gamma=0.8))
    actor_critic.fit(tmp_path, data, DQNModule(gamma=0.9), tmp_path / "run.ckpt", max_epochs=2)
    assert (data.buffer.gamma, data.updates) == (0.9, 8)


def test_lightning_cli_passes_the_learners_discount(tmp_path):
    buffer = ("--data.buffer=torchrl_lightning.ExperienceBuffer", "--data.buffer.n_steps=3")
    sizes = ("--data.env=CartPole-v1", "--data.updates_per_epoch=2", "--data.warmup_frames=20")

    def run(*chosen: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's warnings about jsonargparse
            args = [*sizes, *buffer, "--model.gamma=0.9", *chosen]
            cli = LightningCLI(DQNModule, ReplayDataModule, run=False, save_config_callback=None, args=args)
        return fitted(tmp_path, cli.datamodule, cli.model)

    assert run().buffer.gamma == 0.9
    with pytest.raises(ValueError, match=r"gamma=0.95"):
        run("--data.buffer.gamma=0.95")
