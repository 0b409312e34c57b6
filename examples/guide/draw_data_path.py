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

WIDTH, HEIGHT = 2.25, 1.15
STEPS, STORED, DERIVED, LEARNT = "#d6eaf8", "#d9f0e6", "#f0f0f0", "#fbe6cf"  # pale blue, green, grey and orange
FEEDBACK = "#a34700"
BOXES = {  # left, bottom, title, description, color
    "environments": (0.1, 2.6, "environments", "N side by side,\nby one recipe", STEPS),
    "collector": (0.1, 0.9, "collector", "the policy acts, one\nstep of all N at a time", STEPS),
    "rollout": (2.85, 2.6, "rollout  [T, N]", "RolloutStorage:\nreplaced as a whole", STORED),
    "rings": (2.85, 0.9, "rings of cells", "RingStorage: a ring\nfor each environment", STORED),
    "estimator": (5.6, 2.6, "estimator", "GAE, V-trace, returns:\none scan over time", DERIVED),
    "sampler": (5.6, 0.9, "sampler", "uniform, by priority,\nwindows, the newest", DERIVED),
    "batch": (8.35, 2.6, "batch  [B, ...]", "a TensorDict, drawn\nwhen it is requested", STORED),
    "module": (8.35, 0.9, "LightningModule", "loss, gradients,\nthe next weights", LEARNT),
}
ARROWS = [  # points of each arrow
    [(1.225, 2.6), (1.225, 2.05)],  # environments to collector
    [(2.35, 1.9), (2.85, 2.75)],  # collector to rollout
    [(2.35, 1.475), (2.85, 1.475)],  # collector to rings
    [(5.1, 3.175), (5.6, 3.175)],  # rollout to estimator
    [(7.85, 3.175), (8.35, 3.175)],  # estimator to batch
    [(5.1, 1.475), (5.6, 1.475)],  # rings to sampler
    [(7.85, 1.9), (8.35, 2.75)],  # sampler to batch
    [(9.475, 2.6), (9.475, 2.05)],  # batch to module
]
LINES = [  # points of a feedback arrow, its label, position of the label
    ([(9.475, 0.9), (9.475, 0.5), (1.225, 0.5), (1.225, 0.9)], "weights of the last update", (2.85, 0.17)),
    ([(8.35, 1.2), (7.85, 1.2)], "priorities, states", (6.95, 0.62)),
]
NOTES = [("on-policy", (3.975, 3.86)), ("replay", (3.975, 2.16))]
COLORS = "blue: steps, green: stored, grey: computed, orange: learnt"


def arrow(axes: Axes, points: list[tuple[float, float]], color: str) -> None:
    for start, end in pairwise(points[:-1]):
        axes.plot(*zip(start, end, strict=True), color=color, linewidth=1, solid_capstyle="round")
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", points[-1], points[-2], arrowprops=style)


def picture() -> Figure:
    figure = Figure(figsize=(7.6, 2.9), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 10.7), ylim=(0, 4.1))
    axes.axis("off")
    for left, bottom, title, description, color in BOXES.values():
        shape = "round,pad=0,rounding_size=0.1"
        axes.add_patch(FancyBboxPatch((left, bottom), WIDTH, HEIGHT, shape, facecolor=color, edgecolor="#666666"))
        middle = {"ha": "center", "va": "center"}
        axes.text(left + WIDTH / 2, bottom + HEIGHT - 0.25, title, size=9, weight="bold", **middle)
        for down, line in enumerate(description.splitlines()):
            axes.text(left + WIDTH / 2, bottom + 0.54 - 0.27 * down, line, size=8, **middle)
    for points in ARROWS:
        arrow(axes, points, "#444444")
    for points, carries, place in LINES:
        arrow(axes, points, FEEDBACK)
        axes.text(*place, carries, size=8, color=FEEDBACK, ha="center")
    for words, place in NOTES:
        axes.text(*place, words, size=8, style="italic", color="#555555", ha="center")
    axes.text(10.6, 0.17, COLORS, size=8, color="#555555", ha="right")
    return figure


def save(output: Path) -> None:
    # Store text as text for a small, sharp file; a fixed salt and no date give identical files on each run.
    fonts = ["DejaVu Sans", "Verdana", "Arial", "Helvetica"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "data path", "font.sans-serif": fonts}):
        picture().savefig(output, **({"metadata": {"Date": None}} if output.suffix == ".svg" else {"dpi": 110}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the picture; its suffix says which format")
    output = parser.parse_args().output
    save(output)
    print(f"drawn: {output}")
