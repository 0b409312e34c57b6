"""Write the contents of buffers as one HTML page without scripts, network access or other files."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core import tree
from torchrl_lightning._core.files import replaced_files
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.inspection.buffer_views import BufferView
from torchrl_lightning.inspection.diagnostics import findings
from torchrl_lightning.inspection.episode_gallery import ENDS, Episodes
from torchrl_lightning.inspection.leaves import Ints, Leaf
from torchrl_lightning.inspection.pictures import COLOURS, DARK_COLOURS, bars, histogram, lines
from torchrl_lightning.inspection.sample_counts import AGE_BINS
from torchrl_lightning.inspection.summary import BARS, MAX_COLUMNS, Summary
from torchrl_lightning.inspection.tables import description_of, entry_rows, facts

EPISODES_PER_GROUP = 6  # number of episodes in each group: newest, highest returns, lowest returns
FRAMES = 12  # images per episode
STEPS = 2000  # plotted steps per episode
MIN_IMAGE_SIDE = 16  # smallest side of an image, in pixels
FLAGS = {"done", "dones", "terminated", "truncated", "is_init", "index"}


def _css_variables(colours: Sequence[str], text: str, page: str, rule: str, warning: str) -> str:
    colour_variables = "".join(f" --colour-{number}: {colour};" for number, colour in enumerate(colours))
    return f".inspection {{ --text: {text}; --page: {page}; --rule: {rule}; --warning: {warning};{colour_variables} }}"


STYLE = f"""
{_css_variables(COLOURS, "#222", "#fff", "#ddd", "#a00")}
@media (prefers-color-scheme: dark) {{ {_css_variables(DARK_COLOURS, "#ddd", "#181818", "#444", "#f77")} }}
.inspection {{ font: 14px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); }}
.inspection {{ max-width: 80em; padding: 0 1em; }}
.inspection h1 {{ font-size: 1.4em; }} .inspection h2 {{ font-size: 1.2em; }}
.inspection h1, .inspection summary {{ overflow-wrap: anywhere; }}
.inspection .table {{ overflow-x: auto; margin: 1em 0; }} .inspection table {{ border-collapse: collapse; }}
.inspection td, .inspection th {{ border-bottom: 1px solid var(--rule); padding: .2em .7em; text-align: left; }}
.inspection td {{ font-variant-numeric: tabular-nums; }}
.inspection .entries :is(td, th):nth-child(n+4) {{ text-align: right; white-space: nowrap; }}
.inspection .pictures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 1em; }}
.inspection details .pictures {{ margin: .3em 0 1em; }}
.inspection figure {{ display: grid; grid-template-columns: 4.5em minmax(0, 1fr); gap: 0 .4em; margin: 0; }}
.inspection figure {{ font-size: 11px; align-content: end; max-width: 360px; }}
.inspection figcaption {{ grid-column: 1 / -1; font-size: 12px; overflow-wrap: anywhere; margin-bottom: .3em; }}
.inspection svg {{ width: 100%; height: 80px; display: block; stroke-linejoin: round; }}
.inspection path {{ vector-effect: non-scaling-stroke; }}
.inspection svg {{ border-left: 1px solid var(--rule); border-bottom: 1px solid var(--rule); }}
.inspection :is(.x, .y) {{ display: flex; justify-content: space-between; line-height: 1; }}
.inspection .x {{ grid-column: 2; padding-top: .3em; }}
.inspection .y {{ flex-direction: column-reverse; text-align: right; }}
.inspection :is(.x, .y) span:nth-child(2) {{ opacity: .7; }}
.inspection img {{ width: 120px; image-rendering: pixelated; margin: 2px; }}
.inspection .warning {{ color: var(--warning); }} .inspection summary {{ cursor: pointer; }}
@media (max-width: 720px) {{ .inspection :is(td, th) {{ padding: .2em .3em; font-size: 11px; }} }}
"""


def write_page(summaries: Sequence[Summary], path: Path, unreadable: Sequence[str] = ()) -> None:
    """Write the page atomically.

    Args:
        summaries: One summary for each buffer.
        path: The file to write; an existing file is replaced.
        unreadable: A line for each unreadable buffer.

    Raises:
        OSError: The file cannot be written.
    """
    name = short_name(summaries[0]) if len(summaries) == 1 else f"{len(summaries)} buffers"
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title></head>"
    )
    # STYLE does not color the body's margin.
    body = "<body><style>@media (prefers-color-scheme: dark) { body { background: #181818; } }</style>"
    html = f"{head}{body}{fragment(summaries, unreadable)}</body></html>\n".encode()
    with replaced_files(path) as (file,):
        file.write(html)


def fragment(summaries: Sequence[Summary], unreadable: Sequence[str] = ()) -> str:
    """Return the page as an HTML fragment, for example for a notebook."""
    sections = "".join(section for summary in summaries for section in _sections(summary))
    sections += "".join(f'<p class="warning">{escape(line)}</p>' for line in unreadable)
    return f'<div class="inspection"><style>{STYLE}</style>{sections}</div>'


def _sections(summary: Summary) -> Iterator[str]:
    name, title = summary.view.name, short_name(summary)
    path = "" if title == name else f"<p>{escape(name)}</p>"
    yield f"<h1>{escape(title)}</h1>{path}<p>{escape(description_of(summary))}</p>"
    findings_html = "".join(f"<li>{escape(finding)}</li>" for finding in findings(summary))
    yield f'<ul class="warning">{findings_html}</ul>' if findings_html else "<p>Nothing looks wrong.</p>"
    heads, rows = entry_rows(summary)
    yield f'<div class="table"><table class="entries">{_row(heads, "th")}{"".join(map(_row, rows))}</table></div>'
    if fact_rows := facts(summary):
        yield f'<div class="table"><table>{"".join(map(_row, fact_rows))}</table></div>'
    yield f'<h2>Pictures</h2><div class="pictures">{"".join(_pictures(summary))}</div>'
    if episodes := "".join(_gallery(summary)):
        yield f"<h2>Episodes: the newest, the best, the worst</h2>{episodes}"


def short_name(summary: Summary) -> str:
    """Return the name of a buffer without the folders of its file."""
    return summary.view.name.rstrip("/").rpartition("/")[2]


def _row(cells: Sequence[str], kind: str = "td") -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _pictures(summary: Summary) -> Iterator[str]:
    episodes, ages, priorities = summary.episodes, summary.ages, summary.priorities
    if episodes is not None and episodes.is_complete.any():
        yield histogram(
            episodes.episode_return[episodes.is_complete], "returns of complete episodes", x="return", y="episodes"
        )
        yield histogram(episodes.length[episodes.is_complete], "lengths of complete episodes", x="steps", y="episodes")
    if ages is not None:
        title = "ages: stored (wide), sampled (narrow)"
        yield bars(ages.stored_bars, 0, ages.oldest, title, ages.drawn_bars, x="age in steps", y="share")
    if (draws := summary.draws) is not None:
        oldest = int(np.flatnonzero(draws.ages)[-1]) + 1
        bar_heights = np.add.reduceat(draws.ages[:oldest], np.arange(0, oldest, -(-oldest // BARS)))
        highest = draws.length * oldest / AGE_BINS
        yield bars(bar_heights.tolist(), 0, highest, "ages when sampled in this run", x="age in steps", y="samples")
        yield histogram(draws.counts[draws.counts > 0], "number of samples of each sampled step", x="samples")
    if priorities is not None:
        title = "priorities: probability of the steps, largest first"
        yield bars(priorities.shares, 0, priorities.num_cells, title, x="steps", y="share")
    for entry in summary.entries:
        if 0 < entry.size <= MAX_COLUMNS and is_plotted(entry.key):
            yield histogram(entry.sample.ravel(), entry.name)


def _gallery(summary: Summary) -> Iterator[str]:
    """Yield each selected episode as a collapsed section with frames and line plots."""
    view, episodes = summary.view, summary.episodes
    if episodes is None:
        return
    image = next((leaf for path, leaf in view.leaves.items() if path[0] != "next" and is_image(leaf)), None)
    for number in selected_episodes(episodes).tolist():
        env, begin, length = (int(column[number]) for column in (episodes.env, episodes.begin, episodes.length))
        caption = (
            f"{ENDS[episodes.end_kind[number]]} after {length:,} steps, return {episodes.episode_return[number]:.4g} "
            f"(environment {env}, from its step {begin:,}{'' if episodes.is_complete[number] else ', incomplete'})"
        )
        frames = "" if image is None else f"<div>{''.join(_frames(view, image, env, begin, length))}</div>"
        figures = ""
        for path, leaf in view.leaves.items():
            width = leaf[:1].numel()
            if is_plotted(path) and 0 < width <= len(COLOURS) and not leaf[:1].is_complex():
                rows = view.steps(leaf, env, begin, begin + min(length, STEPS))
                figures += lines(rows.reshape(-1, width).double().numpy(), printable(".".join(path)))
        figures = f'<div class="pictures">{figures}</div>'
        yield f"<details><summary>{escape(caption)}</summary>{frames}{figures}</details>"


def selected_episodes(episodes: Episodes) -> Ints:
    """Return the indices of the newest episodes, and of complete episodes with the highest and lowest returns."""
    complete = np.flatnonzero(episodes.is_complete)
    order = complete[np.argsort(episodes.episode_return[complete], kind="stable")]
    newest = np.arange(len(episodes))[::-1][:EPISODES_PER_GROUP]
    selected = [*newest.tolist(), *order[::-1][:EPISODES_PER_GROUP].tolist(), *order[:EPISODES_PER_GROUP].tolist()]
    return np.array([*dict.fromkeys(selected)], np.int64)


def is_image(leaf: Leaf) -> bool:
    """Return whether an entry is a uint8 image of at least 16 x 16 pixels."""
    shape = leaf[:1].shape[1:]
    return leaf[:1].dtype is torch.uint8 and sum(side >= MIN_IMAGE_SIDE for side in shape) >= 2


def _frames(view: BufferView, leaf: Leaf, env: int, begin: int, length: int) -> Iterator[str]:
    from matplotlib.image import imsave

    for step in np.unique(np.linspace(0, length - 1, min(FRAMES, length)).astype(np.int64)).tolist():
        with io.BytesIO() as file:
            image = pixels(view.steps(leaf, env, begin + step, begin + step + 1)[0])
            imsave(file, image, format="png", cmap="gray", vmin=0, vmax=255)
            data = base64.b64encode(file.getvalue()).decode()
        yield f'<img alt="step {step}" title="step {step}" src="data:image/png;base64,{data}">'


def pixels(image: Tensor) -> NDArray[np.uint8]:
    """Return a stack's newest image as ``[H, W, 3]`` or, without three channels, its last channel as ``[H, W]``."""
    while image.ndim > 3:
        image = image[-1]
    array: NDArray[np.uint8] = image.numpy()
    if array.ndim == 2:
        return array
    if array.shape[0] < array.shape[2]:
        array = np.moveaxis(array, 0, -1)
    return array if array.shape[2] == 3 else array[..., -1]


def is_plotted(path: tree.Path) -> bool:
    """Return whether to plot an entry; flags and next observations are skipped."""
    return (
        path[-1] not in FLAGS and "collector" not in path and (path[0] != "next" or path[-1] in ("reward", "rewards"))
    )
