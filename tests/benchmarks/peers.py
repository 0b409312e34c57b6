"""Compare training runs and parts with other libraries, and write the results into the page on speed.

    python tests/benchmarks/peers.py run [--rows ppo_512 sac ...] [--check]
    python tests/benchmarks/peers.py table

``run`` measures each row in a process of its own, with all contenders interleaved on one thread, and writes
``examples/results/speed/TIME.json`` with the state of the machine. ``--check`` compares with the stored runs of the
same processor instead: it exits with 1 if a ratio is more than a tenth worse than all of them. ``table`` writes the
median of the newest three runs of each row, with their range, into ``examples/guide/speed.md`` and the README. Runs
that begin less than 30 minutes after a counted run are not counted, because they share its load.

A ratio divides the peer's time by ours, or our speed by the peer's, so that more than 1 means that ours is faster. The
row ``memory`` divides our peak by the peer's. If a peer has several ways to do the same, its fastest one counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, compare, one_thread, say

if __name__ == "__main__" and sys.argv[1:2] == ["row"]:
    one_thread()
    warnings.simplefilter("ignore")

from benchmarks import run_logs
from benchmarks.run_logs import PROJECT
from benchmarks.tables import markdown, with_table
from benchmarks.whole_runs.names import ANY_SBX, BARE, COMMAND, LEAN, OURS, REJAX, SB3, SBX

FOLDER = PROJECT / "examples" / "results" / "speed"
PACKAGES = ("torch", "torchrl", "numpy", "stable-baselines3", "sbx-rl", "rejax", "jax", "envpool", "cpprb")
MINUTES, NEWEST = 30, 3
AS_COMMAND = "as the command runs"
COLUMNS = {
    "Stable-Baselines3": "as it ships",
    "Stable-Baselines3, lean": "lean",
    "SBX": "SBX",
    "bare loop": "bare loop",
    AS_COMMAND: AS_COMMAND,
}
"""The columns of the table of training runs, by the peer's name."""
Measured = dict[str, list[float]]
"""Speed or cost of each contender, one number per repetition."""


def whole_run(name: str, repetitions: int, scale: float) -> tuple[Measured, dict[str, float]]:
    """Return frames per second of processor time, and our ratio to each peer."""
    from benchmarks.end_to_end import measure, runs

    run = runs(scale)[name]()
    asked = (OURS, SB3, LEAN, *ANY_SBX, REJAX, BARE, COMMAND)
    contenders = {key: run.contenders[key] for key in asked if key in run.contenders}
    speeds = measure(replace(run, contenders=contenders), repetitions)
    return speeds, run_ratios(name, speeds)


def run_ratios(name: str, speeds: Measured) -> dict[str, float]:
    """Return our median speed divided by that of each peer, and that of the command divided by ours without it."""
    middle = {key: statistics.median(values) for key, values in speeds.items()}
    ratios: dict[str, float] = {}
    for key, speed in middle.items():
        if key == COMMAND:
            ratios[f"{name}, {AS_COMMAND}"] = speed / middle[OURS]
        elif key != OURS:
            peer = f"{name}, {SBX if key in ANY_SBX else key}"
            ratios[peer] = min(ratios.get(peer, math.inf), middle[OURS] / speed)
    return ratios


def part(name: str, contenders: Mapping[str, Contender], peers: Sequence[str]) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per call, and the ratio of each peer; the first contender is ours.

    Args:
        name: The name of the row.
        contenders: The functions to time.
        peers: The beginnings of the contenders' names.
    """
    timings = compare(contenders, repetitions=21, seconds=0.05)
    times = {timing.name: timing.median for timing in timings}
    ours = times[next(iter(contenders))]
    ratios = {}
    for peer in peers:
        found = [time for key, time in times.items() if key.startswith(peer)]
        if found:
            ratios[f"{name}, {peer}"] = min(found) / ours
    return {timing.name: [timing.low, timing.median, timing.high] for timing in timings}, ratios


def collecting(num_envs: int, steps: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per rollout, and the ratio to TorchRL's fastest way."""
    from benchmarks import collector

    contenders = collector.rollouts(num_envs, steps)
    del contenders["torchrl, single environments"]  # the slowest
    timings = compare(contenders, repetitions=9, seconds=0.05)
    ratio = collector.factor(timings, "torchrl,")
    return {timing.name: [timing.median] for timing in timings}, {f"collect_{num_envs}, TorchRL": ratio}


def estimator(kind: str, steps: int, num_envs: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per estimate of advantages, ``kind`` is ``gae`` or ``vtrace``."""
    from benchmarks import estimators

    build = estimators.gae_contenders if kind == "gae" else estimators.vtrace_contenders
    contenders = build(estimators.Problem(steps, num_envs))
    estimators.agree(contenders)
    timed = {name: run for name, (run, _) in contenders.items() if name != estimators.BARE}
    return part(f"{kind}_{steps}x{num_envs}", timed, ("rlax", "TorchRL", "Tianshou", "Stable-Baselines3"))


def writing() -> tuple[Measured, dict[str, float]]:
    """Return microseconds per step of eight environments with nine entries, when an episode ends."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    from benchmarks import ring
    from torchrl_lightning import ExperienceBuffer, RingStorage

    size = 1_000_000
    ours = ring.adding_nine(ExperienceBuffer(storage=RingStorage(size), num_envs=ring.ENVS))
    theirs = ring.adding_nine(TensorDictReplayBuffer(storage=LazyTensorStorage(size)))
    return part("write_8", {"ours": ours, "TorchRL": theirs}, ("TorchRL",))


def as_tensors(sample: Callable[[], Mapping[str, Any]]) -> Callable[[], object]:
    """Return a function that samples and converts all arrays to tensors."""
    import torch

    return lambda: {key: torch.from_numpy(value) for key, value in sample().items()}


def uniform(batch: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per uniform sample of a million transitions."""
    from benchmarks import ring

    arrays = partial(ring.cpprb(10**6)[0], batch)
    ours = partial(ring.ours(10**6).sample, batch)
    return _beside_cpprb(f"uniform_{batch}", ours, arrays)


def prioritized(batch: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per prioritized sample of a million transitions with an update of their priorities."""
    from benchmarks import prioritized

    arrays: Any = prioritized.cpprb(10**6, batch)
    return _beside_cpprb(f"prioritized_{batch}", prioritized.ours(10**6, batch), arrays)


def _beside_cpprb(
    name: str, ours: Callable[[], object], arrays: Callable[[], Mapping[str, Any]]
) -> tuple[Measured, dict[str, float]]:
    contenders = {"ours": ours, "cpprb": arrays, "cpprb, as tensors": as_tensors(arrays)}
    timings = compare(contenders, repetitions=31, seconds=0.05)
    times = {timing.name: timing.median for timing in timings}
    ratios = {f"{name}, {peer}": times[peer] / times["ours"] for peer in [*contenders][1:]}
    return {timing.name: [timing.low, timing.median, timing.high] for timing in timings}, ratios


def hindsight(count: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per sample of 256 steps with goals of hindsight."""
    from benchmarks import hindsight

    data = hindsight.steps(count)
    mine, other = hindsight.ours(data, count), hindsight.theirs(data, count)
    contenders = {"ours": mine.sample, "Stable-Baselines3": partial(other.sample, hindsight.BATCH)}
    return part("hindsight_256", contenders, ("Stable-Baselines3",))


def windows(size: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per sample of 256 windows of four steps within episodes."""
    from benchmarks import slices

    contenders = {"ours": slices.sequences(size, None), "TorchRL": slices.slices(size, None)}
    return part("windows_256", contenders, ("TorchRL",))


def memory() -> tuple[Measured, dict[str, float]]:
    """Return the peak memory of short runs in megabytes, and its ratio to Stable-Baselines3."""
    from benchmarks import start

    peaks, ratios = {}, {}
    for experiment in start.RUNS:
        programs = start.programs(experiment, 2048)
        for name in (start.OURS, start.CURVE):
            costs = []
            for _ in range(3):
                with tempfile.TemporaryDirectory() as folder:
                    costs.append(start.cost_of(programs[name], Path(folder)).megabytes)
            peaks[f"{experiment}, {name}"] = costs
        ours, theirs = (statistics.median(peaks[f"{experiment}, {name}"]) for name in (start.OURS, start.CURVE))
        ratios[f"memory of {experiment}, {start.CURVE}"] = ours / theirs
    return peaks, ratios


RUNS = {
    "dqn_8": "DQN CartPole, 8 environments",
    "dqn_8_hard": "the same, hard target",
    "dqn_8_three_steps": "the same, three-step returns",
    "dqn_1": "DQN CartPole, 1 environment",
    "td3": "TD3 Pendulum, 256 x 256",
    "sac": "SAC Pendulum, 256 x 256",
    "ppo_8": "PPO CartPole, 8 environments",
    "ppo_1": "PPO CartPole, 1 environment",
    "ppo_pendulum": "PPO Pendulum, 8 environments",
    "ppo_pong": "PPO Pong, 8 environments",
}
"""The titles of the training runs beside Stable-Baselines3, in the order of the page."""
PARTS = {
    **{f"ppo_{number}": f"a training run: PPO on {number:,} CartPoles of EnvPool" for number in (128, 512, 1024)},
    **{f"collect_{number}": f"collecting CartPole, {number:,} environments" for number in (8, 128, 1024)},
    "gae_128x8": "GAE, 128 steps of 8 environments",
    "gae_2048x16": "GAE, 2,048 steps of 16 environments",
    "vtrace_128x8": "V-trace, 128 steps of 8 environments",
    "write_8": "writing a step of 8 environments, nine entries, an episode ends",
    "uniform_32": "sampling 32 of a million transitions",
    "uniform_256": "sampling 256 of a million transitions",
    "prioritized_32": "the same with priorities and their update, 32",
    "prioritized_256": "the same with priorities and their update, 256",
    "hindsight_256": "sampling 256 steps with hindsight, of 100,000",
    "windows_256": "sampling 256 windows of 4 steps within episodes, of 100,000",
    "memory of ppo_cartpole": "peak memory of a short `ppo_cartpole`, ours over theirs",
    "memory of dqn_cartpole": "peak memory of a short `dqn_cartpole`, ours over theirs",
}
"""The titles of all other comparisons, in the order of the page."""
ROWS: dict[str, Callable[[], tuple[Measured, dict[str, float]]]] = {
    **{name: partial(whole_run, name, 3, 0.5) for name in RUNS},
    "ppo_pendulum": partial(whole_run, "ppo_pendulum", 3, 2.0),  # 40 rollouts, so that one checkpoint counts little
    **{f"ppo_{number}": partial(whole_run, f"ppo_{number}", 3, 1.0) for number in (128, 512, 1024)},
    **{f"collect_{number}": partial(collecting, number, max(16, 1024 // number)) for number in (8, 128, 1024)},
    "gae_128x8": partial(estimator, "gae", 128, 8),
    "gae_2048x16": partial(estimator, "gae", 2048, 16),
    "vtrace_128x8": partial(estimator, "vtrace", 128, 8),
    "write_8": writing,
    **{f"uniform_{batch}": partial(uniform, batch) for batch in (32, 256)},
    **{f"prioritized_{batch}": partial(prioritized, batch) for batch in (32, 256)},
    "hindsight_256": partial(hindsight, 100_000),
    "windows_256": partial(windows, 100_000),
    "memory": memory,
}
AIMS = {
    **{f"ppo_{number}, rejax": 1.0 for number in (128, 512, 1024)},
    **{f"collect_{number}, TorchRL": 3.0 for number in (8, 128, 1024)},
    "uniform_32, cpprb": 1.0,
    "prioritized_32, cpprb": 1.0,
    **{f"memory of {name}_cartpole, Stable-Baselines3, with a curve": 1.2 for name in ("ppo", "dqn")},
}
"""The lowest ratio that we accept; for memory, the highest."""


def machine() -> dict[str, Any]:
    """Return the time, the load and the versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
        "processor": run_logs.processor(),
        "python": platform.python_version(),
        "versions": versions,
    }


def run(rows: Sequence[str], folder: Path = FOLDER) -> dict[str, float]:
    """Measure rows, and store them in a file of the folder after each one; return the ratios.

    Raises:
        SystemExit: A row failed; the other rows are stored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"machine": machine(), "measured": {}, "ratios": {}, "load": {}}
    path = folder / f"{content['machine']['began'].replace(':', '').partition('+')[0]}.json"
    failed = []
    for row in rows:
        content["load"][row] = os.getloadavg()[0]
        done = subprocess.run([sys.executable, __file__, "row", row], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            failed.append(f"{row}: failed with status {done.returncode}")
            continue
        measured, ratios = json.loads(done.stdout.splitlines()[-1])
        content["measured"][row] = measured
        content["ratios"] |= ratios
        say("\n".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
        path.write_text(json.dumps(content, indent=1) + "\n")
    if failed:
        sys.exit("\n".join(failed))
    return dict(content["ratios"])


def counted(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the ratios of each comparison, of the newest three runs that began at least 30 minutes apart.

    All runs of a comparison are from the processor of its newest run, because ratios depend on the processor.
    """
    contents = sorted(contents, key=lambda content: str(content["machine"]["began"]))
    newest = {name: content["machine"]["processor"] for content in contents for name in content["ratios"]}
    found: dict[str, list[float]] = {}
    last: dict[str, datetime.datetime] = {}
    for content in contents:
        began = datetime.datetime.fromisoformat(content["machine"]["began"])
        for name, ratio in content["ratios"].items():
            if newest[name] != content["machine"]["processor"]:
                continue
            if name not in last or began - last[name] >= datetime.timedelta(minutes=MINUTES):
                found.setdefault(name, []).append(ratio)
                last[name] = began
    return {name: ratios[-NEWEST:] for name, ratios in found.items()}


def stored(folder: Path = FOLDER, processor: str | None = None) -> dict[str, list[float]]:
    """Return the counted ratios of each comparison, of a processor or of all."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return counted([each for each in contents if processor in (None, each["machine"]["processor"])])


def is_memory(name: str) -> bool:
    """Return whether a lower ratio is better."""
    return name.startswith("memory")


def worse(ratios: Mapping[str, float], known: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a sentence for each ratio that is more than a tenth worse than all stored ones."""
    found = []
    for name, ratio in ratios.items():
        values = known.get(name, ())
        if values and (ratio > 1.1 * max(values) if is_memory(name) else ratio < 0.9 * min(values)):
            found.append(f"{name}: {ratio:.2f}, stored are {spread(values)}")
    return found


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios with their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def aim(name: str, ratios: Sequence[float]) -> str:
    """Return the ratio to reach, and whether the median misses it."""
    if name not in AIMS:
        return ""
    middle, wanted = round(statistics.median(ratios), 2), AIMS[name]
    return f"{wanted:.1f}{', missed' * (middle > wanted if is_memory(name) else middle < wanted)}"


def runs_table(found: Mapping[str, Sequence[float]]) -> str:
    """Return the table of training runs beside Stable-Baselines3."""
    rows = []
    for name, title in RUNS.items():
        ratios = [found.get(f"{name}, {peer}", ()) for peer in COLUMNS]
        if any(ratios):
            rows.append([title, *(spread(each) if each else "" for each in ratios), str(len(max(ratios, key=len)))])
    return markdown(("run", *COLUMNS.values(), "runs"), rows)


def parts_table(found: Mapping[str, Sequence[float]]) -> str:
    """Return the table of all other comparisons."""
    rows = []
    for name, title in PARTS.items():
        for key, ratios in found.items():
            row, _, peer = key.partition(", ")
            if row == name:
                rows.append([title, peer, spread(ratios), str(len(ratios)), aim(key, ratios)])
    return markdown(("work", "other", "ratio", "runs", "to reach"), rows)


def summary(found: Mapping[str, Sequence[float]]) -> str:
    """Return the README's sentence about whole training runs."""
    middle = {name: statistics.median(found[f"{name}, Stable-Baselines3"]) for name in RUNS}
    images = middle.pop("ppo_pong")
    return (
        f"Training on vector observations is {min(middle.values()):.1f} to {max(middle.values()):.1f} times as fast as "
        f"Stable-Baselines3 on one core, and PPO on images {images:.2f} times"
    )


def written(folder: Path = FOLDER) -> dict[Path, str]:
    """Return the texts of the pages with the stored ratios."""
    found, page, readme = stored(folder), PROJECT / "examples" / "guide" / "speed.md", PROJECT / "README.md"
    text = page.read_text()
    for mark, table in {"runs": runs_table(found), "parts": parts_table(found)}.items():
        text = with_table(text, table, f"peers.py: {mark}")
    front, count = re.subn(
        r"Training on vector observations is .*? and PPO on images [\d.]+ times", summary(found), readme.read_text()
    )
    assert count == 1
    return {page: text, readme: front}


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    running.add_argument("--check", action="store_true", help="compare with the stored runs, and store nothing")
    commands.add_parser("row").add_argument("name", choices=ROWS)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run" and arguments.check:
        known = stored(processor=run_logs.processor())
        if not known:
            sys.exit(
                f"--check needs stored runs of this processor ({run_logs.processor()}). Store some without --check."
            )
        with tempfile.TemporaryDirectory() as folder:
            found = worse(run(arguments.rows, Path(folder)), known)
        if found:
            sys.exit("\n".join(found))
    elif arguments.command == "run":
        run(arguments.rows)
    elif arguments.command == "row":
        import logging

        import torch

        torch.set_num_threads(1)
        for name in ("lightning.pytorch", "torchrl", "torchrl_lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
        say(json.dumps(ROWS[arguments.name]()))
    else:
        for path, text in written().items():
            path.write_text(text)


if __name__ == "__main__":
    main()
