"""Compare a whole short run of our command with an equivalent script of Stable-Baselines3.

    python tests/benchmarks/start.py [--json start.json] [--repetitions 5] [--frames 2048] [--check]

Both train, evaluate, log to a CSV file and save the policy. Our command also draws the learning curve. The script draws
it in the variant ``with a curve``. Each run is a separate process and includes its imports. The runs are interleaved,
with a rotating start. The results are the processor time of a process, user and system, and its peak memory. A bare
``import torch`` is the reference without a run.

A first round compiles our kernels and does not count. ``--check`` exits with 1 if a ratio to the script with a curve is
above 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

OURS, SB3, CURVE, TORCH = "ours", "Stable-Baselines3", "Stable-Baselines3, with a curve", "import torch"
BUDGET = 1.3
SCRIPT = """
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure

frames = {frames}
environments, evaluated = make_vec_env("CartPole-v1", 8, seed=0), make_vec_env("CartPole-v1", 1, seed=1)
{model}
model.set_logger(configure("log", ["csv"]))
best = EvalCallback(evaluated, n_eval_episodes={episodes}, eval_freq=frames // 8, best_model_save_path="log",
                    log_path="log", verbose=0)
model.learn(frames, callback=best)
model.save("last")
print(evaluate_policy(type(model).load("log/best_model", device="cpu"), evaluated, n_eval_episodes=20))
"""
DRAWING = """
import numpy as np
from matplotlib.figure import Figure

found = np.load("log/evaluations.npz")
figure = Figure()
figure.subplots().plot(found["timesteps"], found["results"].mean(1))
figure.savefig("curve.png", dpi=130)
"""
PPO = """model = PPO(
    "MlpPolicy", environments, n_steps=128, batch_size=256, n_epochs=10, learning_rate=1e-3, device="cpu", seed=0
)"""
DQN = """model = DQN(
    "MlpPolicy", environments, batch_size=128, buffer_size=100_000, learning_starts=1000, train_freq=1,
    gradient_steps=4, n_steps=3, learning_rate=1e-3, tau=0.005, target_update_interval=1, device="cpu", seed=0,
    policy_kwargs={"net_arch": [128, 128]},
)"""
RUNS = {"ppo_cartpole": (PPO, 10), "dqn_cartpole": (DQN, 20)}


@dataclass(frozen=True)
class Cost:
    """Processor time and peak memory of a process."""

    seconds: float
    megabytes: float


def cost_of(program: list[str], folder: Path) -> Cost:
    """Run a program in a folder to its end."""
    process = subprocess.Popen(
        [sys.executable, *program], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{program[-1]} ended with {process.returncode}:\n{said.decode()[-2000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def programs(experiment: str, frames: int) -> dict[str, list[str]]:
    """Return the programs by name."""
    model, episodes = RUNS[experiment]
    command = "from torchrl_lightning.cli.train import main; main()"
    script = SCRIPT.replace("{frames}", str(frames)).replace("{episodes}", str(episodes)).replace("{model}", model)
    return {
        OURS: ["-c", command, f"experiment={experiment}", f"data.total_frames={frames}", "hydra.run.dir=run"],
        SB3: ["-c", script],
        CURVE: ["-c", script + DRAWING],
        TORCH: ["-c", "import torch"],
    }


def main() -> int:
    """Print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--frames", type=int, default=2048)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    one_thread()
    results, missed = {}, []
    for experiment in RUNS:
        run = programs(experiment, arguments.frames)
        costs: dict[str, list[Cost]] = {name: [] for name in run}
        for repetition in range(arguments.repetitions + 1):
            start = repetition % len(run)
            for name in [*run][start:] + [*run][:start]:
                with tempfile.TemporaryDirectory() as folder:
                    cost = cost_of(run[name], Path(folder))
                if repetition:
                    costs[name].append(cost)
        results[experiment] = {name: [asdict(cost) for cost in found] for name, found in costs.items()}
        say(f"{experiment}, {arguments.frames} frames, medians of {arguments.repetitions}")
        for quantity, unit in (("seconds", "CPU s"), ("megabytes", "MB at most")):
            samples = {name: [getattr(cost, quantity) for cost in found] for name, found in costs.items()}
            for name, found in samples.items():
                spread = f"{min(found):.1f} - {max(found):.1f}"
                say(f"  {name:<34}{statistics.median(found):>9.1f} {unit:<12}{spread:>16}")
            # Compare within rounds: all runs of a round ran under the same load.
            for peer, budget in ((SB3, None), (CURVE, BUDGET)):
                ratio = statistics.median(a / b for a, b in zip(samples[OURS], samples[peer], strict=True))
                say(f"  {OURS} over {peer}: {ratio:.2f}" + (f", the budget is {budget}" if budget else ""))
                if budget is not None and ratio > budget:
                    missed.append(f"{experiment}, {quantity}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.check and missed:
        say(f"missed: {'; '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
