"""Repeat the experiments, store each run in ``examples/results`` and write all scores into the pages and YAML files.

    python tests/benchmarks/results.py run ppo_acrobot [--seeds 0 1 2 3 4] [--check]
    python tests/benchmarks/results.py table

``run`` trains an experiment, or a variant of ``examples/results/variants.yaml``, like ``torchrl-lightning-train``. It
plays 100 unseen episodes with the last and the best checkpoint of each seed, and writes
``examples/results/ppo_acrobot/seed_0.csv`` and so on (``run_logs.py``). Do not change the checkout during a run.
``--check`` trains again, and compares with the stored logs instead of replacing them; it exits with 1 if a run differs.

``table`` writes the scores of all logs into the README, the heads of ``conf/experiment/*.yaml`` and the pages of the
guide with tables of scores. Afterwards, ``redraw.py scores.png`` draws the figure of the guide.
``examples/results/experiments.yaml`` contains the descriptions of the experiments, and ``published.yaml`` published
scores. ``zoo.py`` trains with Stable-Baselines3 at the same settings.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[2]))  # for environments in examples/

import numpy as np
import yaml

from benchmarks import run_logs
from benchmarks.run_logs import EPISODES, PROJECT, ResultsError, log_path, read_logs
from benchmarks.tables import (
    duration,
    frames,
    markdown,
    numbered,
    score,
    seeds_of,
    short,
    spread,
    with_table,
)
from benchmarks.variants import descriptions, mask_table, replay_table
from torchrl_lightning.plotting.style import STAR, add_legend, axis_label, saved_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GUIDE = PROJECT / "examples" / "guide" / "experiments.md"
IN_README = (
    *("ppo_cartpole", "ppo_halfcheetah", "vtrace_cartpole", "dqn_prioritized_lunarlander", "sac_pendulum"),
    *("ddpg_her_fetchreach", "pets_pendulum", "ppod_minigrid_keycorridor"),
)
IN_GUIDE = {
    "models.md": (
        *("pets_pendulum", "pets_cartpole_continuous", "pets_invertedpendulum"),
        *("mbpo_pendulum", "mbpo_invertedpendulum", "mbpo_hopper"),
        *("sac_pendulum", "sac_invertedpendulum", "sac_hopper"),
    ),
    "demonstrations.md": (
        *("ppod_minigrid_keycorridor", "ppod_minigrid_keycorridor_without", "ppod_minigrid_unlockpickup"),
        *("ppod_minigrid_unlockpickup_without", "ppod_minigrid_keycorridor_s3r3", "ppod_minigrid_obstructedmaze"),
        *("ppod_minigrid_multiroom", "ppod_minigrid_lockedroom", "ppod_mountaincar", "ppod_mountaincar_without"),
        *("dqfd_mountaincar", "rlpd_pendulum", "sac_her_fetchpickandplace"),
    ),
    "hindsight.md": (
        "ddpg_her_fetchreach",
        "ddpg_her_fetchreach_without",
        "sac_her_fetchpush",
        "sac_her_fetchpickandplace",
    ),
}
"""The experiments whose scores other pages of the guide show."""
LEFT_OUT = {"sac_her_fetchpush": "data.buffer.transform.skip_reached"}
"""A setting of an experiment that Stable-Baselines3 does not have. Its runs leave it out, and its scores say so."""
SEEDS = (0, 1, 2, 3, 4)
_log = logging.getLogger(__name__)


def run(name: str, seeds: Iterable[int], root: Path = PROJECT) -> None:
    """Record a run with each seed."""
    for seed in seeds:
        path = log_path(name, seed, root)
        log = run_logs.record(path, run_logs.code_commit(root), root)
        log.write(path)
        _log.info("%s: score %s", path.relative_to(root), log.last)


def check(name: str, seeds: Iterable[int], root: Path = PROJECT) -> bool:
    """Train again with each seed, and return True if all runs agree with their logs."""
    logs = {log.seed: log for log in read_logs(name, root)}
    missing = [str(seed) for seed in seeds if seed not in logs]
    if missing:
        raise ResultsError(f"--seeds must have logs of {name}, got {', '.join(missing)}. Record them without --check.")
    is_exact, all_agree = run_logs.is_repeatable(run_logs.composed(name, root)), True
    for seed in seeds:
        sentence, agrees = run_logs.differences(logs, run_logs.record(log_path(name, seed, root), "", root), is_exact)
        _log.info("%s, seed %d: %s", name, seed, sentence)
        all_agree &= agrees
    return all_agree


def recorded(root: Path = PROJECT) -> list[str]:
    """Return the sorted names of all experiments with a log."""
    return sorted({path.parent.name for path in (root / "examples" / "results").glob("*/seed_*.csv")})


def described(root: Path = PROJECT) -> dict[str, str]:
    """Return the description of each experiment."""
    return dict(yaml.safe_load((root / "examples" / "results" / "experiments.yaml").read_text()))


def experiments_table(names: Iterable[str], root: Path = PROJECT) -> str:
    """Return the table of these experiments and variants."""
    heads = ["`experiment=`", "description", "score", "seeds", "frames", "processor time"]
    entries, rows = {**described(root), **descriptions(root)}, []
    for name in names:
        logs = read_logs(name, root)
        cells = ["no log", "", frames(name, root), ""]
        if logs:
            cells = [score(logs), seeds_of(logs), frames(name, root), duration(logs)]
        label = name if run_logs.is_experiment(name, root) else " ".join(run_logs.arguments_of(name, root))
        rows.append([f"`{label}`", entries[name], *cells])
    return markdown(heads, rows)


def comparison_table(root: Path = PROJECT) -> str:
    """Return the table of the logs beside Stable-Baselines3 and published scores."""
    published = yaml.safe_load((root / "examples" / "results" / "published.yaml").read_text())
    heads = (
        *("experiment", "score of each seed", "mean, deviation"),
        *("Stable-Baselines3, run here", "difference", "ours is", "published"),
    )
    rows = []
    for name in recorded(root):
        logs, peers = read_logs(name, root), read_logs(name, root, peer=True)
        if logs and (peers or name in published):
            ours, theirs = [log.last.mean for log in logs], [log.last.mean for log in peers]
            each = ", ".join(map(short, ours))
            compared = [""] * 3
            if peers:
                runs = f"{numbered(peers)}, without `{LEFT_OUT[name]}`" if name in LEFT_OUT else numbered(peers)
                compared = [f"{spread(theirs)} ({runs})", *difference(ours, theirs)]
            rows.append([f"`{name}`", each, spread(ours), *compared, published.get(name, "")])
    return markdown(heads, rows)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[str, str]:
    """Return the difference of the means of two groups of seeds with its 95 % bootstrap interval, and a word for it."""
    mean = np.mean(ours) - np.mean(theirs)
    if min(len(ours), len(theirs)) < 3:
        return f"{mean:.3g}", "not known: too few seeds"
    generator = np.random.default_rng(0)
    samples = [generator.choice(scores, (10_000, len(scores))).mean(1) for scores in (ours, theirs)]
    low, high = np.quantile(samples[0] - samples[1], (0.025, 0.975))
    word = "ahead" if low > 0 else "behind" if high < 0 else "equal" if low == high else "not clearly different"
    return f"{mean:.3g} ({low:.3g} to {high:.3g})", word


def comparison_sentence(root: Path = PROJECT) -> str:
    """Return a sentence for the README: in which experiments ours is ahead of and behind Stable-Baselines3.

    It covers the rows with the same settings and at least three seeds on each side.
    """
    names: dict[str, list[str]] = {"ahead": [], "behind": []}
    others = 0
    for name in recorded(root):
        if name in LEFT_OUT:
            continue
        ours, theirs = ([log.last.mean for log in read_logs(name, root, peer)] for peer in (False, True))
        if min(len(ours), len(theirs)) < 3:
            continue
        word = difference(ours, theirs)[1]
        if word in names:
            names[word].append(f"`{name}`")
        else:
            others += 1
    link = "[Stable-Baselines3 with the same settings](examples/guide/experiments.md#comparison-with-stable-baselines3)"
    ahead, behind = (" and ".join(group) or "none" for group in names.values())
    return f"Our mean is ahead of {link} in {ahead}, behind in {behind}, and not clearly different in {others} others."


def picture(output: Path, root: Path = PROJECT) -> Figure:
    """Draw the curves of all results: one panel per experiment, one line per seed, stars for the ends."""
    from matplotlib.ticker import EngFormatter

    published = yaml.safe_load((root / "examples" / "results" / "published.yaml").read_text())
    names = recorded(root)
    with saved_panels(output, len(names), (2.7, 1.9), columns=3) as (figure, grid):
        has_peer = has_published = False
        for axes, name in zip(grid, names, strict=True):
            logs, peers = read_logs(name, root), read_logs(name, root, peer=True)
            for log in logs:
                points = [(row.frames, row.score) for row in log.curve]
                axes.plot(*zip(*points, strict=True), color="C0", alpha=0.7, linewidth=1.2)
            for color, stars in (("C0", logs), ("C1", peers)):
                if stars:
                    at = [log.frames for log in stars], [log.last.mean for log in stars]
                    axes.plot(*at, "*", color=color, clip_on=False, zorder=3)
            has_peer |= bool(peers)
            level = re.match(r"(?:about )?(-?\d[\d.]*)", published.get(name, ""))
            if level:
                axes.axhline(float(level[1]), color="C2", linestyle=":")
                has_published = True
            axes.set_title(name, fontsize=9)
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


def with_comparison(page: str, sentence: str) -> str:
    """Return the README with the sentence about Stable-Baselines3 before the mark of the table."""
    return re.sub(
        r"Our mean is ahead of \[Stable-Baselines3.*(?= <!-- results\.py: experiments -->)", lambda _: sentence, page
    )


def with_score(text: str, name: str, root: Path = PROJECT) -> str:
    """Return the YAML of an experiment with its score in a line of its head."""
    logs, line = read_logs(name, root), "# Score: no log.\n"
    if logs:
        run = f"last.ckpt, {EPISODES} unseen episodes, {numbered(logs)}"
        line = f"# Score ({run}): {score(logs)}; {frames(name, root)} frames, {duration(logs)} each.\n"
    text = re.sub(r"^# Score[: ].*\n", "", text, flags=re.MULTILINE)
    begin = f"# torchrl-lightning-train experiment={name}\n"
    return text.replace(begin, begin + line)


def written(root: Path = PROJECT) -> dict[Path, str]:
    """Return the texts of all pages and YAML files that contain scores."""
    readme, guide = root / "README.md", root / GUIDE.relative_to(PROJECT)
    tables = {"experiments": experiments_table(described(root), root), "comparison": comparison_table(root)}
    page = guide.read_text()
    for mark, table in {**tables, "replay": replay_table(root)}.items():
        page = with_table(page, table, f"results.py: {mark}")
    masks = guide.with_name("environments.md")
    front = with_comparison(readme.read_text(), comparison_sentence(root))
    front = with_table(front, experiments_table(IN_README, root), "results.py: experiments")
    scores = {
        guide.with_name(other): with_table(
            guide.with_name(other).read_text(), experiments_table(names, root), "results.py: experiments"
        )
        for other, names in IN_GUIDE.items()
    }
    heads = {path: with_score(path.read_text(), path.stem, root) for path in (root / "conf/experiment").glob("*.yaml")}
    masked = {masks: with_table(masks.read_text(), mask_table(root), "results.py: masks")}
    return {readme: front, guide: page, **scores, **masked, **heads}


def asked(
    description: str | None, seeds: Sequence[int], *, has_table: bool = True, has_check: bool = False
) -> argparse.Namespace:
    """Parse the command line: ``run NAME``, with the default ``seeds``, or ``table`` if the script has a table."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("name")
    running.add_argument("--seeds", type=int, nargs="+", default=seeds)
    if has_check:
        running.add_argument("--check", action="store_true", help="train again, and compare with the stored logs")
    if has_table:
        commands.add_parser("table")
    return parser.parse_args()


def main() -> None:
    """Run or check an experiment, or write the scores."""
    arguments = asked(__doc__, SEEDS, has_check=True)
    if arguments.command == "table":
        for path, text in written().items():
            path.write_text(text)
    elif not arguments.check:
        run(arguments.name, arguments.seeds)
    elif not check(arguments.name, arguments.seeds):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
