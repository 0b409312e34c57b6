"""Kill the processes of a search at random moments and check the study.

    python tests/benchmarks/search_kills.py [--kills 20] [--seed 0] [--complete 12] [--folder F]

Two processes work on one study in SQLite. They get SIGINT, SIGTERM or SIGKILL at a random moment of their start, a
trial, or the change of trials, and are then started again. Some settings diverge, and others are invalid. When enough
trials are complete, the search is started once more.

At the end, every trial must be complete, pruned or failed. The score and the reports of each complete trial must equal
the log of its own run. No run may have the trial or the folder of another run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import math
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from omegaconf import OmegaConf  # noqa: E402

from benchmarks.harness import say  # noqa: E402
from benchmarks.resume import warm  # noqa: E402
from kit.forks import Forked  # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
DIVERGING, REFUSED = {"model.learning_rate": 1e20}, {"model.clip_epsilon": -1.0}
DISTRIBUTIONS = {"model.learning_rate": (0.001, 0.002, 0.003, 1e20), "model.clip_epsilon": (0.1, 0.2, 0.3, -1.0)}
NAME = "kills"
COMMAND = [
    *("hparams_search=optuna", f"hydra.sweeper.study_name={NAME}", "hydra/sweeper/sampler=random"),
    *(f"{name}=choice({','.join(map(repr, values))})" for name, values in DISTRIBUTIONS.items()),
    *("data.num_envs=4", "data.frames_per_batch=128", "data.mini_batch_size=64", "data.num_epochs=2"),
    *("data.total_frames=1024", "data.eval_episodes=2", "trainer.check_val_every_n_epoch=1", "eval_episodes=3"),
    *("~callbacks.progress_bar", "callbacks.report.pruner.n_startup_trials=3", "hydra.sweeper.n_trials=3"),
]
TRIAL_SECONDS = 3.0


def start(folder: Path, number: int, *more: str) -> Forked:
    """Start a process of the search."""

    def run() -> None:
        from hydra.core.global_hydra import GlobalHydra

        from torchrl_lightning.cli.train import main

        logging.disable(logging.NOTSET)
        GlobalHydra.instance().clear()
        sys.argv = ["torchrl-lightning-train", *COMMAND, *more]
        main()

    return Forked(run, folder, said=folder / f"said_{number}", session=True)


def load(folder: Path) -> Any:
    """Return the study; create it with one diverging and one invalid trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = folder / "logs" / "train" / NAME / "study.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name=NAME, storage=f"sqlite:///{path}?timeout=60", direction="maximize", load_if_exists=True
    )
    if not study.trials:
        for settings in (DIVERGING, REFUSED):
            study.enqueue_trial({"model.learning_rate": 0.001, "model.clip_epsilon": 0.2, **settings})
    return study


def kill(folder: Path, kills: int, complete: int, seed: int) -> tuple[Counter[str], list[Forked]]:
    """Run two processes, kill one of them ``kills`` times, and continue until enough trials are complete."""
    draws, numbers, ends = random.Random(seed), itertools.count(), Counter[str]()
    started: list[Forked] = []

    def begin() -> Forked:
        process = start(folder, next(numbers))
        started.append(process)
        return process

    def renew(workers: list[Forked]) -> list[Forked]:
        for process in (process for process in workers if not process._process.is_alive()):
            ends[f"ended by itself, status {process.ends()}"] += 1
        return [process if process._process.is_alive() else begin() for process in workers]

    workers = [begin(), begin()]  # both start in the same second
    for number in range(kills):
        deadline = time.monotonic() + draws.uniform(0.0, 3 * TRIAL_SECONDS)
        while time.monotonic() < deadline:
            workers = renew(workers)
            time.sleep(0.05)
        kind, index = SIGNALS[number % len(SIGNALS)], draws.randrange(2)
        workers[index].send(kind)
        status = workers[index].ends()
        ends[f"{kind.name}, status {status}"] += 1
        say(f"kill {number}: {kind.name}, status {status}; {states(load(folder))}")
        workers[index] = begin()
    while sum(trial.state.name == "COMPLETE" for trial in load(folder).trials) < complete:
        workers = renew(workers)
        time.sleep(0.2)
    for process in workers:
        ends[f"ended by itself, status {process.ends()}"] += 1
    return ends, started


def states(study: Any) -> dict[str, int]:
    """Count the states of the trials."""
    return dict(Counter(trial.state.name for trial in study.trials))


def read_log(folder: Path, metric: str) -> dict[int, float]:
    """Return a metric of a run by its number of frames."""
    path = folder / "csv" / "metrics.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {int(float(row["step"])): float(row[metric]) for row in csv.DictReader(file) if row.get(metric)}


def faults_of(study: Any) -> list[str]:
    """Compare each trial with the log and the record of its run; return all differences."""
    faults, folders = [], Counter[str]()
    for trial in study.trials:
        name, complete = f"trial {trial.number}", trial.state.name == "COMPLETE"
        if trial.state.name not in ("COMPLETE", "PRUNED", "FAIL"):
            faults.append(f"{name} is {trial.state.name}")
        path = trial.user_attrs.get("folder")
        if path is None:
            if complete or trial.intermediate_values:
                faults.append(f"{name} has scores without a folder")
            continue
        folder = Path(path)
        folders[path] += 1
        record = OmegaConf.load(folder / ".hydra" / "hydra.yaml")
        number = record.hydra.callbacks.search.trial
        if number != trial.number:
            faults.append(f"{name} has the folder of trial {number}")
        settings = dict(line.partition("=")[::2] for line in record.hydra.overrides.task)
        if any(float(settings[key]) != value for key, value in trial.params.items()):
            faults.append(f"{name} has the settings {trial.params}, its run {settings}")
        logged = read_log(folder, "eval/return")
        reports = trial.intermediate_values
        # A killed run may have reported a score without writing it to its log.
        if any(not math.isclose(logged.get(step, score), score) for step, score in reports.items()):
            faults.append(f"{name} has the reports {reports}, its log {logged}")
        if complete:
            if set(reports) != set(logged):
                faults.append(f"{name} has the reports {reports}, its log {logged}")
            scores = list(read_log(folder, "final/return").values())
            if len(scores) != 1 or not math.isclose(scores[0], trial.value):
                faults.append(f"{name} has the score {trial.value}, its log {scores}")
    return [*faults, *(f"{count} trials have the folder {path}" for path, count in folders.items() if count > 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--complete", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new folder, which is kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    warm()
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        load(folder)
        ends, started = kill(folder, arguments.kills, arguments.complete, arguments.seed)
        last = start(folder, len(started), "hydra.sweeper.n_trials=1")
        ends[f"last start, status {last.ends()}"] += 1
        study = load(folder)
        said = "".join(process.said for process in [*started, last])
        faults, counts = faults_of(study), states(study)
    say("| end of a process | processes |")
    say("| --- | --- |")
    for end, count in sorted(ends.items()):
        say(f"| {end} | {count} |")
    say(f"trials: {counts}")
    errors = [line for line in said.splitlines() if line.startswith("error: in trial")]
    diverged, refused = (sum(word in line for line in errors) for word in ("finite", "clip_epsilon must"))
    say(f"diverged: {diverged}; refused: {refused}; tracebacks: {said.count('Traceback (most recent call last)')}")
    say("faults: " + ("; ".join(faults) if faults else "none"))
    sys.exit(bool(faults) or not diverged or not refused)


if __name__ == "__main__":
    main()
