"""What buffers hold as one page of HTML, which needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from torchrl_lightning.files import replaced_files
from torchrl_lightning.inspection.browser import browser, is_told
from torchrl_lightning.inspection.draws import PARTS
from torchrl_lightning.inspection.findings import findings
from torchrl_lightning.inspection.pictures import bars, histogram
from torchrl_lightning.inspection.summary import BARS, WIDE, Summary
from torchrl_lightning.inspection.tables import entry_rows, facts, title_of

STYLE = """
.inspection { font: 14px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 80em; padding: 0 1em; }
.inspection h1 { font-size: 1.4em; } .inspection h2 { font-size: 1.2em; }
.inspection table { border-collapse: collapse; margin: 1em 0; }
.inspection td, .inspection th { border-bottom: 1px solid #ddd; padding: .2em .7em; text-align: left; }
.inspection td { font-variant-numeric: tabular-nums; }
.inspection figure { display: inline-block; width: 240px; margin: .5em 1em .5em 0; vertical-align: top; }
.inspection figcaption { font-size: 12px; overflow-wrap: anywhere; }
.inspection svg { width: 100%; } .inspection svg text { font-size: 10px; fill: #555; }
.inspection img { width: 120px; image-rendering: pixelated; margin: 2px; }
.inspection .wrong { color: #a00; } .inspection summary { cursor: pointer; }
"""


def write_page(summaries: Sequence[Summary], path: Path, unreadable: Sequence[str] = ()) -> None:
    """Write the page, whole or not at all.

    Args:
        summaries: What was computed of each buffer.
        path: The file, which is replaced.
        unreadable: A line for each buffer that cannot be shown.

    Raises:
        OSError: It cannot be written.
    """
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>What the buffer holds</title></head>'
    whole = f"{head}<body>{fragment(summaries, unreadable)}</body></html>\n".encode()
    with replaced_files(path) as (file,):
        file.write(whole)


def fragment(summaries: Sequence[Summary], unreadable: Sequence[str] = ()) -> str:
    """Return the body of the page, as a notebook shows it."""
    parts = "".join(part for summary in summaries for part in _parts(summary))
    parts += "".join(f'<p class="wrong">{escape(line)}</p>' for line in unreadable)
    return f'<div class="inspection"><style>{STYLE}</style>{parts}</div>'


def _parts(summary: Summary) -> Iterator[str]:
    yield f"<h1>{escape(title_of(summary))}</h1>"
    wrong = findings(summary)
    yield (
        f'<ul class="wrong">{"".join(f"<li>{escape(each)}</li>" for each in wrong)}</ul>'
        if wrong
        else ("<p>Nothing looks wrong.</p>")
    )
    heads, rows = entry_rows(summary)
    yield _table([heads, *rows], head=True)
    if known := facts(summary):
        yield _table(known)
    yield from _pictures(summary)
    if episodes := "".join(browser(summary)):
        yield f"<h2>Episodes: the newest, the best, the worst</h2>{episodes}"


def _table(rows: Sequence[Sequence[str]], *, head: bool = False) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    return f"<table>{''.join(row(cells, 'th' if head and not n else 'td') for n, cells in enumerate(rows))}</table>"


def _pictures(summary: Summary) -> Iterator[str]:
    episodes, ages, priorities = summary.episodes, summary.ages, summary.priorities
    yield "<h2>Pictures</h2>"
    if episodes is not None and episodes.whole.any():
        yield histogram(episodes.returned[episodes.whole], "returns of whole episodes")
        yield histogram(episodes.length[episodes.whole], "their lengths")
    if ages is not None:
        title = "ages: stored (wide), drawn (narrow)"
        yield bars(ages.stored_bars, 0, ages.oldest, title, ages.drawn_bars)
    if (draws := summary.draws) is not None:
        oldest = int(np.flatnonzero(draws.ages)[-1]) + 1
        shown = np.add.reduceat(draws.ages[:oldest], np.arange(0, oldest, -(-oldest // BARS)))
        yield bars(shown.tolist(), 0, draws.length * oldest / PARTS, "ages when drawn in this run")
        yield histogram(draws.counts[draws.counts > 0], "how often each drawn step was")
    if priorities is not None:
        shares = np.diff((0.0, *priorities.curve)).tolist()
        yield bars(shares, 0, priorities.known, "priorities: shares of the mass, largest first")
    for entry in summary.entries:
        if 0 < entry.size <= WIDE and is_told(entry.key):
            yield histogram(entry.sample.ravel(), entry.name)
