"""HalfCheetah-v5 by Stable-Baselines3's PPO with its zoo's settings, and a picture of ``ppo_halfcheetah`` beside it.

    python tests/benchmarks/zoo.py train FOLDER [--seed 0] [--frames 1000000]
    python tests/benchmarks/zoo.py draw PICTURE --ours RUN... --theirs FOLDER... --doorkey RUN...

``train`` writes ``FOLDER/metrics.csv`` (frames, minutes of processor time, mean return of the last 100 training
episodes) and prints the mean return of the last model over 100 unseen episodes. ``draw`` shows both over frames and
over minutes of training, on our side those that the run logged, without evaluations, and the evaluations of
``ppo_minigrid_doorkey``. One thread.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say
from benchmarks.results import logged

if __name__ == "__main__":
    one_thread()

import gymnasium
import numpy as np

GAMMA, WINDOW = 0.98, 100
Point = tuple[float, float, float]  # frames, minutes, return


def train(folder: Path, seed: int, frames: int) -> None:
    """Train, and play the last model."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    def environment() -> Any:
        return Monitor(gymnasium.make("HalfCheetah-v5"))

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["frames", "minutes", "return"])

        class Log(BaseCallback):
            """Write a row every 10240 frames."""

            def _on_training_start(self) -> None:
                self.began = time.process_time()

            def _on_step(self) -> bool:
                returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
                if self.num_timesteps % 10240 == 0 and returns:
                    minutes = (time.process_time() - self.began) / 60
                    rows.writerow([self.num_timesteps, f"{minutes:.3f}", f"{np.mean(returns):.1f}"])
                    file.flush()
                return True

        model = PPO(
            "MlpPolicy",
            VecNormalize(DummyVecEnv([environment]), gamma=GAMMA),
            n_steps=512,
            batch_size=64,
            gamma=GAMMA,
            learning_rate=2.0633e-05,
            ent_coef=0.000401762,
            clip_range=0.1,
            n_epochs=20,
            gae_lambda=0.92,
            max_grad_norm=0.8,
            vf_coef=0.58096,
            policy_kwargs={
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": torch.nn.ReLU,
                "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            },
            seed=seed,
            device="cpu",
        )
        processor = time.process_time()
        model.learn(frames, callback=Log())
        processor = time.process_time() - processor
    played = VecNormalize(DummyVecEnv([environment]), training=False, norm_reward=False)
    moments: Any = model.get_vec_normalize_env()
    played.obs_rms = moments.obs_rms
    played.seed(seed + 10_000)
    mean, std = evaluate_policy(model, played, n_eval_episodes=100, deterministic=True)
    say(f"mean return {mean:.0f} +- {std:.0f} over 100 episodes, {processor / 60:.1f} minutes for {frames} frames")


def ours(folder: Path) -> Iterator[Point]:
    """Read a run of ``torchrl-lightning-train``: the mean of the last hundred episodes at each that ended."""
    (path,) = folder.rglob("metrics.csv")
    minutes, before, returns = 0.0, 0.0, []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["frames_per_second"]:
                frames = float(row["frames"])
                minutes += (frames - before) / float(row["frames_per_second"]) / 60
                before = frames
            if row["train/return"]:
                returns.append(float(row["train/return"]))
                yield float(row["step"]), minutes, float(np.mean(returns[-WINDOW:]))


def theirs(folder: Path) -> Iterator[Point]:
    """Read what :func:`train` wrote."""
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield float(row["frames"]), float(row["minutes"]), float(row["return"])


def evaluations(folder: Path) -> Iterator[tuple[float, float]]:
    """Read frames and returns of the evaluations of a run of ``torchrl-lightning-train``."""
    (path,) = folder.rglob("metrics.csv")
    for row in logged(path, 0):
        yield row.frames, row.score


def draw(picture: Path, our_runs: list[Path], their_runs: list[Path], doorkey: list[Path]) -> None:
    """Draw each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    sides = (("ours", "tab:blue", ours, our_runs), ("Stable-Baselines3", "tab:orange", theirs, their_runs))
    for name, color, read, folders in sides:
        for number, folder in enumerate(folders):
            frames, minutes, returns = np.array(list(read(folder))).T
            label = name if number == 0 else None
            panels[0].plot(frames / 1e6, returns, color=color, label=label, alpha=0.8)
            panels[1].plot(minutes, returns, color=color, label=label, alpha=0.8)
    for folder in doorkey:
        frames, returns = np.array(list(evaluations(folder))).T
        panels[2].plot(frames / 1e3, returns, color="tab:blue", alpha=0.8)
    panels[2].axhline(0.964, color="tab:orange", linestyle=":", label="published by Stable-Baselines3's zoo")
    panels[0].set(title="HalfCheetah-v5", xlabel="million frames", ylabel="mean of the last 100 training episodes")
    panels[1].set(title="HalfCheetah-v5", xlabel="minutes of training, one core")
    panels[2].set(title="MiniGrid-DoorKey-5x5", xlabel="thousand frames", ylabel="mean of 20 evaluation episodes")
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle("Return of PPO, normalised, with the settings of Stable-Baselines3's zoo; a line for each seed")
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--frames", type=int, default=1_000_000)
    drawing = commands.add_parser("draw")
    drawing.add_argument("picture", type=Path)
    drawing.add_argument("--ours", type=Path, nargs="+", default=[])
    drawing.add_argument("--theirs", type=Path, nargs="+", default=[])
    drawing.add_argument("--doorkey", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.command == "train":
        train(arguments.folder, arguments.seed, arguments.frames)
    else:
        draw(arguments.picture, arguments.ours, arguments.theirs, arguments.doorkey)


if __name__ == "__main__":
    main()
