"""Whole training runs against Stable-Baselines3 and Tianshou at equal settings: frames per second of processor time.

    python tests/benchmarks/end_to_end.py [dqn_8 sac ...] [--repetitions 5] [--scale 1.0] [--json FILE] [--check]

Each run is repeated by every contender, interleaved, on one thread; its first part, which builds and warms up, is not
timed. All make the same number of updates for each frame, with the same batch size, networks, learning rate and target
updates. ``Stable-Baselines3`` is as it ships; ``lean`` leaves its Monitor out and gives it a fused Adam, as ours has.
``ours, four`` serves four updates in one training step (``updates_per_step=4``). ``as the command runs`` adds the CSV
log, the progress bar and the checkpoints of ``torchrl-lightning-train``; evaluation is left out on all sides. The
ratios are medians over medians; ``--check`` exits with 1 where a budget is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import gymnasium
import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from torchrl_lightning import ExperienceLog, FramesProgressBar, OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.learn import DQNModule, MLPNetwork, PPOModule, SACModule, TD3Module
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, UniformSampler

OURS, FOUR, COMMAND, SB3, LEAN, TIANSHOU = (
    "ours",
    "ours, four",
    "ours, as the command runs",
    "Stable-Baselines3",
    "Stable-Baselines3, lean",
    "Tianshou",
)
CELLS, WARMUP = 48_000, 1000

Training = Callable[[int], float]
"""Train with a seed and return frames per second of processor time."""


@dataclass(frozen=True)
class Run:
    """A training run, who makes it, and what ours must reach: (contender, peer, ratio)."""

    title: str
    contenders: dict[str, Training]
    budgets: tuple[tuple[str, str, float], ...]


class Stopwatch:
    """Frames and processor time since :meth:`start`."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def start(self, frames: int) -> None:
        """Start once; later calls change nothing."""
        if self._began is None:
            self._began = time.process_time(), frames

    def speed(self, frames: int) -> float:
        """Return frames per second since the start."""
        assert self._began is not None, "the run ended before its timed part began"
        seconds, first = time.process_time() - self._began[0], frames - self._began[1]
        return first / seconds


# ---------------------------------------------------------------------------------------------------------------- ours


class StartWatch(L.Callback):
    """Start a stopwatch with the second epoch."""

    def __init__(self) -> None:
        self.watch = Stopwatch()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the stopwatch."""
        if trainer.current_epoch == 1:
            self.watch.start(trainer.datamodule.frames)  # type: ignore[attr-defined]


@contextlib.contextmanager
def command_settings() -> Iterator[dict[str, Any]]:
    """Give the Trainer what ``torchrl-lightning-train`` gives it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        yield {
            "logger": CSVLogger(folder, flush_logs_every_n_steps=1),
            "enable_checkpointing": True,
            "enable_progress_bar": True,
            "callbacks": [FramesProgressBar(), ExperienceLog(), ModelCheckpoint(folder, every_n_epochs=10)],
        }


def fit(module: L.LightningModule, data: L.LightningDataModule, epochs: int, command: bool = False) -> float:
    """Train, and return the speed from the second epoch on."""
    start = StartWatch()
    plain: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [],
    }
    with command_settings() if command else contextlib.nullcontext(plain) as settings:
        L.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            **{**settings, "callbacks": [start, *settings["callbacks"]]},
        ).fit(module, datamodule=data)
    return start.watch.speed(data.frames)  # type: ignore[attr-defined]


def ours_off_policy(
    make_module: Callable[[], L.LightningModule],
    env: str,
    num_envs: int,
    batch_size: int,
    updates: int,
    *,
    updates_per_step: int = 1,
    n_steps: int = 1,
    command: bool = False,
    normalized: bool = False,
) -> Training:
    """Train with an update for each step of all environments."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        data = ReplayDataModule(
            env,
            num_envs=num_envs,
            buffer=lambda num_envs: ExperienceBuffer(
                storage=RingStorage(CELLS), sampler=UniformSampler(), num_envs=num_envs, n_steps=n_steps
            ),
            batch_size=batch_size,
            updates_per_epoch=updates // 2,
            updates_per_step=updates_per_step,
            frames_per_update=num_envs,
            warmup_frames=WARMUP,
            normalize_observation=normalized,
            normalize_reward=normalized,
            seed=seed,
        )
        return fit(make_module(), data, 3, command)

    return run


def ours_ppo(
    env: str, num_envs: int, steps: int, rollouts: int, *, command: bool = False, normalized: bool = False
) -> Training:
    """Train with mini-batches of 256 and 4 epochs."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        data = OnPolicyDataModule(
            env,
            num_envs=num_envs,
            frames_per_batch=num_envs * steps,
            num_epochs=4,
            mini_batch_size=256,
            normalize_observation=normalized,
            normalize_reward=normalized,
            seed=seed,
        )
        return fit(PPOModule(learning_rate=3e-4), data, rollouts + 1, command)

    return run


# --------------------------------------------------------------------------------------------------- Stable-Baselines3


def sb3_environments(env: str, num_envs: int, seed: int, lean: bool) -> Any:
    """Build vector environments, with or without Monitor."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

    return DummyVecEnv([lambda: gymnasium.make(env)] * num_envs) if lean else make_vec_env(env, num_envs, seed=seed)


def sb3_off_policy(
    algorithm: str,
    env: str,
    num_envs: int,
    batch_size: int,
    updates: int,
    *,
    policy_kwargs: dict[str, Any],
    lean: bool = False,
    **kwargs: Any,
) -> Training:
    """Train with an update for each step of all environments."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    class Measure(BaseCallback):
        """Start the stopwatch after the first half of ``updates``, stop the run after as many again and half."""

        def __init__(self) -> None:
            super().__init__()
            self.watch = Stopwatch()

        def _on_step(self) -> bool:
            done: int = self.model._n_updates
            if done >= updates // 2:
                self.watch.start(self.model.num_timesteps)
            return done < updates // 2 * 3

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        environments = sb3_environments(env, num_envs, seed, lean)
        model = getattr(stable_baselines3, algorithm)(
            "MlpPolicy",
            environments,
            device="cpu",
            seed=seed,
            batch_size=batch_size,
            buffer_size=CELLS,
            learning_starts=WARMUP,
            train_freq=(1, "step"),
            gradient_steps=1,
            policy_kwargs={**policy_kwargs, **({"optimizer_kwargs": {"fused": True}} if lean else {})},
            **kwargs,
        )
        measure = Measure()
        model.learn(10**9, callback=measure)
        speed = measure.watch.speed(model.num_timesteps)
        environments.close()
        return speed

    return run


def sb3_ppo(
    env: str, num_envs: int, steps: int, rollouts: int, *, lean: bool = False, normalized: bool = False
) -> Training:
    """Train with mini-batches of 256 and 4 epochs."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecNormalize

    frames = num_envs * steps

    class Measure(BaseCallback):
        """Start the stopwatch with the second rollout."""

        def __init__(self) -> None:
            super().__init__()
            self.watch = Stopwatch()

        def _on_rollout_start(self) -> None:
            if self.model.num_timesteps >= frames:
                self.watch.start(self.model.num_timesteps)

        def _on_step(self) -> bool:
            return True

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        environments = sb3_environments(env, num_envs, seed, lean)
        if normalized:
            environments = VecNormalize(environments)
        model = PPO(
            "MlpPolicy",
            environments,
            device="cpu",
            seed=seed,
            n_steps=steps,
            batch_size=256,
            n_epochs=4,
            learning_rate=3e-4,
            policy_kwargs={"optimizer_kwargs": {"fused": True}} if lean else {},
        )
        measure = Measure()
        model.learn(frames * (rollouts + 1), callback=measure)
        speed = measure.watch.speed(model.num_timesteps)
        environments.close()
        return speed

    return run


# ------------------------------------------------------------------------------------------------------------ Tianshou


def tianshou_dqn(env: str, num_envs: int, batch_size: int, updates: int) -> Training:
    """Train with an update for each step of all environments, hard target updates every 100."""
    from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Net

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        environments = DummyVectorEnv([lambda: gymnasium.make(env)] * num_envs)
        example = gymnasium.make(env)
        network: Any = Net(
            state_shape=example.observation_space.shape or (),
            action_shape=example.action_space.n,  # type: ignore[attr-defined]
            hidden_sizes=[64, 64],
        )
        policy = DiscreteQLearningPolicy(
            model=network,
            action_space=example.action_space,
            observation_space=example.observation_space,
            eps_training=0.05,
            eps_inference=0.0,
        )
        algorithm = DQN(
            policy=policy,
            optim=AdamOptimizerFactory(lr=1e-3),
            gamma=0.99,
            target_update_freq=100,
            is_double=False,
            huber_loss_delta=1.0,
        )
        collector: Any = Collector(algorithm, environments, VectorReplayBuffer(CELLS, num_envs), exploration_noise=True)
        collector.reset()
        collector.collect(n_step=WARMUP // num_envs * num_envs, random=True)
        watch = Stopwatch()

        def note(epoch: int, step: int) -> None:
            if epoch == 2:
                watch.start(step)

        epoch = updates // 2 * num_envs
        algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=collector,
                test_collector=None,
                max_epochs=3,
                epoch_num_steps=epoch,
                collection_step_num_env_steps=num_envs,
                batch_size=batch_size,
                update_step_num_gradient_steps_per_sample=1 / num_envs,
                training_fn=note,
                verbose=False,
                show_progress=False,
            )
        )
        return watch.speed(3 * epoch)

    return run


# ----------------------------------------------------------------------------------------------------------------- runs


def dqn(num_envs: int, updates: int, *, soft: bool = True, n_steps: int = 1) -> Run:
    """DQN on CartPole-v1: batch 128, 64 x 64, an update for each step of all environments."""
    target: dict[str, Any] = {"tau": 0.005, "target_interval": 1} if soft else {"tau": 1.0, "target_interval": 100}
    module = partial(DQNModule, double=False, learning_rate=1e-3, epsilon_start=0.05, epsilon_end=0.05, **target)
    ours = partial(ours_off_policy, module, "CartPole-v1", num_envs, 128, updates, n_steps=n_steps)
    peer = partial(
        sb3_off_policy,
        "DQN",
        "CartPole-v1",
        num_envs,
        128,
        updates,
        policy_kwargs={"net_arch": [64, 64]},
        tau=target["tau"],
        # Counted in frames.
        target_update_interval=1 if soft else 100 * num_envs,
        exploration_initial_eps=0.05,
        exploration_final_eps=0.05,
        learning_rate=1e-3,
        n_steps=n_steps,
    )
    contenders = {OURS: ours(), FOUR: ours(updates_per_step=4), SB3: peer(), LEAN: peer(lean=True)}
    if not soft:
        contenders |= {
            COMMAND: ours(command=True),
            TIANSHOU: tianshou_dqn("CartPole-v1", num_envs, 128, updates),
        }
    environments = "1 environment" if num_envs == 1 else f"{num_envs} environments"
    returns = "" if n_steps == 1 else f", {n_steps}-step returns"
    return Run(
        f"DQN CartPole, {environments}{returns}, {'soft' if soft else 'hard'} target",
        contenders,
        ((OURS, SB3, 1.1), (FOUR, SB3, 1.35 if n_steps == 1 else 1.1), (OURS, LEAN, 1.0)),
    )


def continuous(algorithm: str, updates: int) -> Run:
    """SAC or TD3 on Pendulum-v1: one environment, batch 256, 256 x 256, an update a frame."""
    network = MLPNetwork([256, 256], "relu")
    module = partial(SACModule if algorithm == "SAC" else TD3Module, network, learning_rate=3e-4)
    ours = partial(ours_off_policy, module, "Pendulum-v1", 1, 256, updates)
    noise: dict[str, Any] = {}
    if algorithm == "TD3":
        from stable_baselines3.common.noise import NormalActionNoise

        noise = {"action_noise": NormalActionNoise(np.zeros(1), 0.1 * np.ones(1))}
    peer = partial(
        sb3_off_policy,
        algorithm,
        "Pendulum-v1",
        1,
        256,
        updates,
        policy_kwargs={"net_arch": [256, 256]},
        learning_rate=3e-4,
        **noise,
    )
    return Run(
        f"{algorithm} Pendulum, 1 environment",
        {OURS: ours(), FOUR: ours(updates_per_step=4), SB3: peer(), LEAN: peer(lean=True)},
        ((OURS, SB3, 1.1), (OURS, LEAN, 1.0)),
    )


def ppo(env: str, num_envs: int, rollouts: int, budget: float) -> Run:
    """PPO: rollouts of 1024 frames, batch 256, 4 epochs, separate tanh networks of 64 x 64."""
    steps = 1024 // num_envs
    contenders = {
        OURS: ours_ppo(env, num_envs, steps, rollouts),
        SB3: sb3_ppo(env, num_envs, steps, rollouts),
        LEAN: sb3_ppo(env, num_envs, steps, rollouts, lean=True),
    }
    if num_envs > 1:
        contenders[COMMAND] = ours_ppo(env, num_envs, steps, rollouts, command=True)
    environments = "1 environment" if num_envs == 1 else f"{num_envs} environments"
    return Run(f"PPO {env.split('-')[0]}, {environments}", contenders, ((OURS, SB3, budget), (OURS, LEAN, 1.0)))


def runs(scale: float) -> dict[str, Callable[[], Run]]:
    """Return the runs, built when they are asked for."""
    updates = max(8, round(1000 * scale) // 8 * 8)
    rollouts = max(2, round(20 * scale))
    return {
        "dqn_8": partial(dqn, 8, updates),
        "dqn_8_hard": partial(dqn, 8, updates, soft=False),
        "dqn_8_three_steps": partial(dqn, 8, updates, n_steps=3),
        "dqn_1": partial(dqn, 1, updates),
        "td3": partial(continuous, "TD3", updates // 2),
        "sac": partial(continuous, "SAC", updates // 2),
        "ppo_8": partial(ppo, "CartPole-v1", 8, rollouts, 1.3),
        "ppo_1": partial(ppo, "CartPole-v1", 1, rollouts, 1.3),
        "ppo_pendulum": partial(ppo, "Pendulum-v1", 8, rollouts, 1.15),
    }


def measure(run: Run, repetitions: int) -> dict[str, list[float]]:
    """Train with every contender in turn, each round beginning with the next one."""
    names = list(run.contenders)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        start = repetition % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()
            speeds[name].append(run.contenders[name](repetition))
    return speeds


def report(run: Run, speeds: dict[str, list[float]]) -> bool:
    """Show the speeds of one run, and return whether its budgets are met."""
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    say(f"{run.title}\n  {'':<28}{'frames/s':>10}{'range':>20}{'over SB3':>10}{'over lean':>10}")
    for name, speed in sorted(middle.items(), key=lambda item: -item[1]):
        spread = f"{min(speeds[name]):.0f} - {max(speeds[name]):.0f}"
        say(f"  {name:<28}{speed:>10.0f}{spread:>20}{speed / middle[SB3]:>10.2f}{speed / middle[LEAN]:>10.2f}")
    met = True
    for name, peer, wanted in run.budgets:
        reached = middle[name] / middle[peer]
        met &= reached >= wanted
        say(f"  {name} >= {wanted} x {peer}: {reached:.2f}, {'met' if reached >= wanted else 'MISSED'}")
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
