"""Draw the path of a step from the environment to the update.

Run: python examples/guide/draw_data_path.py examples/guide/data_path.svg
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HEIGHT = 1.2
STEPS, STORED, DERIVED, LEARNT = "#dbe9f6", "#e2f0d9", "#f3f3f3", "#fde9d0"
BOXES = {  # left, bottom, width, title, description, color
    "environments": (0.1, 2.2, 2.2, "environments", "N side by side,\nby one recipe", STEPS),
    "collector": (3.0, 2.2, 2.4, "collector", "the policy acts, one\nstep of all N at a time", STEPS),
    "rollout": (6.1, 3.5, 2.6, "rollout  [T, N]", "RolloutStorage:\nreplaced as a whole", STORED),
    "rings": (6.1, 0.9, 2.6, "rings of cells", "RingStorage: a ring\nfor each environment", STORED),
    "estimator": (9.4, 3.5, 2.6, "estimator", "GAE, V-trace, returns:\none scan over time", DERIVED),
    "sampler": (9.4, 0.9, 2.6, "sampler", "uniform, by priority,\nwindows, the newest", DERIVED),
    "batch": (12.7, 2.2, 2.3, "batch  [B, ...]", "a TensorDict, drawn\nwhen it is asked for", STORED),
    "module": (15.6, 2.2, 2.7, "LightningModule", "loss, gradients,\nthe next weights", LEARNT),
}
ARROWS = [
    *(("environments", "collector"), ("collector", "rollout"), ("collector", "rings"), ("rollout", "estimator")),
    *(("rings", "sampler"), ("estimator", "batch"), ("sampler", "batch"), ("batch", "module")),
]
LINES = [  # points of a feedback arrow, its label, position of the label
    ([(17.0, 3.4), (17.0, 5.0), (4.2, 5.0), (4.2, 3.4)], "weights of the last update", (10.7, 5.12)),
    ([(17.0, 2.2), (17.0, 0.45), (10.7, 0.45), (10.7, 0.9)], "priorities, rewritten states", (14.0, 0.14)),
]
NOTES = [("on-policy", (7.4, 4.8)), ("replay", (7.4, 2.2))]


def arrow(axes: Axes, points: list[tuple[float, float]], color: str) -> None:
    for start, end in pairwise(points[:-1]):
        axes.plot(*zip(start, end, strict=True), color=color, linewidth=1, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", points[-1], points[-2], arrowprops=style)


def picture() -> Figure:
    figure = Figure(figsize=(11, 3.35), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 18.4), ylim=(0, 5.5))
    axes.axis("off")
    for left, bottom, width, title, does, color in BOXES.values():
        shape = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((left, bottom), width, HEIGHT, shape, facecolor=color, edgecolor="#666666"))
        middle = {"ha": "center", "va": "center"}
        axes.text(left + width / 2, bottom + HEIGHT - 0.27, title, size=9, weight="bold", **middle)
        for down, line in enumerate(does.splitlines()):
            axes.text(left + width / 2, bottom + 0.54 - 0.25 * down, line, size=7.5, **middle)
    for start, end in ARROWS:
        (left, bottom, width, *_), (to, level, *_) = BOXES[start], BOXES[end]
        arrow(axes, [(left + width, bottom + HEIGHT / 2), (to, level + HEIGHT / 2)], "#444444")
    for points, carries, place in LINES:
        arrow(axes, points, "#b5651d")
        axes.text(*place, carries, size=7.5, color="#b5651d", ha="center")
    for words, place in NOTES:
        axes.text(*place, words, size=8, style="italic", color="#555555", ha="center")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the picture; its suffix says which format")
    output = parser.parse_args().output
    # Store text as text for a small, sharp file; a fixed salt and no date give identical files on each run.
    fonts = ["DejaVu Sans", "Verdana", "Arial", "Helvetica"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "data path", "font.sans-serif": fonts}):
        picture().savefig(output, **({"metadata": {"Date": None}} if output.suffix == ".svg" else {"dpi": 110}))
    print(f"drawn: {output}")
