"""The experiments by Stable-Baselines3, at the same settings: scores beside ours, and a picture of HalfCheetah.

    python tests/benchmarks/zoo.py run NAME [--seeds 0 1 2]
    python tests/benchmarks/zoo.py train NAME FOLDER [--seed 0]
    python tests/benchmarks/zoo.py draw PICTURE --ours RUN... --theirs FOLDER... --doorkey RUN...

``run`` trains ``experiment=NAME`` by Stable-Baselines3 in as many frames, plays 100 unseen episodes with the last model
of each seed, and writes ``examples/results/stable_baselines3/NAME.csv``, of which ``results.py table`` makes a column;
``results.py run NAME`` repeats our own. Settings are read from the experiment; what cannot be said there is refused.
``train`` writes ``FOLDER/metrics.csv`` besides: frames, minutes of processor time and the mean return of the last 100
training episodes. ``draw`` shows both over frames and over minutes of training, on our side those that the run logged,
without evaluations, and the evaluations of ``ppo_minigrid_doorkey``. One thread.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say
from benchmarks.results import PEER, ResultsError, logged, settings_of, write

if __name__ == "__main__":
    one_thread(pin=False)

import numpy as np

WINDOW = 100
Point = tuple[float, float, float]  # frames, minutes, return


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
    """Read what ``train`` wrote."""
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
    """Run, train or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("name")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    training = commands.add_parser("train")
    training.add_argument("name")
    training.add_argument("folder", type=Path)
    training.add_argument("--seed", type=int, default=0)
    drawing = commands.add_parser("draw")
    drawing.add_argument("picture", type=Path)
    drawing.add_argument("--ours", type=Path, nargs="+", default=[])
    drawing.add_argument("--theirs", type=Path, nargs="+", default=[])
    drawing.add_argument("--doorkey", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(arguments.picture, arguments.ours, arguments.theirs, arguments.doorkey)
        return
    settings = settings_of(arguments.name)  # refuses one that is not there
    from benchmarks.twin import Twin

    twin = Twin(arguments.name)
    if arguments.command == "run":
        write(arguments.name, [twin.run(seed) for seed in arguments.seeds], PEER, settings)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "metrics.csv").open("w", newline="") as file:
        end = twin.run(arguments.seed, file)
    say(f"mean return {end.score:.6g} +- {end.deviation:.3g} over {end.episodes} episodes, {end.minutes:.1f} minutes")


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
