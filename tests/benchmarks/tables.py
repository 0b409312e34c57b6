"""Write scores as text, and tables into the pages of the guide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.run_logs import PROJECT, RunLog, composed
from torchrl_lightning.cli.plot import bootstrap_interval


def middle_half(values: Sequence[float]) -> str:
    """Return the interquartile mean of the scores of all seeds with its interval."""
    ends = np.ravel(bootstrap_interval(np.array(values)[:, None]))
    return "{} ({} to {})".format(*(f"{end:.3g}" if abs(end) < 1000 else f"{end:.0f}" for end in ends))


def short(score: float) -> str:
    """Return a score with few digits."""
    return f"{score:.3g}" if abs(score) < 100 else f"{score:.0f}"


def spread(scores: Sequence[float]) -> str:
    """Return mean and deviation of the scores of all seeds, or the score of a single seed."""
    if len(scores) == 1:
        return f"{scores[0]:.4g}"
    deviation = np.std(scores, ddof=1) if np.ptp(scores) else 0.0  # np.std of equal scores may be a rounding error
    return f"{np.mean(scores):.4g} +- {deviation:.2g}"


def duration(logs: Sequence[RunLog]) -> str:
    """Return the mean processor time of a seed."""
    mean = float(np.mean([log.minutes for log in logs]))
    return f"{60 * mean:.0f} s" if mean < 2 else f"{mean:.3g} min"


@cache
def frames(name: str, root: Path = PROJECT) -> str:
    """Return ``data.total_frames``; with demonstrations, the last rollout of a run may exceed it."""
    return f"{composed(name, root).data.total_frames:,}"


def seeds_of(logs: Sequence[RunLog]) -> str:
    """Return the seeds, as a range if they are consecutive."""
    seeds = [log.seed for log in logs]
    is_range = len(seeds) > 2 and seeds == [*range(seeds[0], seeds[-1] + 1)]
    return f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds))


def numbered(logs: Sequence[RunLog]) -> str:
    """Return the seeds after the word seed."""
    return f"seed{'s' * (len(logs) > 1)} {seeds_of(logs)}"


def score(logs: Sequence[RunLog]) -> str:
    """Return mean and deviation of the scores of the last checkpoints, and the mean success rate if there is one."""
    rates = [log.success for log in logs if log.success is not None]
    success = f"; success rate {np.mean(rates):.2f}" if rates else ""
    return spread([log.last.mean for log in logs]) + success


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its empty columns, or an empty text without rows."""
    columns = [[head, "---", *cells] for head, *cells in zip(heads, *rows, strict=True) if any(cells)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in zip(*columns, strict=True))


def with_table(page: str, table: str, mark: str) -> str:
    """Return a page with the table after the line that ends with the mark ``<!-- results.py: ... -->``."""
    before, rest = page.split(f"<!-- {mark} -->\n")
    rest = re.sub(r"\A\n(?:\|.*\n)+", "", rest)
    return f"{before}<!-- {mark} -->\n{table and chr(10)}{table}{rest}"
