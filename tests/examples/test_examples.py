"""Each example runs from another folder and prints a number at its end. The runs are too short to check scores."""

from __future__ import annotations

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from kit.extras import need_extra
from kit.forks import Forked, as_script
from kit.processes import PROJECT
from torchrl_lightning import read_demonstration

EXAMPLES = PROJECT / "examples"
OWN_CARTPOLE = "examples.continuous_cartpole:ContinuousCartPole"
SCRIPTS = (
    *("torchrl_only.py", "own_trainer.py", "own_environment.py", "loss_module.py", "hydra_app/train.py"),
    *("planner.py", "demonstrations.py", "behaviour_cloning.py", "continuous_cartpole.py", "guide/draw_data_path.py"),
    *("pick_and_place.py", "ray_learners.py", "play_onnx.py"),
)


def run_example(script: str, *arguments: str, folder: Path) -> list[str]:
    """Run an example; return the lines that it prints."""
    said = folder.with_name(f"{folder.name}-said")
    said.unlink(missing_ok=True)
    process = Forked(as_script(EXAMPLES / script, *arguments), folder, said=said, bare=True)
    assert process.ends() == 0, process.said
    return process.said.splitlines()


@pytest.mark.parametrize(
    ("script", "arguments", "last_line"),
    [
        ("torchrl_only.py", ["--frames", "2048"], r"mean return of the last 20 episodes: (\d+\.\d)"),
        ("own_trainer.py", ["--frames", "2048"], r"mean return of 20 episodes: (\d+\.\d)"),
        ("own_environment.py", ["--frames", "2048"], r"mean return of 100 episodes: (\d\.\d\d)"),
        ("loss_module.py", ["--frames", "1100"], r"mean return of 20 episodes: (\d+\.\d)"),
        ("behaviour_cloning.py", ["--updates", "100"], r"mean return of 20 episodes: (\d+\.\d)"),
        (
            "hydra_app/train.py",
            ["data.total_frames=512", "data.frames_per_batch=256", "data.eval_episodes=2", "seed=1"],
            r"mean return of 2 episodes: (\d+\.\d)",
        ),
    ],
)
def test_example_runs_and_ends_with_its_return(script, arguments, last_line, tmp_path):
    match = re.fullmatch(last_line, run_example(script, *arguments, folder=tmp_path)[-1])
    assert match is not None
    # CartPole returns 1 per step for 5 to 500 steps. The treasure of own_environment.py is worth 1.
    low, high = (0, 1) if script == "own_environment.py" else (5, 500)
    assert low <= float(match[1]) <= high


def test_learners_are_placed_by_ray_and_share_out_its_collectors(tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")  # ray[train] requires it
    sizes = ("--learners", "2", "--collectors", "2", "--frames", "1024")
    last = run_example("ray_learners.py", *sizes, folder=tmp_path)[-1]
    assert re.fullmatch(r"mean return of 20 episodes: \d+\.\d \(1024 frames\)", last)
    assert (tmp_path / "ray_learners" / "checkpoints" / "last.ckpt").is_file()


def test_planner_solves_a_task(tmp_path):
    pytest.importorskip("minigrid")
    actions, end = run_example("planner.py", "--env", "MiniGrid-BlockedUnlockPickup-v0", folder=tmp_path)
    count = len(actions.split())
    assert end == f"reward after {count} steps: {1 - 0.9 * count / 576:.3f}"


def test_demonstration_is_made_and_its_actions_are_tried_elsewhere(tmp_path):
    folder, id = str(tmp_path / "car"), "MountainCar-v0"
    said = run_example("demonstrations.py", "record", folder, id, "--seed", "3", "--count", "2", folder=tmp_path)
    assert said == ["seed 3: return 1.000 after 114 steps", "seed 4: return 1.000 after 122 steps"]
    assert read_demonstration(tmp_path / "car" / "seed_4.safetensors").metadata["environment"] == id
    at_random, demonstrated = run_example("demonstrations.py", "replay", folder, id, "--episodes", "5", folder=tmp_path)
    assert at_random.endswith("random actions: 0.000")
    assert re.fullmatch(r".*demonstrated actions solve: [01]\.\d0", demonstrated)


@pytest.mark.filterwarnings("ignore:.*reward functions were updated")
def test_arm_brings_the_block_to_its_goal(tmp_path):
    need_extra("robotics")
    folder, id = str(tmp_path / "block"), "gymnasium_robotics:FetchPickAndPlace-v4"
    said = run_example("demonstrations.py", "record", folder, id, "--seed", "40", "--count", "3", folder=tmp_path)
    assert [line.partition(":")[0] for line in said if line.startswith("seed")] == ["seed 40", "seed 41", "seed 42"]
    found = read_demonstration(tmp_path / "block" / "seed_41.safetensors")
    assert (found.length, float(found.rewards[0]), float(found.rewards[-1])) == (50, -1, 0)
    assert (found.terminated, found.truncated) == (False, True)


def test_picture_of_the_data_path_is_the_one_that_is_drawn(tmp_path):
    assert run_example("guide/draw_data_path.py", "drawn.svg", folder=tmp_path) == ["drawn: drawn.svg"]
    drawn, shown = (path.read_text() for path in (tmp_path / "drawn.svg", EXAMPLES / "guide" / "data_path.svg"))
    assert re.findall(r"<text.*?</text>", drawn) == re.findall(r"<text.*?</text>", shown)


def test_continuous_cartpole_is_gymnasiums_at_full_force():
    ours, theirs = (gymnasium.make(f"{name}-v{v}") for name, v in ((OWN_CARTPOLE, 0), ("CartPole", 1)))
    assert ours.spec.max_episode_steps == theirs.spec.max_episode_steps
    rng = np.random.default_rng(0)
    for seed in range(10):
        np.testing.assert_array_equal(ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0])
        fallen = False
        while not fallen:
            right = int(rng.integers(2))
            (observation, *said), expected = ours.step(np.array([2.0 * right - 1], np.float32)), theirs.step(right)
            np.testing.assert_array_equal(observation, expected[0])
            assert tuple(said) == expected[1:]
            fallen = said[1]


def test_continuous_cartpole_pushes_as_hard_as_the_action_says():
    env = gymnasium.make(OWN_CARTPOLE + "-v0").unwrapped
    speeds = []
    for push in (0.0, 0.25, 0.5, 1.0, 3.0):
        env.reset(seed=0)
        speeds.append(env.step(np.array([push]))[0][1])
    # Larger actions are clipped to 1.
    np.testing.assert_allclose(
        np.subtract(speeds[1:], speeds[0]) / (speeds[3] - speeds[0]), [0.25, 0.5, 1.0, 1.0], 1e-4
    )


SITE = {"constructors.py", "site.py"}  # these build the site


def test_every_example_is_run_and_can_be_read_in_one_go():
    # test_extending.py runs the examples in extending/, and .ci/run builds the site.
    paths = [path for path in EXAMPLES.glob("**/*.py") if path.parent.name != "extending" and path.name not in SITE]
    lengths = {str(path.relative_to(EXAMPLES)): len(path.read_text().splitlines()) for path in paths}
    assert set(lengths) == set(SCRIPTS)
    assert max(lengths.values()) < 100
