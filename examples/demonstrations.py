"""Record demonstrations of a scripted expert, or replay their actions in episodes with other seeds.

python examples/demonstrations.py record demonstrations/car MountainCar-v0 --seed 3 --count 1
python examples/demonstrations.py replay demonstrations/car MountainCar-v0 --episodes 100
python examples/demonstrations.py record demonstrations/key minigrid:MiniGrid-UnlockPickup-v0 --goal
python examples/demonstrations.py record demonstrations/block gymnasium_robotics:FetchPickAndPlace-v4 --count 20
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pick_and_place import act
from planner import shortest_plan
from tensordict import TensorDict

from torchrl_lightning import Demonstration, EnvironmentRecipe, GoalReward, read_demonstration, write_demonstration


def recipe_of(id: str, goal: bool) -> EnvironmentRecipe:
    """Return the recipe that the presets env=minigrid, env=robotics and env=mountaincar_sparse build for an id."""
    if id.startswith("minigrid:"):
        return EnvironmentRecipe(id, drop=["mission"], wrappers=[GoalReward] if goal else [])
    return EnvironmentRecipe(id, wrappers=[] if id.startswith("gymnasium_robotics:") else [GoalReward])


def expert(env: Any) -> Iterator[Any]:
    """Yield the actions that solve an episode. Each action is computed from the current state."""
    while hasattr(env, "gripper_extra_height"):  # a Fetch robot arm
        yield act(env._get_obs())
    if hasattr(env, "grid"):
        yield from shortest_plan(env)
    while hasattr(env, "state"):  # MountainCar: push in the direction of motion, which always adds energy
        yield 2 if env.state[1] >= 0 else 0


def play(env: Any, actions: Iterable[Any]) -> tuple[list[Any], ...]:
    """Play the actions until the episode ends; return observations, actions, rewards, successes and terminations."""
    played = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        played.append((observation, action, float(reward), bool(info.get("is_success", reward > 0)), terminated))
        if terminated or truncated:
            break
    return tuple(map(list, zip(*played, strict=True)))


def demonstrate(env: Any, id: str, seed: int) -> Demonstration:
    first, _ = env.reset(seed=seed)
    observations, actions, rewards, goals, ends = play(env, expert(env.unwrapped))
    env.reset(seed=seed)
    if not goals[-1] or play(env, actions)[2] != rewards:
        raise RuntimeError(f"{id} was not solved with seed {seed}, or not once more by the same actions.")
    entries = [each if isinstance(each, dict) else {"observation": each} for each in (first, *observations)]
    shown = TensorDict({key: np.stack([each[key] for each in entries]) for key in entries[0]}, [len(entries)])
    steps = shown[:-1].clone()
    steps["action"], steps["next", "reward"] = torch.as_tensor(np.array(actions)), torch.tensor(rewards)[:, None]
    ending = {"terminated": ends[-1], "truncated": not ends[-1], "metadata": {"environment": id, "seed": seed}}
    return Demonstration(steps, shown[-1].clone(), is_human=True, **ending)  # no agent found the actions


def record(env: Any, asked: argparse.Namespace) -> None:
    asked.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.seed, asked.seed + asked.count):
        demonstration = demonstrate(env, asked.id, seed)
        write_demonstration(asked.folder / f"seed_{seed}.safetensors", demonstration)
        print(f"seed {seed}: return {demonstration.total_reward:.3f} after {demonstration.length} steps")


def replay(env: Any, asked: argparse.Namespace) -> None:
    env.action_space.seed(0)
    plans = [read_demonstration(path).steps["action"].numpy() for path in sorted(asked.folder.glob("*.safetensors"))]
    blind, random = [], []
    for seed in range(1_000_000, 1_000_000 + asked.episodes):  # seeds without a demonstration
        env.reset(seed=seed)
        random.append(sum(play(env, (env.action_space.sample() for _ in count()))[2]))
        env.reset(seed=seed)
        blind.append(play(env, plans[seed % len(plans)])[3][-1])
    print(f"mean return of random actions: {np.mean(random):.3f}")
    print(f"share of episodes that the demonstrated actions solve: {np.mean(blind):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["record", "replay"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("id", help="MountainCar-v0, or a task with minigrid: or gymnasium_robotics: in front")
    parser.add_argument("--goal", action="store_true", help="a reward of 1 at the goal of a MiniGrid, however late")
    for name, default in {"count": 1, "seed": 0, "episodes": 100}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    play_through = record if asked.what == "record" else replay
    play_through(recipe_of(asked.id, asked.goal)(), asked)
