"""A setting that cannot have an effect raises an error before collection."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.actor_critic import rollouts
from kit.dynamics import model_data
from kit.replay import dqn, replay_data
from kit.runs import trainer
from kit.torchrl_envs import CartPoles
from torchrl_lightning import (
    EpisodicReplayBuffer,
    ExperienceBuffer,
    GAEBuffer,
    GymnasiumCollector,
    MixedReplay,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    SimpleReplayBuffer,
)
from torchrl_lightning.agents import (
    A2CModule,
    DQNModule,
    DynamicsEnsemble,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
    SACModule,
    TD3Module,
)

NETWORK = MLPNetwork([8])
ADAM = partial(torch.optim.Adam, lr=0.5)
ONE_UPDATE = {"num_epochs": 1, "mini_batch_size": None, "num_mini_batch": 1}
AS_ESTIMATED = partial(GAEBuffer, standardize_advantages=False)
SINGLE_SAMPLES = {"mini_batch_size": None, "num_mini_batch": 64, "buffer": AS_ESTIMATED}


def buffer(num_envs: int, size: int = 16, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(size), num_envs=num_envs, **settings)


def windows(**settings: Any) -> Any:
    return lambda num_envs: buffer(num_envs, sampler=SequenceSampler(9, **settings))


def on_policy(kind: Any = PPOModule, data: Any = None, **settings: Any) -> Any:
    return lambda: (kind(NETWORK, **settings), rollouts(**data or {}))


def off_policy(kind: Any = DQNModule, env: str = "CartPole-v1", network: Any = NETWORK, **settings: Any) -> Any:
    return lambda: (kind(network, **settings), replay_data(env=env))


continuous = partial(off_policy, env="Pendulum-v1")


def replay(buffer: Any = "uniform", **settings: Any) -> Any:
    return lambda: (dqn(), replay_data(buffer, **settings))


REFUSED: dict[str, Any] = {
    "target_kl must be None with one update": on_policy(data=ONE_UPDATE, target_kl=0.1),
    "clip_value must be None with one update": on_policy(data=ONE_UPDATE, clip_value=0.1),
    "num_mini_batch must be below frames_per_batch=64": on_policy(data=SINGLE_SAMPLES),
    "entropy_schedule .* without entropy_coeff": on_policy(A2CModule, entropy_schedule="linear"),
    "intrinsic_coeff .* without intrinsic": on_policy(intrinsic_coeff=2.0),
    "extrinsic_coeff must be left at its default 1.0": on_policy(data={"buffer": AS_ESTIMATED}, extrinsic_coeff=2.0),
    "extrinsic_coeff .* without a second advantage": on_policy(
        data={"buffer": AS_ESTIMATED}, extrinsic_coeff=2.0, intrinsic=RandomNetworkDistillation(), intrinsic_coeff=0.0
    ),
    "intrinsic_coeff .* without a second advantage": on_policy(
        data={"buffer": AS_ESTIMATED}, extrinsic_coeff=0.0, intrinsic=RandomNetworkDistillation(), intrinsic_coeff=2.0
    ),
    "separate_critics .* without several critics": on_policy(separate_critics=True),
    "critics must name at least one": on_policy(critics=[]),
    "initial_std must be left at 1.0 unless actions are continuous": on_policy(initial_std=2.0),
    "learning_rate .* without an optimizer with this rate": on_policy(learning_rate=0.1, optimizer=ADAM),
    "optimizer must be None if critic_optimizer is set": off_policy(optimizer=ADAM, critic_optimizer=ADAM),
    "margin .* without margin_coeff": off_policy(margin=0.5),
    "epsilon_spread must be 0 without collector=": off_policy(epsilon_spread=7.0),
    "shared must be False in the network of DQNModule": off_policy(network=MLPNetwork(shared=True)),
    "target_entropy .* without learn_alpha": continuous(SACModule, learn_alpha=False, target_entropy=-2.0),
    "noise_frames .* without a noise_end": continuous(TD3Module, noise_frames=10),
    "noise_clip .* without policy_noise": continuous(TD3Module, policy_noise=0.0, noise_clip=0.1),
    "normalize_clip .* without normalize_observation or": replay(normalize_clip=3.0),
    "normalize_epsilon .* without normalize_observation or": replay(normalize_epsilon=0.1),
    "freeze_statistics .* without normalize_observation or": on_policy(data={"freeze_statistics": True}),
    "freeze_statistics must be False without the moments": on_policy(
        data={"freeze_statistics": True, "normalize_observation": True}
    ),
    "freeze_statistics must be False .* for rewards": replay(freeze_statistics=True, normalize_reward=True),
    "write_back must name .* stores, got 'nothing'": replay(write_back=["nothing"]),
    "write_back must name .* stores, got 'index'": replay("prioritized", write_back=["index"]),
    r"write_back must name .* stores, got \('next', 'nothing'\)": replay("sequence", write_back=[("next", "nothing")]),
    "write_back must name .* stores, got 'recurrent_state'": replay("sequence", write_back=["recurrent_state"]),
    r"write_back must name entries outside of 'next' with n_steps=3, got \('next', 'observation'\)": replay(
        "three steps", write_back=["observation", ("next", "observation")]
    ),
    "write_back must name entries outside of 'next' with n_steps=3, got 'next'": replay(
        "three steps", write_back=["next"]
    ),
    "normalize_observation must be True, False or": on_policy(data={"normalize_observation": []}),
    "buffer_dir must be None with checkpoint_buffer='inside'": replay(buffer_dir="here"),
    "n_steps must be at most .* 8, got 9": replay(partial(buffer, n_steps=9)),
    "batch_length must be at most .* 8, got 9": replay(windows()),
    "obs_dim must be 4, the size in the environment, got 3": replay(
        lambda num_envs: SimpleReplayBuffer(3, None, 400, 8, num_envs=num_envs)
    ),
    "act_dim must be 1, the size in the environment, got 2": lambda: (
        SACModule(NETWORK),
        replay_data(lambda num_envs: SimpleReplayBuffer(3, 2, 400, 8, num_envs=num_envs), env="Pendulum-v1"),
    ),
    "max_capacity must be at least 16, the cells of the storage, got 8": replay(
        lambda num_envs: buffer(num_envs, sampler=PrioritizedSampler(8, alpha=0.6, beta=0.4))
    ),
}


@pytest.mark.parametrize("says", REFUSED)
def test_setting_without_effect_is_refused_before_anything_is_collected(says: str) -> None:
    made: list[Any] = []

    def fit() -> None:
        made.extend(REFUSED[says]())
        trainer().fit(made[0], datamodule=made[1])

    with pytest.raises(ValueError, match=says) as refusal:
        fit()
    assert "\n" not in str(refusal.value)
    assert all(data.frames == 0 and data.collector is None for data in made[1:])


FITS: dict[str, dict[str, Any]] = {
    "val_check_interval must be at most 3": {"val_check_interval": 50},
    "val_check_interval must be at most 2": {"val_check_interval": 3, "limit_train_batches": 2},
    "limit_val_batches must be .* got 0.9, .* of 1 ": {"limit_val_batches": 0.9},
    "limit_train_batches must be .* got 0.1, .* of 3 ": {"limit_train_batches": 0.1},
    "overfit_batches must be 0, got 0.1": {"overfit_batches": 0.1},
    "overfit_batches must be 0, got 1": {"overfit_batches": 1},
}


@pytest.mark.parametrize("says", FITS)
def test_limits_that_leave_a_fit_without_batches_are_refused_before_the_warm_up(says: str) -> None:
    data = model_data()
    with pytest.raises(ValueError, match=says) as refusal:
        trainer(**FITS[says]).fit(DynamicsEnsemble(), datamodule=data)
    assert "\n" not in str(refusal.value)
    assert (data.frames, data.collector) == (0, None)


def test_fit_without_validation_rows_is_refused_before_the_warm_up() -> None:
    data = model_data(validation_fraction=1e-6)
    with pytest.raises(ValueError, match="validation_fraction"):
        trainer().fit(DynamicsEnsemble(), datamodule=data)
    assert (data.frames, data.collector) == (0, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 3},
        {"val_check_interval": 50, "limit_val_batches": 0},
        {"val_check_interval": 50, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.01},
        {"limit_val_batches": 1},
        {"limit_train_batches": 0.4},
        {"fast_dev_run": True},
    ],
)
def test_limits_that_leave_batches_are_accepted(settings: dict[str, Any]) -> None:
    data = model_data()
    trainer(**{"max_epochs": 1, **settings}).fit(DynamicsEnsemble(), datamodule=data)
    assert data.frames == 40


TAKEN: dict[str, Any] = {
    "one update without a limit": on_policy(data=ONE_UPDATE),
    "single samples as they are": on_policy(data=SINGLE_SAMPLES, normalize_advantage=False),
    "the optimizer's own rate": on_policy(learning_rate=0.5, optimizer=ADAM),
    "entries that are stored": replay(write_back=["observation", "is_init", ("next", "reward"), "next"]),
    "entries of several steps": replay("three steps", write_back=["action"]),
    "states of a recurrent network": lambda: (
        dqn(recurrent=True),
        replay_data("sequence", write_back=["recurrent_state", ("next", "recurrent_state")]),
    ),
    "returns as long as the ring": replay(partial(buffer, n_steps=8)),
    "windows that are padded": replay(windows(episode_ends="pad")),
}


@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_setting_with_an_effect_is_accepted(make: Any) -> None:
    module, data = make()
    trainer(max_epochs=1).fit(module, datamodule=data)
    assert data.frames > 0


def make_collector(policy: Any, num_envs: int, frames_per_batch: int) -> GymnasiumCollector:
    return GymnasiumCollector("CartPole-v1", policy, num_envs=num_envs, frames_per_batch=frames_per_batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"collector": make_collector},
        {"env": CartPoles(2), "eval_env": CartPoles(2)},
        {"source": lambda buffer: MixedReplay(buffer, [buffer], [0.5, 0.5])},
        {"buffer": lambda num_envs: EpisodicReplayBuffer(None, num_envs, 100)},
    ],
    ids=["collector", "torchrl", "source", "episodic"],
)
def test_unknown_keys_to_write_back_are_refused_before_the_first_update(settings: dict[str, Any]) -> None:
    data, module = replay_data(**{"write_back": ["index"], **settings}), dqn()
    with pytest.raises(ValueError, match=r"write_back.*'index'"):
        trainer(limit_val_batches=0).fit(module, datamodule=data)
    assert module.updates == 0


NUMBERS = [
    *((PPOModule, name, value) for name in ("learning_rate", "initial_std") for value in (float("nan"), float("inf"))),
    *((PPOModule, name, float("nan")) for name in ("entropy_coeff", "critic_coeff", "intrinsic_coeff")),
    (PPOModule, "critic_coeff", -1.0),
    (SACModule, "alpha", float("inf")),
    (SACModule, "target_entropy", float("nan")),
    (TD3Module, "policy_noise", -1.0),
    (TD3Module, "noise", float("inf")),
    (TD3Module, "noise_frames", 0),
    (TD3Module, "noise_clip", 0.0),
]


@pytest.mark.parametrize(("kind", "name", "value"), NUMBERS)
def test_numbers_that_end_in_nan_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}"):
        kind(**{name: value})


def test_warm_up_beyond_the_total_is_announced(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        data = replay_data(total_frames=20, warmup_frames=40)
    assert "total_frames=20 is raised to 40, because warmup_frames=40" in caplog.text
    trainer(tmp_path, max_epochs=-1, limit_val_batches=0).fit(dqn(), datamodule=data)
    assert (data.frames, data.updates) == (40, 1)


@pytest.mark.parametrize("settings", [{"clip_epsilon": 0.1}, {"clip_schedule": "linear"}])
@pytest.mark.parametrize(("data", "warns"), [(ONE_UPDATE, True), ({}, False), ({**ONE_UPDATE, "num_epochs": 2}, False)])
def test_clipping_with_one_update_of_each_rollout_is_announced_once(
    settings: dict[str, Any], data: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(
            PPOModule(NETWORK, **settings), datamodule=rollouts(**data)
        )
    messages = [record.getMessage() for record in caplog.records]
    (setting,) = settings
    assert sum(setting in message and "num_epochs" in message for message in messages) == warns


def test_default_clipping_with_one_update_is_not_announced(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(PPOModule(NETWORK), datamodule=rollouts(**ONE_UPDATE))
    assert "clip_epsilon" not in caplog.text


FROZEN = {"freeze_statistics": True, "normalize_observation": True, "normalize_reward": True}


@pytest.mark.parametrize("stage", ["fit", "resume"])
def test_statistics_of_an_earlier_run_are_frozen(stage: str, tmp_path: Path) -> None:
    normalized = {**FROZEN, "freeze_statistics": False}
    first, run = replay_data(**normalized), trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(dqn(), datamodule=first)
    path = tmp_path / "first.ckpt"
    run.save_checkpoint(path)
    data, state = replay_data(**FROZEN), first.state_dict()
    if stage == "fit":
        data.load_normalization(state["normalization"])
    trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(
        dqn(), datamodule=data, ckpt_path=path if stage == "resume" else None
    )
    assert data.frames > 0
    moments = [entry["moments"] for entry in state["normalization"]["observation"]["entries"]]
    kept = [entry["moments"] for entry in data.state_dict()["normalization"]["observation"]["entries"]]
    assert str(kept) == str(moments)
