"""Compare whole training runs with their peers at equal settings, in frames per second of processor time.

    python tests/benchmarks/end_to_end.py [dqn_8 sac ...] [--repetitions 5] [--scale 1.0] [--json FILE] [--check]

All contenders repeat each run, interleaved and on one thread. The first part of a run builds, compiles and warms up,
and is not timed. All contenders have the same number of updates per frame, batch size, networks, learning rate and
target updates. No contender evaluates.

``ours`` has the default settings (``updates_per_step="auto"``). ``ours, one`` makes one update per training step.
``ours, as the command runs`` adds the CSV log, the progress bar and the checkpoints of ``torchrl-lightning-train``.

``Stable-Baselines3`` has its default settings. ``lean`` removes Monitor, uses Gymnasium's wrapper for Pong and the
fused Adam of torch. ``lean, our Adam`` uses our Adam. ``four`` makes four updates after every four steps. ``SBX``
contains the same algorithms in JAX. ``rejax`` also compiles its environments. ``bare loop`` is the same arithmetic
without any library.

SBX, Tianshou and rejax run if they are installed. Pong needs the extra ``atari``. Runs with 128 or more environments
need the extra ``envpool``. A ratio divides medians. If a budget names several peers, the fastest one counts.
``--check`` exits with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import numpy as np

from benchmarks.whole_runs import bare, ours, sb3
from benchmarks.whole_runs.clock import Training
from benchmarks.whole_runs.names import (
    ANY_SBX,
    BARE,
    COMMAND,
    LEAN,
    LEAN_OURS,
    ONE,
    OURS,
    REJAX,
    SB3,
    SB3_FOUR,
    SBX,
    SBX_FOUR,
    TIANSHOU,
)
from torchrl_lightning.agents import CNNNetwork, DQNModule, MLPNetwork, SACModule, TD3Module

IMAGES = 4000
"""Capacity of the replay buffers for images, in cells."""
Sides = tuple[Callable[..., Training], Callable[..., Training]]
"""Two functions that build training runs with equal settings, ours and the peer's; keywords select the device."""


@dataclass(frozen=True)
class Run:
    """A training run with its contenders and its budgets ``(contender, peers, ratio)``."""

    title: str
    contenders: dict[str, Training]
    budgets: tuple[tuple[str, str | tuple[str, ...], float], ...]
    convolutions: Callable[[Training], float] | None = None  # returns their share of the time


def has(library: str) -> bool:
    """Return whether a peer is installed."""
    return importlib.util.find_spec(library) is not None


def off_policy_peers(make: Callable[..., Training]) -> dict[str, Training]:
    """Return the contenders of Stable-Baselines3, and of SBX if it is installed."""
    found = {
        SB3: make(),
        SB3_FOUR: make(at_once=4),
        LEAN: make(lean=True, optimizer="fused"),
        LEAN_OURS: make(lean=True, optimizer="ours"),
    }
    if has("sbx"):
        found |= {SBX: make(library="sbx", lean=True), SBX_FOUR: make(library="sbx", lean=True, at_once=4)}
    return found


def dqn(num_envs: int, updates: int, over_sb3: float, *, soft: bool = True, n_steps: int = 1) -> Run:
    """Return DQN on CartPole-v1: batch 128, 64 x 64, one update per step of all environments."""
    target: dict[str, Any] = {"tau": 0.005, "target_interval": 1} if soft else {"tau": 1.0, "target_interval": 100}
    module = partial(DQNModule, double=False, learning_rate=1e-3, epsilon_start=0.05, epsilon_end=0.05, **target)
    own = partial(ours.off_policy, module, "CartPole-v1", num_envs, 128, updates, n_steps=n_steps)
    peer = partial(
        sb3.off_policy,
        "DQN",
        "CartPole-v1",
        num_envs,
        128,
        updates,
        policy_kwargs={"net_arch": [64, 64]},
        tau=target["tau"],
        # The unit is frames.
        target_update_interval=1 if soft else 100 * num_envs,
        exploration_initial_eps=0.05,
        exploration_final_eps=0.05,
        learning_rate=1e-3,
        n_steps=n_steps,
    )
    contenders = {OURS: own(), ONE: own(updates_per_step=1), **off_policy_peers(peer)}
    budgets: list[tuple[str, str | tuple[str, ...], float]] = [(OURS, SB3, over_sb3)]
    if soft and n_steps == 1 and num_envs > 1:
        contenders |= {COMMAND: own(command=True), BARE: bare.dqn(num_envs, 128, updates)}
        budgets += [(OURS, LEAN_OURS, 1.6), (OURS, ANY_SBX, 1.2), (OURS, BARE, 0.75), (COMMAND, OURS, 0.95)]
    if not soft and has("tianshou"):
        from benchmarks.whole_runs import tianshou

        contenders[TIANSHOU] = tianshou.dqn("CartPole-v1", num_envs, 128, updates)
    environments = "1 environment" if num_envs == 1 else f"{num_envs} environments"
    returns = "" if n_steps == 1 else f", {n_steps}-step returns"
    return Run(
        f"DQN CartPole, {environments}{returns}, {'soft' if soft else 'hard'} target", contenders, tuple(budgets)
    )


def continuous_sides(algorithm: str, updates: int, **where: Any) -> Sides:
    """Return both sides of SAC or TD3 on Pendulum-v1: one environment, batch 256, 256 x 256, one update per frame."""
    network = MLPNetwork([256, 256], "relu")
    module = partial(SACModule if algorithm == "SAC" else TD3Module, network, learning_rate=3e-4)
    own = partial(ours.off_policy, module, "Pendulum-v1", 1, 256, updates, **where)
    noise: dict[str, Any] = {}
    if algorithm == "TD3":
        from stable_baselines3.common.noise import NormalActionNoise

        noise = {"action_noise": NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))}
    peer = partial(
        sb3.off_policy,
        algorithm,
        "Pendulum-v1",
        1,
        256,
        updates,
        policy_kwargs={"net_arch": [256, 256]},
        learning_rate=3e-4,
        **noise,
        **where,
    )
    return own, peer


def continuous(algorithm: str, updates: int, over_sb3: float) -> Run:
    """Return the contenders of SAC or TD3."""
    own, peer = continuous_sides(algorithm, updates)
    return Run(
        f"{algorithm} Pendulum, 1 environment",
        {OURS: own(), ONE: own(updates_per_step=1), **off_policy_peers(peer)},
        ((OURS, SB3, over_sb3), (OURS, ANY_SBX, 0.95)),
    )


def ppo(env: str, num_envs: int, rollouts: int, over_sb3: float) -> Run:
    """Return PPO: rollouts of 1024 frames, batch 256, 4 epochs, separate tanh networks of 64 x 64."""
    steps, cartpole = 1024 // num_envs, env == "CartPole-v1" and num_envs > 1
    peer = partial(sb3.ppo, env, num_envs, steps, rollouts)
    contenders = {
        OURS: ours.ppo(env, num_envs, steps, rollouts),
        SB3: peer(),
        LEAN: peer(lean=True, optimizer="fused"),
        LEAN_OURS: peer(lean=True, optimizer="ours"),
    }
    budgets: list[tuple[str, str | tuple[str, ...], float]] = [(OURS, SB3, over_sb3)]
    if has("sbx"):
        contenders[SBX] = peer(library="sbx", lean=True)
    if num_envs > 1:
        contenders[COMMAND] = ours.ppo(env, num_envs, steps, rollouts, command=True)
        budgets += [(COMMAND, OURS, 0.85)]
    if cartpole:
        contenders[BARE] = bare.ppo(num_envs, steps, rollouts)
        budgets += [(OURS, SBX, 1.2), (OURS, BARE, 0.95)]
    environments = "1 environment" if num_envs == 1 else f"{num_envs} environments"
    return Run(f"PPO {env.split('-')[0]}, {environments}", contenders, tuple(budgets))


def ppo_envpool(num_envs: int, rollouts: int) -> Run:
    """Return PPO on EnvPool: rollouts of 64 steps, mini-batches of 4096, 4 epochs, separate networks of 64 x 64."""
    from torchrl_lightning import EnvironmentRecipe

    recipe = EnvironmentRecipe("CartPole-v1", vectorization="envpool")
    contenders = {OURS: ours.ppo(recipe, num_envs, 64, rollouts, mini_batch_size=4096)}
    if has("rejax"):
        from benchmarks.whole_runs import rejax

        contenders[REJAX] = rejax.ppo(num_envs, 64, rollouts, 4096)
    return Run(f"PPO CartPole, {num_envs} EnvPool environments", contenders, ((OURS, REJAX, 0.55),))


def dqn_pong_sides(updates: int, **where: Any) -> Sides:
    """Return both sides of DQN on Pong: batch 32, 4 environments, one update per step of all environments.

    Both sides use the convolutions of Mnih et al.
    """
    from benchmarks.whole_runs import pong

    target: dict[str, Any] = {"tau": 1.0, "target_interval": 250}
    acting: dict[str, Any] = {"epsilon_start": 0.05, "epsilon_end": 0.05}
    module = partial(DQNModule, CNNNetwork(), double=False, learning_rate=1e-4, **target, **acting)
    own = partial(ours.off_policy, module, pong.ours(), 4, 32, updates, cells=IMAGES, **where)
    peer = partial(
        sb3.off_policy,
        "DQN",
        "Pong",
        4,
        32,
        updates,
        policy="CnnPolicy",
        policy_kwargs={},
        cells=IMAGES,
        build=pong.theirs,
        learning_rate=1e-4,
        tau=1.0,
        target_update_interval=1000,  # frames
        exploration_initial_eps=0.05,
        exploration_final_eps=0.05,
        **where,
    )
    return own, peer


def dqn_pong(updates: int) -> Run:
    """Return the contenders of DQN on images."""
    from benchmarks.whole_runs import pong

    own, peer = dqn_pong_sides(updates)
    contenders = {OURS: own(), SB3: peer(), LEAN: peer(lean=True, optimizer="fused")}
    return Run("DQN Pong, 4 environments", contenders, ((OURS, LEAN, 1.0),), pong.share_of_convolutions)


def ppo_pong_sides(rollouts: int, **where: Any) -> Sides:
    """Return both sides of PPO on Pong: rollouts of 1024 frames, batch 256, 4 epochs.

    Actor and critic share the convolutions of Mnih et al.
    """
    from benchmarks.whole_runs import pong

    own = partial(ours.ppo, pong.ours(), 8, 128, rollouts, network=CNNNetwork(), **where)
    return own, partial(sb3.ppo, "Pong", 8, 128, rollouts, policy="CnnPolicy", build=pong.theirs, **where)


def ppo_pong(rollouts: int) -> Run:
    """Return the contenders of PPO on images."""
    from benchmarks.whole_runs import pong

    own, peer = ppo_pong_sides(rollouts)
    contenders = {OURS: own(), SB3: peer(), LEAN: peer(lean=True, optimizer="fused")}
    return Run("PPO Pong, 8 environments", contenders, ((OURS, LEAN, 1.2),), pong.share_of_convolutions)


def runs(scale: float) -> dict[str, Callable[[], Run]]:
    """Return functions that build the runs by name."""
    updates = max(8, round(1000 * scale) // 8 * 8)
    rollouts = max(2, round(20 * scale))
    return {
        "dqn_8": partial(dqn, 8, updates, 2.0),
        "dqn_8_hard": partial(dqn, 8, updates, 1.7, soft=False),
        "dqn_8_three_steps": partial(dqn, 8, updates, 1.7, n_steps=3),
        "dqn_1": partial(dqn, 1, updates, 1.5),
        "td3": partial(continuous, "TD3", updates // 2, 1.7),
        "sac": partial(continuous, "SAC", updates // 2, 2.1),
        "ppo_8": partial(ppo, "CartPole-v1", 8, rollouts, 1.9),
        "ppo_1": partial(ppo, "CartPole-v1", 1, rollouts, 1.9),
        "ppo_128": partial(ppo_envpool, 128, rollouts * 4),
        "ppo_512": partial(ppo_envpool, 512, rollouts),
        "ppo_1024": partial(ppo_envpool, 1024, rollouts // 2),
        "ppo_pendulum": partial(ppo, "Pendulum-v1", 8, rollouts, 1.5),
        "dqn_pong": partial(dqn_pong, updates // 4),
        "ppo_pong": partial(ppo_pong, max(2, rollouts // 5)),
    }


def measure(run: Run, repetitions: int) -> dict[str, list[float]]:
    """Train with all contenders in turn and return their speeds. Each round starts with another contender."""
    names = list(run.contenders)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()
            speeds[name].append(run.contenders[name](repetition))
    return speeds


def report(run: Run, speeds: dict[str, list[float]]) -> bool:
    """Print the speeds of one run and return whether its budgets are met."""
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    say(f"{run.title}\n  {'':<36}{'frames/s':>10}{'range':>20}{'ours over it':>14}")
    for name, speed in sorted(middle.items(), key=lambda item: -item[1]):
        spread = f"{min(speeds[name]):.0f} - {max(speeds[name]):.0f}"
        say(f"  {name:<36}{speed:>10.0f}{spread:>20}{middle[OURS] / speed:>14.2f}")
    met = True
    for name, peers, wanted in run.budgets:
        there = [peer for peer in ((peers,) if isinstance(peers, str) else peers) if peer in middle]
        if not there:
            say(f"  {name} >= {wanted} x {peers}: not installed")
            continue
        peer = max(there, key=middle.__getitem__)
        reached = middle[name] / middle[peer]
        met &= reached >= wanted
        say(f"  {name} >= {wanted} x {peer}: {reached:.2f}, {'met' if reached >= wanted else 'MISSED'}")
    if run.convolutions is not None:
        say(f"  convolutions take {run.convolutions(run.contenders[OURS]):.0%} of the time of {OURS}")
    return met


def main() -> int:
    """Run the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=[*runs(1.0), []], help="all of them by default")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="length of the runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("torchrl_lightning").setLevel(logging.WARNING)

    chosen = runs(arguments.scale)
    met, results = True, {}
    for name in arguments.runs or chosen:
        run = chosen[name]()
        results[name] = measure(run, arguments.repetitions)
        met &= report(run, results[name])
        if arguments.json:
            machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
            arguments.json.write_text(json.dumps({"machine": machine, "frames_per_second": results}, indent=2) + "\n")
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
