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
    content = summary.content
    if content.kind == "demonstrations":
        number = 0 if summary.episodes is None else len(summary.episodes)
        return f"{content.name}: {number} demonstrations, {content.count:,} steps, {format_bytes(_bytes(summary))}"
    full = f"{content.count / content.capacity:.0%}" if content.capacity else "0%"
    newest = "" if content.looked_at == content.count else f"; below, the newest {content.looked_at:,}"
    return (
        f"{content.name}: {content.kind}, {content.count:,} of {content.capacity:,} cells ({full}), "
        f"{content.num_envs} environment{'s' * (content.num_envs > 1)}, {format_bytes(_bytes(summary))}{newest}"
    )


def _bytes(summary: Summary) -> int:
    return sum(entry.bytes for entry in summary.entries)


def entry_rows(summary: Summary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of entries."""
    heads = ("entry", "shape", "dtype", "bytes", "least", "mean", "std", "most")
    rows = [
        (
            *(entry.name, _shape(entry), entry.dtype, format_bytes(entry.bytes)),
            *(f"{number:.4g}" for number in (entry.low, entry.mean, entry.std, entry.high)),
        )
        for entry in summary.entries
    ]
    return heads, rows


def _shape(entry: Entry) -> str:
    return "x".join(map(str, entry.shape)) or "-"


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Return labels and descriptions of the episodes, ages, priorities and samples."""
    found = [] if summary.episodes is None else list(_episode_facts(summary.episodes))
    if summary.ages is not None:
        ages = summary.ages
        found.append(("age", f"0 to {ages.oldest:,} steps of an environment; mean {ages.mean:.4g}"))
        found.append(("age of what is drawn", f"mean {ages.drawn:.4g}"))
    if summary.priorities is not None:
        held = summary.priorities
        found.append(("priorities", f"{held.known:,} steps; the largest holds {held.largest:.2%} of the mass"))
        found.append(("half of the mass", f"in {held.half:,} steps; as {held.effective:,.0f} equal ones would repeat"))
    if summary.draws is not None:
        draws = summary.draws
        never = 1 - int((draws.counts > 0).sum()) / max(summary.content.count, 1)
        told = f"{draws.number:,} steps counted, one batch in {EVERY}; mean age {draws.mean_age:.4g}"
        found.append(("drawn in this run", told))
        found.append(("of what is stored", f"{max(never, 0):.0%} not in those batches; one step {draws.most:,} times"))
    return found


def _episode_facts(episodes: Episodes) -> Iterator[tuple[str, str]]:
    ends = np.bincount(episodes.end, minlength=len(ENDS))
    said = ", ".join(f"{count:,} {name}" for name, count in zip(ENDS, ends, strict=True) if count)
    yield "episodes", f"{len(episodes):,}: {said}" if said else "none"
    whole = episodes.whole
    if whole.any():
        yield "lengths", f"{_spread(episodes.length[whole])} over {int(whole.sum()):,} whole ones"
        yield "returns", _spread(episodes.returned[whole])


def _spread(values: NDArray[Any]) -> str:
    with np.errstate(all="ignore"):  # returns may be infinite
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        return f"{low:.4g} to {high:.4g}; median {middle:.4g}, mean {values.mean():.4g}"


def tables(summary: Summary) -> RenderableType:
    """Build the tables of one buffer."""
    heads, rows = entry_rows(summary)
    entries = Table(*heads, title=Text(title_of(summary)), title_justify="left")
    for column in entries.columns[3:]:
        column.justify = "right"
    for row in rows:
        entries.add_row(*map(Text, row))
    known = Table(show_header=False)
    for name, told in facts(summary):
        known.add_row(Text(name), Text(told))
    wrong = [Text(f"! {finding}", style="bold red") for finding in findings(summary)]
    return Group(entries, *([known] if known.row_count else []), *(wrong or [Text("nothing looks wrong")]))
