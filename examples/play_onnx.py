"""Play an ONNX policy with gymnasium and onnxruntime; the returns equal ``torchrl-lightning-evaluate``.

Run: python examples/play_onnx.py RUN/policy.onnx CartPole-v1 --episodes 20

The seeds are the same as in ``torchrl-lightning-evaluate ckpt_path=RUN episodes=20 seed=1000``. That command uses 10
environments (``data.eval_num_envs``, or ``data.eval_episodes`` if this is smaller). Each environment gets a seed only
at its first reset. The environment must have the same wrappers as the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
import onnxruntime


def spawn_seeds(seed: int, *path: int, count: int) -> list[int]:
    """Derive seeds from a seed with the same method as ``torchrl-lightning-evaluate``."""
    words = np.random.SeedSequence(seed, spawn_key=path).generate_state(count, np.uint64)
    return [int(word) & 0x7FFFFFFF for word in words]


def named_entries(observation: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of an observation by name. Dots join the parts of a nested name."""
    if not isinstance(observation, Mapping):
        return {prefix or "observation": observation}
    entries: dict[str, Any] = {}
    for name, part in observation.items():
        entries |= named_entries(part, f"{prefix}.{name}" if prefix else name)
    return entries


def play(session: Any, env: gymnasium.Env[Any, Any], seed: int, episodes: int) -> list[float]:
    """Play episodes in one environment and return the sum of rewards of each."""
    inputs = json.loads(session.get_modelmeta().custom_metadata_map["policy.json"])["inputs"]
    zeros = {name: np.zeros([1, *entry["shape"][1:]], entry["dtype"]) for name, entry in inputs.items()}
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        names = sorted(named_entries(observation))
        states = [value for name, value in zeros.items() if name not in names]  # recurrent states start at zero
        total, done = 0.0, False
        while not done:
            entries = named_entries(observation)
            values = [np.asarray(entries[name], zeros[name].dtype).reshape(zeros[name].shape) for name in names]
            action, *states = session.run(None, dict(zip(inputs, [*values, *states], strict=True)))
            observation, reward, terminated, truncated, _ = env.step(action[0])
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def evaluate(
    path: str, make_env: Callable[[], Any], episodes: int, num_envs: int = 10, seed: int = 1000
) -> list[float]:
    """Return the episode returns in the same order as ``torchrl-lightning-evaluate``."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    count = min(num_envs, episodes)
    (evaluation,) = spawn_seeds(seed, crc32(b"evaluation"), 0, 1, count=1)
    returns = []
    for number, env_seed in enumerate(spawn_seeds(evaluation, crc32(b"episodes"), count=count)):
        returns += play(session, make_env(), env_seed, episodes // count + (number < episodes % count))
    return returns


def main() -> None:
    """Play the policy and print the mean return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("env")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--num-envs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1000)
    options = parser.parse_args()
    returns = evaluate(
        options.file, lambda: gymnasium.make(options.env), options.episodes, options.num_envs, options.seed
    )
    print(f"mean return of {len(returns)} episodes: {np.mean(returns):.1f}")


if __name__ == "__main__":
    main()
