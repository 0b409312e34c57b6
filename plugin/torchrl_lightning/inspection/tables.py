"""Build terminal tables from the summary of a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchrl_lightning._core.memory import format_bytes
from torchrl_lightning.inspection.diagnostics import findings
from torchrl_lightning.inspection.episode_gallery import ENDS, Episodes
from torchrl_lightning.inspection.sample_counts import EVERY
from torchrl_lightning.inspection.summary import Entry, Summary


def title_of(summary: Summary) -> str:
    """Return one line with the name, kind and fill level of a buffer."""
    return f"{summary.view.name}: {description_of(summary)}"


def description_of(summary: Summary) -> str:
    """Return the kind and fill level of a buffer."""
    view = summary.view
    if view.kind == "demonstrations":
        number = 0 if summary.episodes is None else len(summary.episodes)
        return f"{number} demonstrations, {view.count:,} steps, {format_bytes(_bytes(summary))}"
    full = f"{view.count / view.capacity:.0%}" if view.capacity else "0%"
    newest = "" if view.num_inspected == view.count else f"; below, only the newest {view.num_inspected:,}"
    return (
        f"{view.kind}, {view.count:,} of {view.capacity:,} cells ({full}), "
        f"{view.num_envs} environment{'s' * (view.num_envs > 1)}, {format_bytes(_bytes(summary))}{newest}"
    )


def _bytes(summary: Summary) -> int:
    return sum(entry.bytes for entry in summary.entries)


def entry_rows(summary: Summary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of entries."""
    header = ("entry", "shape", "dtype", "bytes", "least", "mean", "std", "most")
    rows = [
        (
            *(entry.name, _shape(entry), entry.dtype, format_bytes(entry.bytes)),
            *(f"{number:.4g}" for number in (entry.low, entry.mean, entry.std, entry.high)),
        )
        for entry in summary.entries
    ]
    return header, rows


def _shape(entry: Entry) -> str:
    return "x".join(map(str, entry.shape)) or "-"


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Return labels and descriptions of the episodes, ages, priorities and samples."""
    lines = [] if summary.episodes is None else list(_episode_facts(summary.episodes))
    if summary.ages is not None:
        ages = summary.ages
        lines.append(("age", f"0 to {ages.oldest:,} steps of an environment; mean {ages.mean:.4g}"))
        lines.append(("age of sampled steps", f"mean {ages.drawn:.4g}"))
    if summary.priorities is not None:
        priorities = summary.priorities
        lines.append(
            (
                "priorities",
                f"{priorities.num_cells:,} steps; the largest has {priorities.largest:.2%} of the sampling probability",
            )
        )
        lines.append(
            (
                "half of the probability",
                f"in {priorities.half:,} steps; effective sample size {priorities.effective:,.0f}",
            )
        )
    if summary.draws is not None:
        draws = summary.draws
        undrawn_share = 1 - int((draws.counts > 0).sum()) / max(summary.view.count, 1)
        counted = f"{draws.num_samples:,} steps counted, one batch in {EVERY}; mean age {draws.mean_age:.4g}"
        lines.append(("sampled in this run", counted))
        lines.append(
            ("of the stored steps", f"{max(undrawn_share, 0):.0%} not in these batches; one step {draws.most:,} times")
        )
    return lines


def _episode_facts(episodes: Episodes) -> Iterator[tuple[str, str]]:
    ends = np.bincount(episodes.end_kind, minlength=len(ENDS))
    end_counts = ", ".join(f"{count:,} {name}" for name, count in zip(ENDS, ends, strict=True) if count)
    yield "episodes", f"{len(episodes):,}: {end_counts}" if end_counts else "none"
    complete = episodes.is_complete
    if complete.any():
        yield "lengths", f"{_spread(episodes.length[complete])} over {int(complete.sum()):,} complete ones"
        yield "returns", _spread(episodes.episode_return[complete])


def _spread(values: NDArray[Any]) -> str:
    with np.errstate(all="ignore"):  # returns may be infinite
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        return f"{low:.4g} to {high:.4g}; median {middle:.4g}, mean {values.mean():.4g}"


def tables(summary: Summary) -> RenderableType:
    """Build the tables of one buffer."""
    header, rows = entry_rows(summary)
    entries = Table(*header, title=Text(title_of(summary)), title_justify="left")
    for column in entries.columns[3:]:
        column.justify = "right"
    for row in rows:
        entries.add_row(*map(Text, row))
    fact_table = Table(show_header=False)
    for name, text in facts(summary):
        fact_table.add_row(Text(name), Text(text))
    warnings = [Text(f"! {finding}", style="bold red") for finding in findings(summary)]
    return Group(entries, *([fact_table] if fact_table.row_count else []), *(warnings or [Text("nothing looks wrong")]))
