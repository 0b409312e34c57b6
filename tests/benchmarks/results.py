"""Repeat the experiments, store their scores in ``examples/results`` and write them into the guide.

    python tests/benchmarks/results.py run ppo_acrobot [--seeds 0 1 2]
    python tests/benchmarks/results.py table

``run`` trains an experiment like ``torchrl-lightning-train`` and plays 100 unseen episodes with the last checkpoint of
each seed. It writes ``examples/results/ppo_acrobot.csv`` with one row per evaluation in training and one row for the
end. Long experiments may run seed by seed: rows of other seeds with the same settings remain in the file.

``table`` replaces the text between the marks in ``examples/guide/experiments.md``, and ``redraw.py scores.png`` draws
the figure below it. The figure has one line per seed for the evaluations in training, and stars for the last
checkpoints. ``examples/results/published.yaml`` contains published scores. ``zoo.py`` logs the scores of
Stable-Baselines3 with the same settings.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from operator import attrgetter
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import TYPE_CHECKING

import numpy as np
import yaml

from torchrl_lightning.cli.plot import bootstrap_interval
from torchrl_lightning.plotting.style import STAR, add_legend, axis_label, saved_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROJECT = Path(__file__).resolve().parents[2]
RESULTS, CONF = PROJECT / "examples" / "results", PROJECT / "conf" / "experiment"
PEER = RESULTS / "stable_baselines3"
"""Folder of the logs of ``zoo.py``."""
DEMONSTRATIONS = PROJECT / "conf" / "demonstrations"
GUIDE = PROJECT / "examples" / "guide" / "experiments.md"
BEGIN, END = "<!-- made by tests/benchmarks/results.py -->\n", "<!-- end -->\n"
VERSION, EPISODES = 1, 100
TRAIN, EVALUATE = (f"from torchrl_lightning.cli.{name} import main; main()" for name in ("train", "evaluate"))


class ResultsError(ValueError):
    """Raised if a file of results has another version or other settings."""


@dataclass(frozen=True)
class Row:
    """An evaluation in training, or the end of a run. Only the end has ``minutes`` of processor time.

    ``success`` is the share of episodes that end at the goal, if the environment has a goal.
    """

    seed: int
    frames: int
    score: float
    deviation: float
    episodes: int
    minutes: float | None = None
    success: float | None = None


def settings_of(name: str) -> str:
    """Return a digest of the YAML of an experiment and its defaults, without comments.

    The digest includes the demonstrations of the experiment.

    Raises:
        ResultsError: The experiment does not exist.
    """
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        raise ResultsError(f"there is no experiment {name}; those of {CONF} are at hand.")
    said = yaml.safe_load(path.read_text())
    before = [settings_of(each) for each in said.get("defaults", []) if isinstance(each, str) and each != "_self_"]
    told = yaml.safe_dump([said, before])
    digest = hashlib.sha256(told.encode())
    for folder in re.findall(r"\$\{paths\.demonstrations\}/(\w+)", told):
        for file in sorted((DEMONSTRATIONS / folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def write(name: str, rows: Iterable[Row], folder: Path = RESULTS, settings: str | None = None) -> None:
    """Write the results of an experiment with its current settings, or of a run with the digest ``settings``.

    Existing rows of other seeds with the same settings remain.
    """
    folder.mkdir(exist_ok=True)
    path, told = folder / f"{name}.csv", settings_of(name) if settings is None else settings
    written = list(rows)
    seeds = {row.seed for row in written}
    with contextlib.suppress(FileNotFoundError, ResultsError):
        written += [row for row in read(path, told) if row.seed not in seeds]
    with path.open("w", newline="") as file:
        file.write(f"# version {VERSION}, settings {told}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(field.name for field in fields(Row))
        ordered = sorted(written, key=attrgetter("seed"))
        lines.writerows(
            ["" if value is None else value if isinstance(value, int) else f"{value:.6g}" for value in astuple(row)]
            for row in ordered
        )


def read(path: Path, settings: str | None = None, script: str = "results.py") -> list[Row]:
    """Read the results of an experiment, or of a run with the digest ``settings``; ``script`` repeats the run.

    Raises:
        ResultsError: The file has another version or other settings.
    """
    head, *lines = path.read_text().splitlines()
    mend = f"Run it again: python tests/benchmarks/{script} run {path.stem}."
    found = re.fullmatch(r"# version (\d+), settings (\w+)", head)
    if found is None or int(found[1]) != VERSION:
        raise ResultsError(f"{path} begins with {head!r}, not with '# version {VERSION}'. {mend}")
    now = settings_of(path.stem) if settings is None else settings
    if found[2] != now:
        raise ResultsError(f"{path} is of the settings {found[2]}, the experiment has {now}. {mend}")
    rows = csv.DictReader(lines)
    return [
        Row(
            *(int(float(row[key])) for key in ("seed", "frames")),
            *(float(row[key]) for key in ("score", "deviation")),
            int(row["episodes"]),
            *(float(row[key]) if row.get(key) else None for key in ("minutes", "success")),
        )
        for row in rows
    ]


def run(given: Iterable[str], seed: int, folder: Path) -> Iterator[Row]:
    """Train with the command and a seed, play the last checkpoint, and yield the rows of the results."""
    began = processor_time()
    command(TRAIN, *given, f"seed={seed}", "eval_checkpoint=last", f"hydra.run.dir={folder}")
    minutes = (processor_time() - began) / 60
    said = command(EVALUATE, f"ckpt_path={folder}/checkpoints/last.ckpt", f"episodes={EPISODES}", "trusted=true")
    yield from logged(folder / "csv" / "metrics.csv", seed)
    yield ended(said, seed, minutes)


def logged(path: Path, seed: int) -> Iterator[Row]:
    """Yield the evaluations from the log of a run."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("eval/return"):
                score, deviation = float(row["eval/return"]), float(row["eval/return_std"])
                success = float(row["eval/success"]) if row.get("eval/success") else None
                yield Row(seed, int(float(row["step"])), score, deviation, 0, success=success)


def ended(said: str, seed: int, minutes: float) -> Row:
    """Read the last line of ``torchrl-lightning-evaluate``."""
    form = r"return: (\S+) \+- (\S+) over (\d+) episodes,(?: success rate (\S+),)? (\d+) frames"
    found = re.search(form, said)
    if found is None:
        raise ResultsError(f"the evaluation of seed {seed} said {said[-300:]!r} instead of a score.")
    success = None if found[4] is None else float(found[4])
    return Row(seed, int(found[5]), float(found[1]), float(found[2]), int(found[3]), minutes, success)


def command(program: str, *arguments: str) -> str:
    """Run a command of this package with arguments, and return its output; raise ResultsError if it fails."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResultsError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def processor_time() -> float:
    """Return the processor time of all ended child processes in seconds."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def middle_half(values: Sequence[float]) -> str:
    """Return the interquartile mean of the scores of all seeds with its interval."""
    ends = np.ravel(bootstrap_interval(np.array(values)[:, None]))
    return "{} ({} to {})".format(*(f"{end:.3g}" if abs(end) < 1000 else f"{end:.0f}" for end in ends))


def short(score: float) -> str:
    """Return a score with few digits."""
    return f"{score:.4g}" if abs(score) < 10 else f"{score:.0f}"


def shown(end: Row) -> str:
    """Return the score of a run, followed by its success rate in brackets if it has one."""
    return short(end.score) if end.success is None else f"{short(end.score)} ({end.success:.2f})"


def spread(scores: Sequence[float]) -> str:
    """Return mean and deviation of the scores of all seeds, or the score of a single seed."""
    if len(scores) == 1:
        return short(scores[0])
    deviation = np.std(scores, ddof=1) if np.ptp(scores) else 0.0  # np.std of equal scores may be a rounding error
    return f"{np.mean(scores):.4g} +- {deviation:.2g}"


def minutes(ends: Sequence[Row]) -> str:
    """Return the mean training time of a seed in minutes."""
    return f"{np.mean([row.minutes for row in ends if row.minutes is not None]):.1f}"


def ends_of_peer(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the ends of the Stable-Baselines3 runs of an experiment, or an empty list without such runs."""
    path = folder / PEER.name / f"{name}.csv"
    return read(path, settings_of(name), "zoo.py") if path.is_file() else []


def of_peer(name: str, folder: Path = RESULTS) -> str:
    """Return score, number of seeds and minutes of the Stable-Baselines3 runs, or an empty string."""
    ends = ends_of_peer(name, folder)
    if not ends:
        return ""
    of = f"{len(ends)} seeds" if len(ends) > 1 else "1 seed"
    return f"{spread([row.score for row in ends])} ({of}, {minutes(ends)} minutes)"


def table(folder: Path = RESULTS) -> str:
    """Return the table of all results."""
    published = yaml.safe_load((folder / "published.yaml").read_text())
    heads = ("experiment", "seeds", "frames", "minutes", "score of each seed", "mean, deviation")
    heads += ("Stable-Baselines3, run here", "published")
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for path in sorted(folder.glob("*.csv")):
        ends = [row for row in read(path) if row.minutes is not None]
        scores = [row.score for row in ends]
        told = spread(scores)
        if len(scores) >= 5:
            told += f"; middle half {middle_half(scores)}"
        frames, seeds = max(row.frames for row in ends), ", ".join(str(row.seed) for row in ends)
        cells = (f"`{path.stem}`", seeds, f"{frames:,}", minutes(ends), ", ".join(map(shown, ends)), told)
        lines.append(f"| {' | '.join(cells)} | {of_peer(path.stem, folder)} | {published.get(path.stem, '')} |")
    return "\n".join(lines) + "\n"


def picture(output: Path, folder: Path = RESULTS) -> Figure:
    """Draw the curves of all results: one panel per experiment, one line per seed, stars for the ends."""
    from matplotlib.ticker import EngFormatter

    published = yaml.safe_load((folder / "published.yaml").read_text())
    paths = sorted(folder.glob("*.csv"))
    with saved_panels(output, len(paths), (3.6, 2.3), columns=2) as (figure, grid):
        has_peer = has_published = False
        for axes, path in zip(grid, paths, strict=True):
            rows = read(path)
            for seed in sorted({row.seed for row in rows}):
                points = [(row.frames, row.score) for row in rows if row.seed == seed and row.minutes is None]
                axes.plot(*zip(*points, strict=True), color="C0", alpha=0.7, linewidth=1.2)
            ends, peer = [row for row in rows if row.minutes is not None], ends_of_peer(path.stem, folder)
            for color, stars in (("C0", ends), ("C1", peer)):
                if stars:
                    at = [row.frames for row in stars], [row.score for row in stars]
                    axes.plot(*at, "*", color=color, clip_on=False, zorder=3)
            has_peer |= bool(peer)
            found = re.match(r"(?:about )?(-?\d[\d.]*)", published.get(path.stem, ""))
            if found:
                axes.axhline(float(found[1]), color="C2", linestyle=":")
                has_published = True
            axes.set_title(path.stem, fontsize=9)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_xlabel(axis_label("step"))
            axes.set_ylabel(axis_label("eval/return"))
        entries = {"one seed: evaluations in training": {"color": "C0"}}
        entries["one seed: last checkpoint, 100 unseen episodes"] = {"color": "C0", **STAR}
        if has_peer:
            entries["Stable-Baselines3, one seed: last checkpoint"] = {"color": "C1", **STAR}
        if has_published:
            entries["published score"] = {"color": "C2", "linestyle": ":"}
        add_legend(figure, entries)
    return figure


def with_table(page: str, made: str, begin: str = BEGIN) -> str:
    """Return a page with the table between its marks."""
    before, rest = page.split(begin)
    return before + begin + "\n" + made + "\n" + END + rest.split(END, 1)[1]


def asked(description: str | None, seeds: Sequence[int], *, has_table: bool = True) -> argparse.Namespace:
    """Parse the command line: ``run NAME``, with the default ``seeds``, or ``table`` if the script has a table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("name")
    running.add_argument("--seeds", type=int, nargs="+", default=seeds)
    if has_table:
        commands.add_parser("table")
    return parser.parse_args()


def run_all(given: Sequence[str], seeds: Iterable[int]) -> list[Row]:
    """Train with each seed, and return all rows."""
    with tempfile.TemporaryDirectory() as folder:
        return [row for seed in seeds for row in run(given, seed, Path(folder, str(seed)))]


def main() -> None:
    """Run an experiment, or write the table."""
    arguments = asked(__doc__, [0, 1, 2])
    if arguments.command == "table":
        GUIDE.write_text(with_table(GUIDE.read_text(), table()))
        return
    settings_of(arguments.name)  # raises if the experiment does not exist
    write(arguments.name, run_all([f"experiment={arguments.name}"], arguments.seeds))


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
