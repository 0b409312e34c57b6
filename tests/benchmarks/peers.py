"""Compare the parts and runs in which a peer is ahead or close, and store the results with the state of the machine.

    python tests/benchmarks/peers.py run [--rows ppo_512 sac ...]
    python tests/benchmarks/peers.py table

``run`` measures each row in a process of its own, with all contenders interleaved on one thread, and writes
``examples/results/speed/TIME.json``. ``table`` prints the median of all stored runs of each row with their range. Runs
that begin less than 30 minutes after a counted run are not counted, because they share its load.

A ratio divides the peer's time by ours, or our speed by the peer's, so that more than 1 means that ours is faster. The
row ``memory`` divides our peak by the peer's.

* ``ppo_128``, ``ppo_512``, ``ppo_1024``: PPO on EnvPool's CartPoles beside rejax, without its compilation.
* ``sac``, ``td3``: 256 units in each layer, beside Stable-Baselines3 and SBX, with one or four updates in a row.
* ``ppo_pong``: PPO on images beside lean Stable-Baselines3.
* ``collect_8``, ``collect_128``, ``collect_1024``: collecting CartPole beside the fastest way of TorchRL.
* ``uniform_32``, ``prioritized_32``: samples of a million transitions beside cpprb. cpprb returns arrays. A second
  contender converts them to tensors, as a learner needs them.
* ``memory``: a short run of the command beside Stable-Baselines3 with a learning curve.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
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

from benchmarks.harness import compare, one_thread, say

if __name__ == "__main__" and sys.argv[1:2] == ["row"]:
    one_thread()
    warnings.simplefilter("ignore")

from benchmarks import run_logs

FOLDER = Path(__file__).parents[2] / "examples" / "results" / "speed"
PACKAGES = ("torch", "torchrl", "numpy", "stable-baselines3", "sbx-rl", "rejax", "jax", "envpool", "cpprb")
MINUTES = 30
Measured = dict[str, list[float]]
"""Speed or cost of each contender, one number per repetition."""


def end_to_end(name: str, repetitions: int, scale: float) -> tuple[Measured, dict[str, float]]:
    """Return frames per second of processor time, and our ratio to each peer."""
    from benchmarks.end_to_end import ANY_SBX, LEAN, OURS, REJAX, SB3, SBX, measure, runs

    run = runs(scale)[name]()
    if name == "ppo_pong":
        peers: tuple[str, ...] = (LEAN,)
    else:
        peers = (REJAX,) if name.startswith("ppo") else (SB3, LEAN, *ANY_SBX)
    asked = {key: training for key, training in run.contenders.items() if key in (OURS, *peers)}
    speeds = measure(replace(run, contenders=asked), repetitions)
    middle = {key: statistics.median(values) for key, values in speeds.items()}
    best: dict[str, float] = {}
    for key in peers:
        group = SBX if key in ANY_SBX else key
        best[group] = max(best.get(group, 0.0), middle[key])
    return speeds, {f"{name}, {peer}": middle[OURS] / speed for peer, speed in best.items()}


def collecting(num_envs: int, steps: int) -> tuple[Measured, dict[str, float]]:
    """Return microseconds per rollout, and the ratio to TorchRL's fastest way."""
    from benchmarks import collector

    contenders = collector.rollouts(num_envs, steps)
    del contenders["torchrl, single environments"]  # the slowest
    timings = compare(contenders, repetitions=9, seconds=0.05)
    ratio = collector.factor(timings, "torchrl,")
    return {timing.name: [timing.median] for timing in timings}, {f"collect_{num_envs}, TorchRL": ratio}


def as_tensors(sample: Callable[[], Mapping[str, Any]]) -> Callable[[], object]:
    """Return a function that samples and converts all arrays to tensors."""
    import torch

    return lambda: {key: torch.from_numpy(value) for key, value in sample().items()}


def uniform_32() -> tuple[Measured, dict[str, float]]:
    """Return microseconds per uniform sample of 32 transitions."""
    from benchmarks import ring

    sample = partial(ring.cpprb(10**6)[0], 32)
    return _sampling("uniform_32", partial(ring.ours(10**6).sample, 32), sample, as_tensors(sample))


def prioritized_32() -> tuple[Measured, dict[str, float]]:
    """Return microseconds per prioritized sample of 32 transitions with an update of their priorities."""
    from benchmarks import prioritized

    sample: Any = prioritized.cpprb(10**6, 32)
    return _sampling("prioritized_32", prioritized.ours(10**6, 32), sample, as_tensors(sample))


def _sampling(
    name: str, ours: Callable[[], object], arrays: Callable[[], object], tensors: Callable[[], object]
) -> tuple[Measured, dict[str, float]]:
    contenders = {"ours": ours, "cpprb": arrays, "cpprb, as tensors": tensors}
    timings = compare(contenders, repetitions=31, seconds=0.05)
    times = {timing.name: timing.median for timing in timings}
    ratios = {f"{name}, {peer}": times[peer] / times["ours"] for peer in [*contenders][1:]}
    return {timing.name: [timing.low, timing.median, timing.high] for timing in timings}, ratios


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


ROWS: dict[str, Callable[[], tuple[Measured, dict[str, float]]]] = {
    **{f"ppo_{number}": partial(end_to_end, f"ppo_{number}", 3, 1.0) for number in (128, 512, 1024)},
    **{name: partial(end_to_end, name, 5, 1.0) for name in ("sac", "td3")},
    "ppo_pong": partial(end_to_end, "ppo_pong", 3, 0.5),
    **{f"collect_{number}": partial(collecting, number, max(16, 1024 // number)) for number in (8, 128, 1024)},
    "uniform_32": uniform_32,
    "prioritized_32": prioritized_32,
    "memory": memory,
}


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


def run(rows: Sequence[str], folder: Path = FOLDER) -> Path:
    """Measure rows and store them after each one; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"machine": machine(), "measured": {}, "ratios": {}, "load": {}}
    path = folder / f"{content['machine']['began'].replace(':', '').partition('+')[0]}.json"
    for row in rows:
        content["load"][row] = os.getloadavg()[0]
        done = subprocess.run([sys.executable, __file__, "row", row], stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            say(f"{row}: failed with status {done.returncode}")
            continue
        measured, ratios = json.loads(done.stdout.splitlines()[-1])
        content["measured"][row] = measured
        content["ratios"] |= ratios
        say("\n".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
        path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def counted(contents: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the ratios of each comparison, of runs that began at least 30 minutes apart."""
    found: dict[str, list[float]] = {}
    last: dict[str, datetime.datetime] = {}
    for content in sorted(contents, key=lambda content: str(content["machine"]["began"])):
        began = datetime.datetime.fromisoformat(content["machine"]["began"])
        for name, ratio in content["ratios"].items():
            if name not in last or began - last[name] >= datetime.timedelta(minutes=MINUTES):
                found.setdefault(name, []).append(ratio)
                last[name] = began
    return found


def table(folder: Path = FOLDER) -> str:
    """Return the table of all stored runs."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = ["| comparison | median | range | runs |", "| --- | --- | --- | --- |"]
    for name, ratios in counted(contents).items():
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} | {statistics.median(ratios):.2f} | {spread} | {len(ratios)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    commands.add_parser("row").add_argument("name", choices=ROWS)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        say(f"written: {run(arguments.rows)}")
    elif arguments.command == "row":
        import logging

        import torch

        torch.set_num_threads(1)
        for name in ("lightning.pytorch", "torchrl", "torchrl_lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)
        say(json.dumps(ROWS[arguments.name]()))
    else:
        say(table())


if __name__ == "__main__":
    main()
