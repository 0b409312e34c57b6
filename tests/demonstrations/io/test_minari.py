from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from gymnasium import spaces

from kit.demonstrations import CARTPOLE
from kit.minari_sets import write, write_cart_poles
from torchrl_lightning import EnvironmentSpecs
from torchrl_lightning.demonstrations import minari_demonstrations
from torchrl_lightning.environments.specs import space_to_spec

minari = pytest.importorskip("minari")


@pytest.fixture(autouse=True)
def own_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def test_episodes_keep_their_last_observation_and_how_they_ended():
    seen = write_cart_poles()
    first, second = minari_demonstrations("cartpole/small-v0", CARTPOLE)
    for found, observations in zip((first, second), seen, strict=True):
        found.fits(CARTPOLE)
        assert torch.equal(found.steps["observation"], torch.from_numpy(observations[:-1]))
        assert torch.equal(found.last_observation["observation"], torch.from_numpy(observations[-1]))
    assert first.steps["action"].tolist() == [0, 1, 1]
    assert first.rewards.tolist() == pytest.approx([0.1, 0.55, 1.0])
    assert first.metadata == {"environment": "CartPole-v1"}
    assert (first.terminated, first.truncated) == (True, False)
    assert second.name == "cartpole/small-v0, episode 1"


def test_nested_observations_get_their_keys_and_unshown_ones_are_left_out():
    space = spaces.Dict(
        {
            "inner": spaces.Dict({"image": spaces.Box(0, 255, (2, 2, 1), np.uint8)}),
            "direction": spaces.Discrete(4),
            "goal": spaces.Box(-1, 1, (2,), np.float64),
        }
    )
    seen = {
        "inner": {"image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2, 1)},
        "direction": np.array([0, 3, 1]),
        "goal": np.ones((3, 2)),
    }
    action = spaces.Box(-1, 1, (2,), np.float32)
    taken = np.full((2, 2), 0.5, np.float32)
    dataset = write("nested/small-v0", [seen], [taken], ends=False, observation_space=space, action_space=action)
    (every,) = minari_demonstrations(dataset)
    assert set(every.observation_keys) == {("inner", "image"), "direction", "goal"}
    assert (every.terminated, every.truncated, every.metadata) == (False, True, {})
    shown = space_to_spec(space, "observation")
    del shown["goal"]
    specs = EnvironmentSpecs(shown, space_to_spec(action, "action"), 1)
    (found,) = minari_demonstrations(dataset, specs)
    found.fits(specs)
    assert found.steps["direction"].tolist() == [0, 3]
    assert found.last_observation["inner", "image"].flatten().tolist() == [8, 9, 10, 11]


def test_filtered_data_set_is_read_partially():
    write_cart_poles()
    ones = minari.load_dataset("cartpole/small-v0").filter_episodes(lambda episode: episode.actions[0] == 1)
    assert [each.name for each in minari_demonstrations(ones)] == ["cartpole/small-v0, episode 1"]


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match=r"minari\.MinariDataset"):
        minari_demonstrations([])
    with pytest.raises(FileNotFoundError, match="none/none-v0"):
        minari_demonstrations("none/none-v0")


@pytest.mark.parametrize("kind", ["external", "soft", "kept elsewhere", "virtual", "file"])
def test_links_to_other_files_are_refused(kind, tmp_path):
    h5py = pytest.importorskip("h5py")
    write_cart_poles()
    with h5py.File(tmp_path / "secret.hdf5", "w") as secret:
        secret["x"] = np.ones((3, 4), np.float32)
    path = tmp_path / "cartpole" / "small-v0" / "data" / "main_data.hdf5"
    if kind == "file":
        path.rename(tmp_path / "moved.hdf5")
        path.symlink_to(tmp_path / "moved.hdf5")
    else:
        with h5py.File(path, "a") as file:
            episode = file["episode_0"]
            del episode["observations"]
            if kind == "external":
                episode["observations"] = h5py.ExternalLink(str(tmp_path / "secret.hdf5"), "/x")
            elif kind == "soft":
                episode["observations"] = h5py.SoftLink("/episode_0/rewards")
            elif kind == "kept elsewhere":
                raw = [(str(tmp_path / "secret.hdf5"), 0, 48)]
                episode.create_dataset("observations", (3, 4), np.float32, external=raw)
            else:
                layout = h5py.VirtualLayout((3, 4), np.float32)
                layout[:] = h5py.VirtualSource(str(tmp_path / "secret.hdf5"), "x", (3, 4))
                episode.create_virtual_dataset("observations", layout)
    with pytest.raises(ValueError, match=r"main_data\.hdf5 (was refused: its entry '.*observations' is|is a link)"):
        minari_demonstrations("cartpole/small-v0", CARTPOLE)


def test_actions_are_counted_from_0():
    action = spaces.Discrete(3, start=1)
    shown = spaces.Box(-1, 1, (2,), np.float32)
    seen = np.zeros((3, 2), np.float32)
    dataset = write("shifted/small-v0", [seen], [np.array([1, 3])], observation_space=shown, action_space=action)
    (found,) = minari_demonstrations(dataset)
    assert found.steps["action"].tolist() == [0, 2]


BUILT = {"id": "Evil-v0", "entry_point": "subprocess:Popen", "kwargs": {"args": ["touch", "CANARY"]}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"observation_space": None, "env_spec": json.dumps(BUILT)}, "must contain observation_space as a string"),
        ({"action_space": None, "env_spec": json.dumps(BUILT)}, "must contain action_space as a string"),
        ({"total_episodes": 10**12}, "must have total_episodes between 0 and 2"),
        ({"total_episodes": -1}, "must have total_episodes between 0 and 2"),
        ({"total_episodes": "2"}, "must have total_episodes between 0 and 2"),
        ({"data_format": "arrow"}, "must have data_format 'hdf5'"),
        ({"observation_space": '{"type": "Other"}'}, "is not a complete Minari data set"),
        ({"observation_space": '{"type": "Tuple", "subspaces": [' * 10_000}, "is not a complete Minari data set"),
        ({"minari_version": "0.0.1"}, "is not a complete Minari data set"),
    ],
)
def test_metadata_are_checked_before_minari_builds_what_they_name(changes, told, tmp_path, monkeypatch):
    write_cart_poles()
    path = tmp_path / "cartpole" / "small-v0" / "data" / "metadata.json"
    metadata = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in metadata.items() if value is not None}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        list(minari_demonstrations("cartpole/small-v0", CARTPOLE))
    assert not (tmp_path / "CANARY").exists()


@pytest.mark.parametrize("content", [None, b"[" * 100_000, b"[" + b"1," * (1 << 21) + b"1]", b" " * (1 << 25), b"[]"])
def test_metadata_are_read_within_limits(content, tmp_path):
    write_cart_poles()
    path = tmp_path / "cartpole" / "small-v0" / "data" / "metadata.json"
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"metadata\.json must "):
        minari_demonstrations("cartpole/small-v0", CARTPOLE)


def test_similar_data_set_is_suggested_without_reading_it(tmp_path):
    write_cart_poles()
    (tmp_path / "other-v0" / "data").mkdir(parents=True)
    os.mkfifo(tmp_path / "other-v0" / "data" / "metadata.json")
    with pytest.raises(FileNotFoundError, match="did you mean other-v0"):
        minari_demonstrations("othr-v0", CARTPOLE)
    with pytest.raises(FileNotFoundError, match="cartpole/small-v0"):
        minari_demonstrations("cartpole/smal-v0", CARTPOLE)
