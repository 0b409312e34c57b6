"""With ``clip_actions=True`` in the collector, evaluation and published policies clip as collection does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

from kit.actor_critic import TinyActorCritic, rollouts
from kit.clipped import SPACES, FarActorCritic, Strict
from kit.dynamics import model_data
from kit.forks import forked_workers
from kit.replay import replay_data
from kit.runs import trainer
from torchrl_lightning import (
    AsynchronousCollector,
    GymnasiumCollector,
    LoadedPolicy,
    RayCollector,
    environment_specs,
    load_policy,
    make_vector_env,
    play_episodes,
)
from torchrl_lightning.deploy.export import export_policy
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.specs import specs_from_state, specs_state

WHOLE = spaces.Box(0, 5, (2,), np.int32)


def make(space: Any = SPACES["float32"]) -> Any:
    return partial(Strict, space)


def wrapped(space: Any) -> Any:
    return lambda: GymWrapper(Strict(space))


def by_function(policy: Any, seed: int) -> Any:
    """Build a collector that clips, without an argument for it."""
    return GymnasiumCollector(make(), policy, num_envs=4, frames_per_batch=64, seed=seed, clip_actions=True)


def data_of(space: Any = SPACES["float32"], **settings: Any) -> Any:
    clipping = partial(GymnasiumCollector, clip_actions=True)
    return rollouts(**{"env": make(space), "collector": clipping, "num_epochs": 1, **settings})


def fitted(folder: Path, data: Any, module: Any = None, **settings: Any) -> Any:
    """Fit with evaluations, and return the trainer."""
    run = trainer(folder, **{"max_epochs": 1, **settings})
    torch.manual_seed(0)
    run.fit(FarActorCritic() if module is None else module, datamodule=data)
    return run


def checked(space: Any, policy: LoadedPolicy) -> None:
    """Check actions of the policy, one step at a time and for a batch of observations."""
    env = Strict(space)
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        observation, *_ = env.step(policy.act(observation))
    for action in policy.act(np.zeros((4, 3), np.float32)):
        assert space.contains(np.asarray(action))


@pytest.mark.parametrize("name", SPACES)
def test_clipping_applies_to_evaluation_and_loaded_policies(name: str, tmp_path: Path) -> None:
    space = SPACES[name]
    data = data_of(space)
    run = fitted(tmp_path, data)
    assert float(run.callback_metrics["eval/return"]) == 3.0
    assert data.specs.action_format.clip
    path = tmp_path / "a.ckpt"
    run.save_checkpoint(path)
    policy = load_policy(path, FarActorCritic())
    assert policy.specs.action_format.clip
    checked(space, policy)
    ways = [make(space), make_vector_env(make(space), 2)]
    ways += [wrapped(space)] if space.shape else []  # TorchRL adds a dimension to Gymnasium's scalars
    for env in ways:
        assert play_episodes(env, policy, 2, seed=0)["episode_length"].tolist() == [3, 3]
    export_policy(policy, tmp_path / "policy.pt2")
    program: Any = torch.export.load(tmp_path / "policy.pt2").module()
    for action in program(torch.zeros(4, 3)).numpy():
        assert space.contains(np.asarray(action))


@pytest.mark.parametrize("normalize", [False, True])
def test_rollouts_store_the_unclipped_actions_and_their_log_probabilities(normalize: bool, tmp_path: Path) -> None:
    class Watching(FarActorCritic):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert (batch["action"].abs() > 9).all()
            log_prob = self.policy.get_dist(batch).log_prob(batch["action"])
            if batch_idx == 0 and not normalize:
                torch.testing.assert_close(log_prob, batch["action_log_prob"], rtol=1e-4, atol=1e-4)
            return super().training_step(batch, batch_idx)

    data = data_of(normalize_observation=normalize)
    run = fitted(tmp_path, data, Watching())
    assert float(run.callback_metrics["eval/return"]) == 3.0
    assert data.specs.action_format.clip
    run.save_checkpoint(tmp_path / "a.ckpt")
    checked(SPACES["float32"], load_policy(tmp_path / "a.ckpt", FarActorCritic()))


def test_clipping_of_a_built_collector_is_adopted(tmp_path: Path) -> None:
    data = data_of(collector=by_function, normalize_observation=True)
    run = fitted(tmp_path, data)
    assert float(run.callback_metrics["eval/return"]) == 3.0
    run.save_checkpoint(tmp_path / "a.ckpt")
    checked(SPACES["float32"], load_policy(tmp_path / "a.ckpt", FarActorCritic()))
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["OnPolicyDataModule"]
    # A DataModule that has not built its collector reads the setting from the checkpoint.
    other = data_of(collector=by_function, normalize_observation=True)
    other.load_state_dict(stored)
    assert other.specs.action_format.clip
    unclipped = rollouts(env=make(), num_epochs=1, normalize_observation=True)
    (metrics,) = trainer(tmp_path).validate(
        FarActorCritic(), datamodule=unclipped, ckpt_path=tmp_path / "a.ckpt", weights_only=False, verbose=False
    )
    assert metrics["eval/return"] == 3.0
    # A setting of the collector replaces the setting of the checkpoint.
    set_otherwise = data_of(collector=partial(GymnasiumCollector, clip_actions=False), normalize_observation=True)
    set_otherwise.load_state_dict(stored)
    assert not set_otherwise.specs.action_format.clip


def test_worker_processes_clip_and_report_it(tmp_path: Path) -> None:
    with forked_workers():
        data = data_of(num_envs=2, collector=partial(AsynchronousCollector, num_workers=1, clip_actions=True))
        run = fitted(tmp_path, data)
    assert float(run.callback_metrics["eval/return"]) == 3.0
    run.save_checkpoint(tmp_path / "a.ckpt")
    checked(SPACES["float32"], load_policy(tmp_path / "a.ckpt", FarActorCritic()))


@pytest.mark.parametrize("kind", [GymnasiumCollector, AsynchronousCollector, RayCollector])
def test_setting_of_each_kind_of_collector_is_read(kind: Any) -> None:
    for clip in (False, True):
        assert data_of(collector=partial(kind, clip_actions=clip), num_envs=2).specs.action_format.clip is clip
    assert not data_of(collector=kind, num_envs=2).specs.action_format.clip


def test_collector_specs_contain_clipping() -> None:
    for kind in (GymnasiumCollector, partial(AsynchronousCollector, num_workers=1)):
        for clip in (False, True):
            collector = kind(make(), frames_per_batch=4, clip_actions=clip)
            assert collector.specs.action_format.clip is clip
            collector.shutdown()


@pytest.mark.parametrize("collector", [None, GymnasiumCollector, partial(GymnasiumCollector, clip_actions=False)])
def test_actions_are_not_clipped_by_default(collector: Any, tmp_path: Path) -> None:
    class Lenient(Strict):
        def step(self, action: Any) -> Any:
            assert (np.abs(action) > 9).all()
            self.action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
            return super().step(action)

    data = rollouts(env=Lenient, collector=collector, num_epochs=1)
    run = fitted(tmp_path, data)
    assert float(run.callback_metrics["eval/return"]) == 3.0
    assert not data.specs.action_format.clip
    run.save_checkpoint(tmp_path / "a.ckpt")
    policy = load_policy(tmp_path / "a.ckpt", FarActorCritic())
    assert (np.abs(policy.act(np.zeros(3, np.float32))) > 9).all()
    assert play_episodes(Lenient, policy, 1, seed=0)["episode_length"].tolist() == [3]
    clipped = partial(play_episodes, make(), policy, 1, seed=0)
    with pytest.raises(EnvironmentFault, match="is not in"):
        clipped()
    assert clipped(clip_actions=True)["episode_length"].tolist() == [3]


class Far(TensorDictModule):
    """A policy without parameters that acts outside all bounds."""

    def __init__(self) -> None:
        super().__init__(lambda x: x.new_full((*x.shape[:-1], 2), 50.0), ["observation"], ["action"])


@pytest.mark.parametrize(
    "data",
    [
        partial(replay_data, env=make(), collector=partial(GymnasiumCollector, clip_actions=True)),
        partial(model_data, env=make(), collector=partial(GymnasiumCollector, clip_actions=True)),
    ],
    ids=["replay", "dynamics"],
)
def test_evaluation_clips_in_all_datamodules_with_a_collector(data: Any) -> None:
    made = data(eval_episodes=2)
    made.setup("validate")
    assert made.evaluate(Far())["episode_length"].tolist() == [3, 3]
    assert specs_from_state(made.state_dict()["specs"]).action_format.clip
    made.close()


def test_evaluation_of_a_torchrl_environment_clips_too() -> None:
    for space in (SPACES["float32"], SPACES["float64"]):
        data = data_of(space, eval_env=wrapped(space))
        data.setup("validate")
        assert data.evaluate(Far(), 2)["episode_length"].tolist() == [3, 3]
        data.close()


def test_actions_without_a_box_are_refused_before_anything_is_collected() -> None:
    data = data_of(spaces.Discrete(3))
    with pytest.raises(ValueError, match="clip_actions"):
        trainer().fit(TinyActorCritic(), datamodule=data)
    assert data.frames == 0


class Film(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Write a file instead of a video, because Gymnasium needs moviepy for videos."""

    def __init__(self, env: Any, folder: str, episode_trigger: Any) -> None:
        super().__init__(env)
        Path(folder).mkdir()
        (Path(folder) / "film.mp4").write_text(str(episode_trigger(0)))


def test_video_is_of_clipped_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.wrappers, "RecordVideo", Film)
    data = data_of()
    data.setup("validate")
    data.record_video(Far(), tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_text() == "True"
    data.close()


@pytest.mark.parametrize("space", [*SPACES.values(), WHOLE], ids=str)
def test_format_keeps_whether_it_clips(space: Any) -> None:
    specs = environment_specs(make_vector_env(make(space), 1))
    assert specs.with_clipping(False) is specs
    clipped = specs.with_clipping(True)
    assert clipped == specs
    state = specs_state(clipped)
    restored = specs_from_state(state).action_format
    assert restored.clip
    for sign in (-50.0, 50.0):
        action = torch.full((4, *specs.action.shape), sign)
        for form in (restored, clipped.action_format):
            assert all(space.contains(np.asarray(each)) for each in form.to_environment(action.numpy()))
            np.testing.assert_array_equal(form.to_environment(action), form.to_environment(action.numpy()))
            raw = form.to_environment(action, clip=False)
            np.testing.assert_array_equal(raw, specs.action_format.to_environment(action))
            assert form.outside(action).tolist() == specs.action_format.outside(action).tolist()
    # Files of earlier releases do not contain the setting.
    del state["action_format"]["clip"]
    assert not specs_from_state(state).action_format.clip


def test_format_does_not_clip_by_default() -> None:
    form = ActionFormat.from_space(SPACES["float32"])
    assert not form.clip
    assert form.to_environment(np.full((1, 2), 7, np.float32)).tolist() == [[7.0, 7.0]]
