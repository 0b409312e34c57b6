from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from kit.demonstrations import CARTPOLE, episode, saved
from kit.images import CountedImages, first_action
from kit.minari_sets import write_cart_poles
from torchrl_lightning import (
    DemonstrationMiner,
    DemonstrationStorage,
    DemonstrationWriter,
    EnvironmentRecipe,
    GymnasiumCollector,
    environment_specs,
)
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.demonstrations import record_demonstrations, write_demonstration
from torchrl_lightning.demonstrations.io.demo_dataset import fill, read_dataset, transitions
from torchrl_lightning.environments import make_environment
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize(("shape", "stack"), [((2, 2), 1), ((2, 2), 3), ((1, 4, 4), 3), ((4, 4, 2), 3)])
def test_transitions_equal_the_rows_of_a_collector(shape, stack, terminates):
    recipe = EnvironmentRecipe(
        partial(CountedImages, shape, "terminated" if terminates else "truncated"), frame_stack=stack
    )
    (demonstration,) = record_demonstrations(recipe, first_action, 1, seed=0)
    env = make_environment(recipe, 1)
    specs = environment_specs(env)
    collected = GymnasiumCollector(env, first_action, frames_per_batch=5, seed=0).rollout()[0]
    collected = collected.exclude("collector", "done", "terminated", "truncated").flatten_keys()
    rows = transitions(demonstration, specs).flatten_keys()
    assert set(rows.keys()) == set(collected.keys())
    for key, leaf in rows.items():
        assert leaf.dtype == collected[key].dtype
        assert torch.equal(leaf, collected[key]), key
    env.close()


def test_unknown_end_is_terminal_and_repeats_the_last_observation():
    found = episode(3)
    rows = transitions(found, CARTPOLE)
    for name in ("terminated", "done"):
        assert rows["next", name].flatten().tolist() == [False, False, True]
    assert not rows["next", "truncated"].any()
    assert torch.equal(rows["next", "observation"], found.steps["observation"][[1, 2, 2]])


def test_mined_episode_is_learned_from_as_it_ended(tmp_path):
    recipe = EnvironmentRecipe("CartPole-v1", time_limit=6)
    storage = DemonstrationStorage()
    miner = DemonstrationMiner(DemonstrationWriter(storage, cut_after_reward=False), num_envs=2)
    for rollout in GymnasiumCollector(recipe, num_envs=2, frames_per_batch=10, total_frames=200, seed=0):
        miner.mine(rollout)
    mined = storage.reward_demonstrations[0]
    assert (mined.terminated, mined.truncated) == (False, True)
    write_demonstration(tmp_path / "mined.safetensors", mined)
    (read,) = read_dataset(tmp_path, "CartPole-v1")
    for each in (mined, read):
        rows = transitions(each, CARTPOLE)["next"]
        assert rows["truncated"].flatten().tolist() == [False] * 5 + [True]
        assert not rows["terminated"].any()


def test_directory_or_one_of_its_files(tmp_path, caplog):
    saved(tmp_path, episode(1), episode(2))
    write_demonstration(tmp_path / "2.npz", episode(4))
    (tmp_path / "3.npz").write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING):
        assert [each.length for each in read_dataset(str(tmp_path), "CartPole-v1")] == [1, 2, 4]
    assert "3.npz was refused" in caplog.text
    assert [each.length for each in read_dataset(tmp_path / "2.npz", "CartPole-v1")] == [4]


def test_unusable_dataset_is_named(tmp_path):
    write_demonstration(tmp_path / "skipping.safetensors", episode(frame_skip=4))
    for dataset, message in [
        (tmp_path / "none", "none does not exist. Name a directory of demonstrations"),
        (tmp_path / "none.npz", r"none\.npz does not exist\. Name a .* or a \.npz, \.safetensors or \.hdf5 file"),
        (__file__, "test_demo_dataset.py is not a directory. Name a directory of demonstrations"),
        (tmp_path, r"contains no usable demonstration \(1 refused\)"),
        (tmp_path / "skipping.safetensors", "has frame_skip=4, but the environment has frame_skip=1"),
    ]:
        with pytest.raises(SystemExit, match=rf"^error: dataset={dataset}.*{message}"), exit_with_one_line():
            read_dataset(dataset, "CartPole-v1")


def test_minari_data_set(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_cart_poles(ends=False)
    for dataset in ("minari:cartpole/small-v0", minari.load_dataset("cartpole/small-v0")):
        found = read_dataset(dataset, "CartPole-v1")
        assert [each.length for each in found] == [3, 2]
        assert transitions(found[0], CARTPOLE)["next", "truncated"].sum() == 1
    wrong = {
        "minari:cartpole/smal-v0": ".*/smal-v0' does not exist.*did you mean cartpole/small-v0.*minari download",
        3: r"dataset must be a minari\.MinariDataset",
    }
    for dataset, message in wrong.items():
        with pytest.raises(SystemExit, match=f"^error: dataset={dataset}: {message}"), exit_with_one_line():
            read_dataset(dataset, "CartPole-v1")


def test_fill_appends_to_the_stored_steps(tmp_path):
    saved(tmp_path, episode(3), episode(2), episode(4))
    found = read_dataset(tmp_path, "CartPole-v1")
    buffer = ExperienceBuffer(storage=RingStorage(24), num_envs=2)
    buffer.extend(transitions(episode(5)), env_ids=torch.tensor([0]))
    fill(buffer, found)
    assert buffer.writer.positions.tolist() == [9, 5]
    first, second, third = map(transitions, found)
    for ring, rows in ((0, torch.cat([transitions(episode(5)), third])), (1, torch.cat([first, second]))):
        held = buffer.storage.get(buffer.writer.cell(torch.tensor(ring), torch.arange(len(rows))))
        for key, leaf in rows.items(True, True):
            assert torch.equal(held[key], leaf), key
    with pytest.raises(ValueError, match=r"9.*3.*max_size=24, 12.*2.*14"):
        fill(buffer, found)
    assert buffer.writer.positions.tolist() == [9, 5]
