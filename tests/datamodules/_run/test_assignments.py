"""The assignment of a DataModule's argument takes effect or raises an error."""

from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from kit.actor_critic import TinyActorCritic, rollouts
from kit.dynamics import model_data
from kit.replay import dqn, fit, replay_data
from kit.runs import trainer
from torchrl_lightning import DynamicsDataModule, GAEBuffer, OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.datamodules import base
from torchrl_lightning.datamodules.base import ExperienceDataModule

MAKERS = {"on-policy": rollouts, "replay": replay_data, "dynamics": model_data}
CLASSES = {"on-policy": OnPolicyDataModule, "replay": ReplayDataModule, "dynamics": DynamicsDataModule}
ARGUMENTS = [(kind, name) for kind, cls in CLASSES.items() for name in inspect.signature(cls).parameters]
# For each argument that takes effect when it is assigned: the value, and the number that it changes.
EVALUATIONS = {"eval_episodes": (5, 5), "eval_num_envs": (1, 1), "eval_mode": ("sampled", False)}
ALWAYS = {
    "total_frames": (77, lambda data: data._clock.run.total_frames),
    "shuffle": (False, lambda data: data.shuffle),
    "batch_size": (3, lambda data: data.batch_size),
    "warmup_frames": (9, lambda data: data._collector_options()["init_random_frames"]),
    "max_epochs_per_fit": (2, lambda data: data.max_epochs_per_fit),
    "num_epochs": (7, lambda data: len(data.train_dataloader()) // data.num_mini_batch),
    "updates_per_epoch": (5, lambda data: len(data.train_dataloader())),
    "checkpoint_buffer": ("none", lambda data: data._buffer_mode),
}
BETWEEN_FITS = ("num_epochs", "updates_per_epoch", "checkpoint_buffer")


def kept(data: Any, name: str) -> Any:
    return vars(data).get(type(data).settings_of_class[name].attribute)


@pytest.mark.parametrize(("kind", "name"), ARGUMENTS)
def test_argument_counts_later_or_is_refused(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, played = MAKERS[kind](), {}
    monkeypatch.setattr(
        base, "play_episodes", lambda env, policy, episodes, **options: played.update(options, n=episodes)
    )
    if name == "seed":
        data.seed = 3
        assert data._spawn_seed("evaluation") == MAKERS[kind](seed=3)._spawn_seed("evaluation")
        data._is_set_up = True
    elif name in EVALUATIONS:
        value, effect = EVALUATIONS[name]
        setattr(data, name, value)
        data.evaluate(None)
        key = {"eval_episodes": "n", "eval_num_envs": "num_envs", "eval_mode": "deterministic"}[name]
        assert played[key] == effect
        return
    elif name in ALWAYS:
        value, effect = ALWAYS[name]
        setattr(data, name, value)
        assert effect(data) == value
        assert data.hparams.get(name, value) == value
        if name not in BETWEEN_FITS:
            return
        data.trainer = trainer()
        data.trainer.state.fn, data.trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    before = kept(data, name)
    with pytest.raises(ValueError, match=f"^{name} must be (passed to the constructor|assigned before)"):
        setattr(data, name, object())
    assert kept(data, name) is before


@pytest.mark.parametrize("name", ["make_buffer", "make_collector"])
def test_attribute_of_an_argument_is_refused_by_the_name_of_the_argument(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.removeprefix('make_')} must be passed"):
        setattr(rollouts(), name, GAEBuffer)


@pytest.mark.parametrize(("name", "value"), [("total_frames", 0), ("eval_mode", "best"), ("warmup_frames", None)])
def test_invalid_value_changes_nothing_later(name: str, value: Any) -> None:
    data = replay_data()
    before = getattr(data, name)
    with pytest.raises(ValueError, match=name):
        setattr(data, name, value)
    assert getattr(data, name) == data.hparams[name] == before


def test_argument_of_another_datamodule_is_refused() -> None:
    with pytest.raises(ValueError, match="normalize_reward must be left out"):
        model_data().normalize_reward = True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copy_has_its_own_settings(copied: Any) -> None:
    data = rollouts(total_frames=64)
    other = copied(data)
    other.total_frames = 128
    assert (data._clock.run.total_frames, other._clock.run.total_frames) == (64, 128)
    with pytest.raises(ValueError, match="num_envs must be passed"):
        other.num_envs = 2


class Halved(OnPolicyDataModule):
    """A DataModule of a user that adds one argument and computes another."""

    reward: float = 1.0

    def __post_init__(self) -> None:
        self.frames_per_batch //= 2
        super().__post_init__()


def test_own_settings_of_a_subclass_stay_free() -> None:
    data = Halved("CartPole-v1", num_envs=4, frames_per_batch=128)
    assert data.frames_per_batch == 64
    data.reward = 2.0
    assert data.reward == 2.0
    with pytest.raises(ValueError, match="frames_per_batch must be passed"):
        data.frames_per_batch = 32


@pytest.mark.parametrize(
    ("make", "module", "frames"),
    [(rollouts, TinyActorCritic, (64, 128)), (partial(replay_data, num_envs=1), dqn, (60, 90))],
)
def test_raised_total_continues_the_run(make: Any, module: Any, frames: tuple[int, int], tmp_path: Any) -> None:
    data, learner = make(total_frames=frames[0]), module()
    for total in frames:
        data.total_frames = total
        fit(tmp_path, data, learner, max_epochs=-1)
        assert data.frames == total
    assert isinstance(data, ExperienceDataModule)
