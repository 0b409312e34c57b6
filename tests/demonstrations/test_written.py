"""Buffers and demonstrations as data sets of Minari's, which come back as they were."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from kit.demonstrations import CARTPOLE, coin, episode, recorded, saved
from kit.images import CountedImages
from torchrl_lightning import (
    DemonstrationStorage,
    EnvironmentRecipe,
    ExperienceBuffer,
    FrameStorage,
    GymnasiumCollector,
    RingStorage,
    environment_specs,
    fill,
    read_dataset,
    transitions,
    write_dataset,
)
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.demonstrations.io.demo_dataset import buffers_in
from torchrl_lightning.environments import make_environment

minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    return tmp_path / "sets"


class Shifted(gymnasium.Env[Any, Any]):
    """Counts its steps and takes one of three actions that start at 2; the fourth step ends an episode."""

    observation_space = spaces.Dict({"inner": spaces.Dict({"step": spaces.Discrete(9)}), "on": spaces.MultiBinary(2)})
    action_space = spaces.Discrete(3, start=2)

    def shown(self) -> Any:
        return {"inner": {"step": self.count}, "on": np.array([self.count % 2, 1], np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        self.count += 1
        return self.shown(), float(action), self.count == 4, False, {}


def drawn(step: TensorDictBase, low: float = -2.0, high: float = 2.0) -> TensorDictBase:
    return step.set("action", torch.empty(*step.batch_size, 1).uniform_(low, high))


def third(step: TensorDictBase) -> TensorDictBase:
    return step.set("action", torch.randint(3, step.batch_size))


ENVIRONMENTS: dict[str, tuple[Any, Any]] = {
    "one vector": (EnvironmentRecipe("CartPole-v1", time_limit=12), coin),
    "continuous actions": (EnvironmentRecipe("Pendulum-v1", time_limit=9), drawn),
    "images": (EnvironmentRecipe(partial(CountedImages, (2, 2), growth=1, alone=True)), coin),
    "large stacks beside a number": (
        EnvironmentRecipe(partial(CountedImages, (32, 32, 1), "truncated", drawn=True), frame_stack=3),
        coin,
    ),
    "nested, actions from 2": (EnvironmentRecipe(Shifted, action_repeat=2), third),
}


def collected(recipe: Any, policy: Any, frames: int = 120) -> list[TensorDictBase]:
    """Rollouts of two environments."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return list(GymnasiumCollector(recipe, policy, num_envs=2, frames_per_batch=24, total_frames=frames, seed=0))


def episodes_of(rollouts: list[TensorDictBase], length: int) -> list[TensorDictBase]:
    """What is whole at its begin in the newest ``length`` steps of each environment."""
    found = []
    for steps in torch.cat(rollouts, 1):
        ends = [0, *(steps["next", "done"].flatten().nonzero().flatten() + 1).tolist(), len(steps)]
        found += [steps[begin:end] for begin, end in pairwise(ends) if len(steps) - length <= begin < end]
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("length", [60, 25])
def test_buffer_comes_back_as_the_same_transitions(name: str, length: int, tmp_path: Path) -> None:
    recipe, policy = ENVIRONMENTS[name]
    rollouts = collected(recipe, policy)
    buffer = ExperienceBuffer(storage=RingStorage(2 * length), num_envs=2)
    for rollout in rollouts:
        buffer.extend(rollout)
    buffer.dumps(tmp_path / "saved")
    write_dataset("minari:own/live-v0", buffer, recipe)
    write_dataset("minari:own/saved-v0", tmp_path / "saved", recipe)
    env = make_environment(recipe, 1)
    specs = environment_specs(env)
    expected = episodes_of(rollouts, length)
    assert len(expected) > 2
    for dataset in ("minari:own/live-v0", "minari:own/saved-v0"):
        found = read_dataset(dataset, recipe)
        assert len(found) == len(expected)
        for demonstration, steps in zip(found, expected, strict=True):
            rows = transitions(demonstration, specs)
            for key in [*specs.keys, "action", ("next", "reward"), ("next", "terminated")]:
                assert torch.equal(rows[key], steps[key]), key
            for key in specs.keys:
                assert torch.equal(rows["next"][key], steps["next"][key]), key
            cut = not steps["next", "done"][-1]
            assert torch.equal(rows["next", "truncated"][:-1], steps["next", "truncated"][:-1])
            assert rows["next", "truncated"][-1] == (steps["next", "truncated"][-1] | cut)
    env.close()


def test_minari_finds_the_environment_its_spaces_and_the_actions_as_it_counts_them() -> None:
    recipe, policy = ENVIRONMENTS["one vector"]
    buffer = ExperienceBuffer(storage=RingStorage(60), num_envs=2)
    buffer.extend(collected(recipe, policy, 48)[0])
    write_dataset("minari:own/cartpole-v0", buffer, recipe)
    dataset = minari.load_dataset("own/cartpole-v0")
    env = dataset.recover_environment()
    assert (env.spec.id, env.spec.max_episode_steps) == ("CartPole-v1", 12)
    assert dataset.observation_space == env.observation_space
    assert dataset.action_space == env.action_space
    assert list(minari.list_local_datasets()) == ["own/cartpole-v0"]
    for each in dataset.iterate_episodes():
        assert each.observations.shape == (len(each) + 1, 4)
    env.close()
    recipe, policy = ENVIRONMENTS["nested, actions from 2"]
    nested = ExperienceBuffer(storage=RingStorage(60), num_envs=2)
    nested.extend(collected(recipe, policy, 48)[0])
    write_dataset("minari:own/nested-v0", nested, recipe)
    dataset = minari.load_dataset("own/nested-v0")
    assert dataset.action_space == Shifted.action_space
    assert dataset.spec.env_spec is None
    first = dataset[0]
    assert set(first.actions) <= {2, 3, 4}
    assert first.observations["inner"]["step"].tolist() == [0, 2, 4]
    assert first.observations["on"].dtype == np.int8


def test_demonstrations_of_a_folder_keep_how_they_ended(tmp_path: Path) -> None:
    folder = saved(
        tmp_path / "shown",
        episode(3, terminated=True, truncated=False),
        episode(2, terminated=False, truncated=True),
        episode(4),
    )
    write_dataset("minari:shown-v0", folder, "CartPole-v1")
    for there, here in zip(
        read_dataset(folder, "CartPole-v1"), read_dataset("minari:shown-v0", "CartPole-v1"), strict=True
    ):
        for key, leaf in transitions(there).items(True, True):
            assert torch.equal(leaf, transitions(here)[key]), key


def test_recipe_is_checked_when_it_is_read() -> None:
    recipe = EnvironmentRecipe("CartPole-v1", clip_reward=0.5)
    write_dataset("minari:clipped-v0", [episode(3)], recipe)
    assert len(read_dataset("minari:clipped-v0", recipe)) == 1
    with pytest.raises(SystemExit, match=r"clip_reward=0.5"), exit_with_one_line():
        read_dataset("minari:clipped-v0", "CartPole-v1")


def test_episode_that_a_restart_cut_is_no_part_of_the_next() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(20))
    for number in (2, 3):
        rows = transitions(episode(number, terminated=False, truncated=False))
        for flag in ("done", "truncated"):
            rows["next", flag].zero_()
        buffer.extend(rows)
    write_dataset("minari:cut-v0", buffer, "CartPole-v1")
    assert [(each.length, each.ends) for each in read_dataset("minari:cut-v0", "CartPole-v1")] == [
        (2, (False, True)),
        (3, (False, True)),
    ]


def test_buffer_that_keeps_each_frame_once_is_written_live(tmp_path: Path) -> None:
    recipe, policy = ENVIRONMENTS["large stacks beside a number"]
    rollouts = collected(recipe, policy)
    frames = ExperienceBuffer(storage=FrameStorage(120, 3, keys=["image"]), num_envs=2)
    for rollout in rollouts:
        frames.extend(rollout)
    write_dataset("minari:frames-v0", frames, recipe)
    for found, steps in zip(read_dataset("minari:frames-v0", recipe), episodes_of(rollouts, 60), strict=True):
        assert torch.equal(found.steps["image"], steps["image"][..., -1:])
    frames.dumps(tmp_path / "frames")
    with (
        pytest.raises(SystemExit, match=r"it stores each frame of a stack once\. Load it into its buffer"),
        exit_with_one_line(),
    ):
        write_dataset("minari:frames-v1", tmp_path / "frames", recipe)


@pytest.mark.parametrize("what", ["there", "name", "kind", "none", "empty", "another", "flagless", "nowhere"])
def test_failed_write_exits_with_one_line_and_leaves_no_files(what: str, own_data_sets: Path, tmp_path: Path) -> None:
    own_data_sets.mkdir()
    dataset, source, env, message = "minari:ab/own-v0", [episode(2)], "CartPole-v1", ""
    bare = ExperienceBuffer(storage=RingStorage(4))
    bare.extend(TensorDict({"observation": torch.zeros(2, 4), "action": torch.zeros(2).long()}, [2]))
    headless = ExperienceBuffer(storage=RingStorage(4))
    headless.extend(transitions(episode(9)))
    match what:
        case "there":
            write_dataset(dataset, source, env)
            message = r"own-v0 exists\. Name another version, or delete it with minari.delete_dataset\('ab/own-v0'\)"
        case "name":
            dataset, message = "minari:../own-v0", r"must be NAME-v0 or NAMESPACE/NAME-v0, got '\.\./own-v0'"
        case "kind":
            dataset, message = "own-v0", "the name must be minari:ID, such as minari:cartpole/own-v0"
        case "none":
            source, message = [], "the source contains no complete episode"
        case "empty":
            source, message = headless, "the source contains no complete episode"
        case "another":
            source = [episode(2), *read_dataset(recorded(tmp_path / "shown", "Acrobot-v1", third, 1), "Acrobot-v1")]
            message = "was recorded with id='Acrobot-v1', but the environment has id='CartPole-v1'"
        case "flagless":
            source, message = bare, r"the buffer must have the entry \('next', 'done'\)"
        case "nowhere":
            source, message = tmp_path / "nowhere", "nowhere does not exist"
    before = sorted(own_data_sets.rglob("*"))
    with pytest.raises(SystemExit, match=message) as raised, exit_with_one_line():
        write_dataset(dataset, source, env)
    assert len(str(raised.value).splitlines()) == 1
    assert sorted(own_data_sets.rglob("*")) == before


def test_missing_buffer_entries_are_named(own_data_sets: Path) -> None:
    buffer = ExperienceBuffer(storage=RingStorage(20))
    fill(buffer, [episode(3)], CARTPOLE)
    others = {
        EnvironmentRecipe(
            "CartPole-v1", observe=[0, 1, 2]
        ): r"'observation' must have the environment's shape \[3\], got \[4\] in the buffer",
        EnvironmentRecipe(CountedImages): r"the buffer must contain the entry 'image', got \['action'",
    }
    for env, message in others.items():
        with pytest.raises(SystemExit, match=message), exit_with_one_line():
            write_dataset("minari:own-v0", buffer, env)
    assert not list(own_data_sets.iterdir())


def test_nested_state_yields_all_its_buffers() -> None:
    buffer = ExperienceBuffer(storage=RingStorage(20))
    fill(buffer, [episode(3)], CARTPOLE)
    state = {"ranks": [{"buffer": buffer.state_dict()}], "mined": DemonstrationStorage(3).state_dict()}
    assert [len(each) for each in buffers_in(state)] == [3]
