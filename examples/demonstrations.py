"""Record demonstrations of a script that sees the state itself, and see what their actions are worth elsewhere.

python examples/demonstrations.py record demonstrations/car MountainCar-v0 --seed 3 --count 1
python examples/demonstrations.py replay demonstrations/car MountainCar-v0 --episodes 100
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planner import shortest_plan
from tensordict import TensorDict

from torchrl_lightning import Demonstration, EnvironmentRecipe, GoalReward, read_demonstration, write_demonstration

UNSEEN = 1_000_000  # the first seed of episodes that no demonstration is from


def recipe_of(task: str) -> EnvironmentRecipe:
    """Return what the presets env=minigrid and env=mountaincar_sparse make of a task."""
    if task.startswith("MiniGrid"):
        return EnvironmentRecipe(f"minigrid:{task}", drop=["mission"])
    return EnvironmentRecipe(task, wrappers=[GoalReward])


def expert(env: Any) -> Iterator[int]:
    """Yield the actions that solve an episode, each when it is asked for."""
    if hasattr(env, "grid"):
        yield from shortest_plan(env)
    while hasattr(env, "state"):  # MountainCar: push to where it rolls, so that every push adds energy
        yield 2 if env.state[1] >= 0 else 0


def play(env: Any, actions: Iterable[int]) -> tuple[list[Any], ...]:
    """Play on while there are actions and the episode lasts; return what it showed, was given and paid."""
    played = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        played.append((observation, action, float(reward)))
        if terminated or truncated:
            break
    return tuple(map(list, zip(*played, strict=True)))


def demonstrate(env: Any, task: str, seed: int) -> Demonstration:
    first, _ = env.reset(seed=seed)
    observations, actions, rewards = play(env, expert(env.unwrapped))
    env.reset(seed=seed)
    if sum(rewards) <= 0 or play(env, actions)[2] != rewards:
        raise RuntimeError(f"{task} was not solved with seed {seed}, or not once more by the same actions.")
    entries = [each if isinstance(each, dict) else {"observation": each} for each in (first, *observations)]
    shown = TensorDict({key: np.stack([each[key] for each in entries]) for key in entries[0]}, [len(entries)])
    steps = shown[:-1].clone()
    steps["action"], steps["next", "reward"] = torch.tensor(actions), torch.tensor(rewards)[:, None]
    metadata = {"environment": str(recipe_of(task).id), "terminated": True, "seed": seed}
    return Demonstration(steps, shown[-1].clone(), is_human=True, metadata=metadata)  # given, not found by an agent


def record(folder: Path, task: str, seeds: range) -> None:
    env = recipe_of(task)()
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        demonstration = demonstrate(env, task, seed)
        write_demonstration(folder / f"seed_{seed}.safetensors", demonstration)
        print(f"seed {seed}: return {demonstration.total_reward:.3f} after {demonstration.length} steps")


def replay(folder: Path, task: str, episodes: int) -> None:
    env = recipe_of(task)()
    env.action_space.seed(0)
    plans = [read_demonstration(path).steps["action"].tolist() for path in sorted(folder.glob("*.safetensors"))]
    blind, random = [], []
    for number in range(episodes):
        env.reset(seed=UNSEEN + number)
        random.append(sum(play(env, iter(env.action_space.sample, None))[2]))
        env.reset(seed=UNSEEN + number)
        blind.append(sum(play(env, plans[number % len(plans)])[2]))
    print(f"mean return of random actions: {np.mean(random):.3f}")
    print(f"share of episodes that the demonstrated actions solve: {np.mean(np.array(blind) > 0):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["record", "replay"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", help="MountainCar-v0, or a task of MiniGrid such as MiniGrid-UnlockPickup-v0")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    if args.what == "record":
        record(args.folder, args.task, range(args.seed, args.seed + args.count))
    else:
        replay(args.folder, args.task, args.episodes)
