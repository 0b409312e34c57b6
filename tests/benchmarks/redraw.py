"""Draw the pictures of the guide again from committed data: all, or the named ones.

    python tests/benchmarks/redraw.py [scores.png learning_curves.png ...]

``PICTURES`` maps each picture to its data and its drawing settings. A picture stores a digest of both in its metadata,
so that a test finds pictures that are older than their data. ``results.py`` writes the logs. The pictures of inspection
pages need Chromium and about a minute of training. ``cluster.svg`` is written by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import results
from benchmarks.curve_pictures import CURVES, Curves
from benchmarks.inspection_pictures import PAGES
from benchmarks.results import GUIDE, PROJECT, ResultsError
from torchrl_lightning._core.palette import PALETTE
from torchrl_lightning.plotting.style import add_legend, saved_panels

FOLDER = GUIDE.parent
SPEED = FOLDER / "speed.md"
KEY = "Source"  # of the metadata, for PNG and SVG
_log = logging.getLogger(__name__)


class Picture(Protocol):
    """A picture of the guide."""

    def source(self) -> bytes:
        """Return the data and the drawing settings."""

    def draw(self, output: Path) -> Any:
        """Draw the picture."""


@dataclass(frozen=True)
class Scores:
    """The curves of all results."""

    root: Path = PROJECT

    def source(self) -> bytes:
        """Return the logs and the published scores."""
        folder = self.root / "examples" / "results"
        return b"".join(path.read_bytes() for path in sorted([*folder.rglob("seed_*.csv"), folder / "published.yaml"]))

    def draw(self, output: Path) -> None:
        """Draw a panel for each experiment."""
        results.picture(output, self.root)


@dataclass(frozen=True)
class DataPath:
    """The path of a step from the environment to the update."""

    script: Path = FOLDER / "draw_data_path.py"

    def source(self) -> bytes:
        """Return the script, which contains all boxes and arrows."""
        return self.script.read_bytes()

    def draw(self, output: Path) -> None:
        """Draw boxes and arrows."""
        runpy.run_path(str(self.script))["save"](output)


@dataclass(frozen=True)
class Speed:
    """Bars of our speed divided by the speed of other libraries, from the first table of ``speed.md``."""

    columns: tuple[tuple[str, str], ...] = (
        ("as it ships", "Stable-Baselines3 as it ships"),
        ("lean", "Stable-Baselines3, tuned: without its Monitor and with torch's fused Adam"),
        ("SBX", "SBX, in JAX"),
    )
    page: Path = SPEED

    def ratios(self) -> dict[str, list[tuple[float, float, float]]]:
        """Return median, lowest and highest ratio of each run for each column."""
        head, _, *rows = [line for line in self.page.read_text().splitlines() if line.startswith("|")]
        names = [cell.strip() for cell in head.split("|")[1:-1]]
        ratios: dict[str, list[tuple[float, float, float]]] = {}
        task = ""
        for row in rows:
            name, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
            if len(cells) != len(names) - 1:
                break  # the next table
            same, _, change = name.partition(", ")
            task, name = (task, f"{task}, {change}") if same == "the same" else (name.partition(",")[0], name)
            by_name = dict(zip(names[1:], cells, strict=True))
            found = [re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", by_name[key]) for key, _ in self.columns]
            if None in found:
                break
            ratios[name] = [tuple(float(number) for number in match.groups()) for match in found if match]
        return ratios

    def source(self) -> bytes:
        """Return the numbers of the table and the columns."""
        return repr((self.columns, self.ratios())).encode()

    def draw(self, output: Path) -> None:
        """Draw a group of bars for each run, with the range of the repetitions."""
        ratios = self.ratios()
        thickness = 0.8 / len(self.columns)
        with saved_panels(output, 1, (6.4, 0.5 * len(ratios) + 0.6)) as (figure, (axes,)):
            for number in range(len(self.columns)):
                middle, low, high = zip(*(values[number] for values in ratios.values()), strict=True)
                spread = [
                    [m - a for m, a in zip(middle, low, strict=True)],
                    [b - m for m, b in zip(middle, high, strict=True)],
                ]
                at = [row + (number - 1) * thickness for row in range(len(ratios))]
                axes.barh(at, middle, thickness * 0.9, color=PALETTE[number], xerr=spread, ecolor="0.35", capsize=1.5)
            axes.axvline(1, color="black", linewidth=1)
            axes.set_yticks(range(len(ratios)), [name.replace(", ", ",\n", 1) for name in ratios])
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set(xlabel="Our frames per second of processor time, divided by the other's", xlim=(0, None))
            bars: dict[str, Mapping[str, Any]] = {
                label: {"color": PALETTE[number], "linewidth": 7} for number, (_, label) in enumerate(self.columns)
            }
            add_legend(figure, {**bars, "thin line: lowest to highest run": {"color": "0.35", "linewidth": 1}})


PICTURES: dict[str, Picture] = {
    "data_path.svg": DataPath(),
    "scores.png": Scores(),
    "speed.png": Speed(),
    **{name: Curves(panels) for name, panels in CURVES.items()},
    **PAGES,
}


def digest(picture: Picture) -> str:
    """Return a digest of the data and the drawing settings of a picture."""
    return hashlib.sha256(picture.source()).hexdigest()[:16]


def stamp(path: Path, text: str) -> None:
    """Store a digest in the metadata of a picture."""
    if path.suffix == ".svg":
        path.write_text(path.read_text().rstrip() + f"\n<!-- {KEY}: {text} -->\n")
        return
    from PIL import Image, PngImagePlugin

    with Image.open(path) as image:
        metadata = PngImagePlugin.PngInfo()
        metadata.add_text(KEY, text)
        # A palette of 256 colours would replace the rare colours of thin lines and small texts.
        image.convert("RGB").save(path, optimize=True, pnginfo=metadata)


def stamped(path: Path) -> str | None:
    """Return the digest in the metadata of a picture, or None."""
    if path.suffix == ".svg":
        found = re.search(rf"<!-- {KEY}: (\w+) -->", path.read_text())
        return None if found is None else found[1]
    from PIL import Image

    with Image.open(path) as image:
        return getattr(image, "text", {}).get(KEY)


def outdated(folder: Path = FOLDER, pictures: Mapping[str, Picture] = PICTURES) -> list[str]:
    """Return the names of missing pictures, and of pictures whose data or settings have changed since."""
    return [
        name
        for name, picture in pictures.items()
        if not (folder / name).is_file() or stamped(folder / name) != digest(picture)
    ]


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *PICTURES])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in parser.parse_args().names or PICTURES:
        path, picture = FOLDER / name, PICTURES[name]
        picture.draw(path)
        stamp(path, digest(picture))
        _log.info("drawn: %s", path.relative_to(PROJECT))


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
