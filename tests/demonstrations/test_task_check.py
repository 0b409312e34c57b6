from __future__ import annotations

import json
from functools import partial
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.wrappers import ClipReward, RecordEpisodeStatistics, TimeLimit, TransformReward

from kit.demonstrations import CARTPOLE, episode
from torchrl_lightning import (
    EnvironmentRecipe,
    ExperienceBuffer,
    GoalReward,
    PPODBuffer,
    ReplayDataModule,
    record_demonstrations,
    write_demonstration,
)
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.demonstrations.io.demo_dataset import read_dataset
from torchrl_lightning.demonstrations.task_check import recipe_metadata, recorded_recipe

ID = "MountainCar-v0"
goal = partial(EnvironmentRecipe, ID, wrappers=[GoalReward])
made = partial(gym.make, ID)  # a factory that others can name


def named(**settings: Any) -> gym.Env[Any, Any]:
    return gym.make(ID, **settings)


def shown(recipe: EnvironmentRecipe, **options: Any) -> Any:
    return episode(metadata=recipe_metadata(recipe), name="a", **options)


@pytest.mark.parametrize(
    ("recorded", "here", "message"),
    [
        (goal(), goal(), None),
        (goal(), goal(wrappers=[{"_target_": "torchrl_lightning.GoalReward"}], vectorization="async"), None),
        (goal(), goal(env_kwargs={"render_mode": "rgb_array"}, time_limit=9, step_timeout=9, frame_stack=1), None),
        (goal(), goal(wrappers=[partial(TimeLimit, max_episode_steps=3), GoalReward, RecordEpisodeStatistics]), None),
        (EnvironmentRecipe(f"minigrid:{ID}"), EnvironmentRecipe(ID), None),
        (EnvironmentRecipe(named), EnvironmentRecipe(named), None),
        (EnvironmentRecipe(lambda: None), EnvironmentRecipe(ID), None),
        (EnvironmentRecipe(ID), EnvironmentRecipe(lambda: None), None),
        (goal(), EnvironmentRecipe("Acrobot-v1"), f"with id='{ID}', but the environment has id='Acrobot-v1'. Use"),
        (
            EnvironmentRecipe(named),
            EnvironmentRecipe(ID),
            "with id={'_target_': '.*test_task_check.named'}, but the env",
        ),
        (EnvironmentRecipe(made), EnvironmentRecipe(ID), f"with id={{'_target_': 'gymnasium.*'_args_': \\['{ID}'\\]}}"),
        (
            goal(),
            goal(wrappers=[]),
            r"with wrappers=.*torchrl_lightning.GoalReward.*, but the environment has no wrappers\. ",
        ),
        (goal(), goal(clip_reward=1), "without clip_reward, but the environment has clip_reward=1.0. Use"),
        (
            goal(),
            goal(env_kwargs={"goal_velocity": 1}),
            "without env_kwargs, but the environment has env_kwargs={'goal_",
        ),
        (goal(), goal(observe=[1, 0]), r"without observe, but the environment has observe=\[1, 0\]"),
        (
            goal(wrappers=[partial(ClipReward, max_reward=1)]),
            goal(wrappers=[partial(ClipReward, max_reward=2)]),
            r"with wrappers\[0\].max_reward=1, but the environment has wrappers\[0\].max_reward=2",
        ),
        (
            goal(wrappers=[partial(TransformReward, func=abs)]),
            goal(),
            r"with wrappers\[0\].*set demon.*data.env",
        ),
    ],
)
def test_another_id_or_reward_is_refused_unless_allowed_by_name(recorded, here, message):
    demonstration = shown(recorded)
    if message is None:
        demonstration.fits(CARTPOLE, 1, here)
        return
    with pytest.raises(ValueError, match=rf"'a'.*{message}") as error:
        demonstration.fits(CARTPOLE, 1, here)
    assert "\n" not in str(error.value)
    id = recorded.settings()["id"]
    name = id if isinstance(id, str) else id["_target_"]
    demonstration.fits(CARTPOLE, 1, here.with_settings(demonstrations_of=["Other-v0", name]))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"environment": "Acrobot-v1"},
        *(
            {"recipe": text}
            for text in (
                3,
                "of pancakes",
                "[" * 100_000,
                "[]",
                "{}",
                '{"id": 3}',
                '{"id": {}}',
                '{"id": {"_target_": ["os.system"]}}',
                '{"id": "a", "env_kwargs": []}',
                '{"id": "a", "wrappers": 3}',
                '{"id": "${oc.env:HOME}"}',
            )
        ),
    ],
)
def test_demonstration_without_a_recipe_is_accepted(metadata):
    assert recorded_recipe(metadata) is None
    episode(metadata=metadata).fits(CARTPOLE, 1, EnvironmentRecipe(ID))


def test_classes_in_a_recorded_recipe_are_not_imported():
    recipe = {"id": "no_such_module:Car-v0", "wrappers": [{"_target_": "no.such.module"}, "word"]}
    with pytest.raises(ValueError, match="id='Car-v0'"):
        episode(metadata={"recipe": json.dumps(recipe)}).fits(CARTPOLE, 1, EnvironmentRecipe(ID))


def left(step: Any) -> Any:
    return step.set("action", torch.zeros(step.batch_size, dtype=torch.int64))


def test_recorded_and_mined_demonstrations_contain_the_recipe(tmp_path):
    recipe = EnvironmentRecipe(ID, time_limit=5, clip_reward=0.5)
    (recorded,) = record_demonstrations(recipe, left, 1, seed=0)
    buffer = PPODBuffer(20, rho=0.0, phi=0.0, bootstrap=False, target_agent_demos_dir=str(tmp_path / "mined"))
    buffer.attach(recipe, num_envs=1)
    collector = GymnasiumCollector(recipe, left, frames_per_batch=20, seed=0, replay=buffer.replay)
    buffer.insert_data_slice(collector.rollout())
    buffer.before_gradients()
    buffer.save_demos()
    write_demonstration(tmp_path / "recorded.safetensors", recorded)
    asked = {"id": ID, "time_limit": 5, "clip_reward": 0.5}
    for folder in (tmp_path, tmp_path / "mined"):
        for each in read_dataset(folder, recipe):
            assert recorded_recipe(each.metadata) == asked
            assert each.metadata["environment"] == ID
        reason = "was recorded with clip_reward=0.5, but the environment has no clip_reward"
        ppod = PPODBuffer(20, initial_human_demos_dir=str(folder))
        with pytest.raises(SystemExit, match=rf"^error: initial_human_demos_dir=.*{reason}"), exit_with_one_line():
            ppod.attach(ID, num_envs=1)
        ppod.attach(EnvironmentRecipe(ID, demonstrations_of=[ID]), num_envs=1)
        file = min(folder.glob("*.safetensors"))
        for dataset in (folder, file):
            with pytest.raises(SystemExit, match=f"^error: dataset=.*{reason}"), exit_with_one_line():
                read_dataset(dataset, ID)
        ppod.attach(EnvironmentRecipe(ID, clip_reward=0.5), num_envs=1)
        assert ppod.load_demo(file).length == 5
    data = ReplayDataModule(ID, buffer=ExperienceBuffer, dataset=tmp_path)
    with pytest.raises(SystemExit, match=f"^error: dataset=.*{reason}"), exit_with_one_line():
        data.setup("fit")
