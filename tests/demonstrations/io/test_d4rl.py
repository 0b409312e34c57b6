"""D4RL's files give the transitions of its own ``qlearning_dataset``, or one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.demonstrations import CARTPOLE
from torchrl_lightning import EnvironmentRecipe, read_dataset, transitions
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.demonstrations.io.d4rl import d4rl_demonstrations

h5py = pytest.importorskip("h5py")
ROWS = 12


def arrays(rows: int = ROWS, ends: tuple[int, ...] = (4, 9), timeouts: tuple[int, ...] = (6,)) -> dict[str, Any]:
    """What a file of CartPole holds, whose observations count."""
    flags = {"terminals": ends, "timeouts": timeouts}
    return {
        "observations": np.arange(4 * rows, dtype=np.float32).reshape(rows, 4),
        "actions": np.arange(rows) % 2,
        "rewards": np.arange(rows, dtype=np.float32),
        **{name: np.isin(np.arange(rows), where) for name, where in flags.items()},
        "infos/qpos": np.zeros((rows, 3)),
    }


def written(path: Path, entries: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, entry in entries.items():
            file[name] = entry
    return path


def rows_of(path: Path, env: Any = "CartPole-v1") -> dict[str, torch.Tensor]:
    return torch.cat([transitions(each) for each in read_dataset(path, env)]).flatten_keys()


def qlearning(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What D4RL makes of a file: observation, action, reward, whether it is terminal, and next observation."""
    steps = []
    for i in range(len(found["rewards"]) - 1):
        if found["timeouts"][i]:
            continue
        steps.append((*(found[name][i] for name in ("observations", "actions", "rewards", "terminals")), i + 1))
    return steps


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, ROWS - 2)), st.sets(st.integers(0, ROWS - 2)))
def test_transitions_equal_d4rls_qlearning_dataset(tmp_path_factory, ends, timeouts):
    found = arrays(ends=tuple(ends), timeouts=tuple(timeouts))
    path = written(tmp_path_factory.mktemp("d4rl") / "file.hdf5", found)
    expected = qlearning(found)
    if not ends | timeouts or not expected:
        return
    read = [transitions(each) for each in d4rl_demonstrations(path, CARTPOLE)]
    rows = torch.cat(read)
    assert len(rows) == len(expected)
    for row, (observation, action, reward, terminal, following) in zip(rows, expected, strict=True):
        assert row["observation"].tolist() == observation.tolist()
        assert (row["action"].item(), row["next", "reward"].item()) == (action, reward)
        assert row["next", "terminated"].item() == terminal
        if not terminal:
            assert row["next", "observation"].tolist() == found["observations"][following].tolist()


def test_episode_that_timed_out_is_truncated_at_the_last_observation_that_is_known(tmp_path):
    found = read_dataset(written(tmp_path / "file.hdf5", arrays()), "CartPole-v1")
    assert [(each.length, each.ends) for each in found] == [
        (5, (True, False)),
        (1, (False, True)),
        (3, (True, False)),
        (1, (False, True)),
    ]
    assert found[0].last_observation is None
    assert found[1].last_observation["observation"].tolist() == [24, 25, 26, 27]
    assert found[0].name.endswith("file.hdf5, episode 0")


def test_next_observations_of_the_file_are_used(tmp_path):
    found = arrays()
    found["next_observations"] = found["observations"] + 0.5
    rows = rows_of(written(tmp_path / "file.hdf5", found))
    assert torch.equal(rows["observation"], torch.from_numpy(found["observations"]))
    at_end = rows["next.done"].flatten()
    assert at_end.nonzero().flatten().tolist() == [4, 6, 9, 11]
    assert torch.equal(rows["next.observation"][at_end], torch.from_numpy(found["next_observations"])[at_end])
    assert rows["next.terminated"].flatten().nonzero().flatten().tolist() == [4, 9]
    assert rows["next.truncated"].flatten().nonzero().flatten().tolist() == [6, 11]


def test_time_limit_of_the_environment_replaces_missing_timeouts(tmp_path):
    found = arrays(timeouts=())
    del found["timeouts"]
    path = written(tmp_path / "file.hdf5", found)
    assert [each.length for each in read_dataset(path, "CartPole-v1")] == [5, 5, 1]
    limited = read_dataset(path, EnvironmentRecipe("CartPole-v1", time_limit=2))
    assert [(each.length, each.ends[0]) for each in limited] == [(1, False), (1, False), (1, True)] * 2 + [(1, False)]


MISTAKES: dict[str, tuple[Any, str]] = {
    "no ends": ({"terminals": None, "timeouts": None}, "neither terminals nor timeouts marks the end"),
    "none set": (
        {"terminals": np.zeros(ROWS), "timeouts": np.zeros(ROWS)},
        "neither terminals nor timeouts marks the end",
    ),
    "no rewards": ({"rewards": None, "actions": None}, "a D4RL file must contain actions and rewards"),
    "too few": ({"actions": np.zeros(3)}, "'actions' must be a numeric array with a row for each reward"),
    "texts": ({"actions": ["left"] * ROWS}, "'actions' must be a numeric array"),
    "a group": ({"rewards": None, "rewards/x": np.zeros(ROWS)}, "'observations' must be a numeric array"),
    "one number": ({"rewards": 3.0}, "'observations' must be a numeric array"),
    "another shape": ({"observations": np.zeros((ROWS, 3))}, r"'observation' is \[3\] of float32 in each step, but"),
    "other actions": ({"actions": np.full(ROWS, 2)}, "'action' has values from 2 to 2, which are not all in"),
    "not finite": ({"observations": np.full((ROWS, 4), np.nan, np.float32)}, "contains NaN or infinity"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_damaged_file_exits_with_one_line(name, tmp_path):
    changed, message = MISTAKES[name]
    found = {key: entry for key, entry in {**arrays(), **changed}.items() if entry is not None}
    path = written(tmp_path / "file.hdf5", found)
    with pytest.raises(SystemExit, match=rf"^error: dataset={path}.*{message}") as raised, exit_with_one_line():
        read_dataset(path, "CartPole-v1")
    assert len(str(raised.value).splitlines()) == 1


def test_files_that_are_torn_too_large_or_of_another_environment(tmp_path):
    path = written(tmp_path / "file.hdf5", arrays())
    (tmp_path / "torn.hdf5").write_bytes(path.read_bytes()[:2000])
    for file, message in [
        (tmp_path / "torn.hdf5", r"torn\.hdf5 was refused: it is not a complete HDF5 file: "),
        (path, r"its arrays have \d+ bytes, more than the limit of 300"),
        (tmp_path / "none.hdf5", r"does not exist\. Name a directory"),
    ]:
        with pytest.raises(SystemExit, match=message) as raised, exit_with_one_line():
            read_dataset(file, "CartPole-v1", limit=300)
        assert len(str(raised.value).splitlines()) == 1
