"""What is in a buffer in numbers: computed in pieces, so that nothing is loaded as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning.fitting import Fault
from torchrl_lightning.inspection.content import Content, Leaf, Piece
from torchrl_lightning.inspection.draws import Draws
from torchrl_lightning.inspection.episodes import Episodes, episodes_in
from torchrl_lightning.moments import Moments
from torchrl_lightning.untrusted import printable

MOST = 200_000_000  # cells that are looked at
SAMPLED = 4096  # rows of an entry that pictures and quantiles are made of
WIDE = 64  # numbers of a row, above which it counts as an image
BARS = 32
STEP = 1 << 20  # priorities that are read at a time
VALUES = 64  # of a discrete action


@dataclass(frozen=True)
class Entry:
    """One entry of the steps.

    Attributes:
        key: Its key.
        shape: Of one step.
        dtype: Of its numbers.
        bytes: Of all filled cells.
        low: The least finite number.
        high: The largest.
        mean: Of the finite ones.
        std: Their standard deviation.
        nans: How many numbers are NaN, or infinite.
        constant: How many numbers of a row are the same in all steps.
        size: Numbers of a row.
        sample: Some rows ``[n, size]``, one alone of what is wide, evenly spread over time.
        counts: How often each integer from ``low`` on is there, where there are few.
    """

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    low: float
    high: float
    mean: float
    std: float
    nans: int
    constant: int
    size: int
    sample: NDArray[np.float64] = field(repr=False)
    counts: tuple[int, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The key as one printable word."""
        return printable(".".join(self.key))


@dataclass(frozen=True)
class Ages:
    """How long ago steps were written, in steps of their environment, and how old what is drawn is.

    Attributes:
        oldest: The age of the oldest step.
        mean: Of what is stored.
        drawn: Of what is drawn: by priority, or as what is stored.
        stored_bars: The share of the steps in each of as many equal spans of age.
        drawn_bars: The same of what is drawn.
    """

    oldest: int
    mean: float
    drawn: float
    stored_bars: tuple[float, ...] = field(repr=False)
    drawn_bars: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Priorities:
    """How unevenly steps are drawn.

    Attributes:
        known: Cells that can be drawn.
        largest: The largest share that one cell has.
        half: The least number of cells that together are drawn half of the time.
        effective: How many equally likely cells would repeat as often.
        curve: Of the shares, the largest first: what the first 1/32, 2/32, ... of the cells add up to.
    """

    known: int
    largest: float
    half: int
    effective: float
    curve: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Summary:
    """All of one buffer."""

    content: Content
    entries: tuple[Entry, ...]
    episodes: Episodes | None
    ages: Ages | None
    priorities: Priorities | None
    draws: Draws | None = None

    def entry(self, *names: str) -> Entry | None:
        """Return the entry of one of these names, as :meth:`Content.find` finds it."""
        path = self.content.find(*names)
        return next((entry for entry in self.entries if entry.key == path), None)


def summarize(content: Content) -> Summary:
    """Compute what is in a buffer.

    Args:
        content: The buffer.

    Raises:
        Fault: It holds more cells than are looked at.
    """
    if content.looked_at > MOST:
        raise Fault(
            f"{content.name} holds {content.looked_at:,} cells, of which at most {MOST:,} are looked at; "
            "look at its newest ones: --last 10000000 (from Python: last=10_000_000)."
        )
    with np.errstate(all="ignore"):  # numbers may be infinite, or too large for their sums
        entries = tuple(_entry(content, path, leaf) for path, leaf in content.leaves.items())
        ages = _ages(content) if content.ordered and content.kind == "replay buffer" and content.looked_at else None
        return Summary(content, entries, episodes_in(content), ages, _priorities(content))


def _entry(content: Content, path: tuple[str, ...], leaf: Leaf) -> Entry:
    first = leaf[:1]
    size, width = first.numel(), first.nbytes
    whole = not (first.is_floating_point() or first.is_complex())
    low = torch.full((size,), math.inf, dtype=torch.float64)
    high, moments = -low, Moments.none()
    nans, seen = 0, 0
    every = max(1, content.looked_at // SAMPLED)
    # One array from the start: small ones that stay between the pieces would keep the heap from reusing their room.
    sample = np.empty((-(-content.looked_at // every), size if size <= WIDE else 1), np.float64)
    taken = 0
    counts: dict[int, int] | None = {} if whole and size == 1 else None
    for piece in content.pieces(max(width, 8 * min(size, 4))) if size and not first.is_complex() else ():
        rows = piece.rows(leaf).reshape(-1, size)
        if not len(rows):
            continue
        start = -seen % every
        picked = rows[start::every]
        shown = picked if size <= WIDE else picked[:, (size // 2) : (size // 2) + 1]
        sample[taken : taken + len(shown)] = shown.double().numpy()
        taken += len(shown)
        seen += len(rows)
        if whole:
            values = rows.to(torch.uint8) if rows.dtype is torch.bool else rows
            least, most = values.amin(0), values.amax(0)
            if counts is not None:
                counts = _counted(counts, values[:, 0], int(least), int(most))
        else:
            values = rows.float() if rows.element_size() < 4 else rows
            least, most = values.amin(0), values.amax(0)
            if not bool((least.isfinite() & most.isfinite()).all()):
                finite = values.isfinite()
                nans += values.numel() - int(finite.sum())
                least = values.where(finite, math.inf).amin(0)
                most = values.where(finite, -math.inf).amax(0)
                values = values[finite]
        moments = moments.merged(_moments(values))
        low, high = torch.minimum(low, least.double()), torch.maximum(high, most.double())
    number = moments.count
    return Entry(
        path,
        tuple(first.shape[1:]),
        str(first.dtype).removeprefix("torch."),
        width * content.count,
        float(low.min()) if number else math.nan,
        float(high.max()) if number else math.nan,
        float(moments.mean) if number else math.nan,
        math.sqrt(max(float(moments.variance), 0.0)) if number else math.nan,
        nans,
        int((low == high).sum()) if content.looked_at > 1 and not nans else 0,
        size,
        sample[:taken],
        _column(counts),
    )


def _moments(values: Tensor) -> Moments:
    """Return the moments of all numbers; bytes, which may be images, take the shorter way through float32."""
    flat = values.reshape(-1)
    if flat.element_size() > 1 or not len(flat):
        return Moments.of(flat) if len(flat) else Moments.none()
    flat = flat.float()
    mean = flat.sum(dtype=torch.float64) / len(flat)
    flat -= mean.float()
    return Moments(len(flat), mean, flat.square_().sum(dtype=torch.float64))


def _counted(counts: dict[int, int], values: Tensor, low: int, high: int) -> dict[int, int] | None:
    if high - low >= VALUES or (counts and (max(*counts, high) - min(*counts, low)) >= VALUES):
        return None
    for value, count in enumerate(torch.bincount(values.long() - low).tolist(), low):
        counts[value] = counts.get(value, 0) + count
    return counts


def _column(counts: dict[int, int] | None) -> tuple[int, ...]:
    return tuple(counts.get(value, 0) for value in range(min(counts), max(counts) + 1)) if counts else ()


def _ages(content: Content) -> Ages:
    newest = content.behind - 1
    oldest = int((newest - content.first).max())
    width = max(1, -(-(oldest + 1) // BARS))
    stored, drawn = np.zeros(BARS), np.zeros(BARS)
    sums = np.zeros(2)
    for piece in content.pieces(16):
        age = newest - np.arange(piece.begin, piece.end)[:, None]
        age = age.ravel() if piece.valid is None else age[piece.valid]
        mass = np.ones(len(age)) if content.mass is None else _mass_of(_cells_of(piece), content.mass)
        stored += np.bincount(age // width, minlength=BARS)[:BARS]
        drawn += np.bincount(age // width, mass, BARS)[:BARS]
        sums += age.sum(), (age * mass).sum()
    weights = [1.0 if not part.sum() else float(part.sum()) for part in (stored, drawn)]
    bars = [tuple((part / weight).tolist()) for part, weight in zip((stored, drawn), weights, strict=True)]
    return Ages(oldest, float(sums[0] / weights[0]), float(sums[1] / weights[1]), bars[0], bars[1])


def _cells_of(piece: Piece) -> NDArray[np.int64]:
    """Return the cells of what is there of a piece, in the order of time."""
    first = piece.begin % piece.content.length * piece.shape[1]
    cells = np.arange(first, first + math.prod(piece.shape))
    return cells if piece.valid is None else cells[piece.valid.ravel()]


def _mass_of(cells: NDArray[np.int64], mass: Leaf) -> NDArray[np.float64]:
    if not len(cells):
        return np.zeros(0)
    low = int(cells[0])
    found = mass[low : int(cells[-1]) + 1].double().numpy()
    found = np.where(np.isfinite(found) & (found > 0), found, 0.0)
    known = np.zeros(int(cells[-1]) + 1 - low)
    known[: len(found)] = found
    return known[cells - low]


def _priorities(content: Content) -> Priorities | None:
    if content.mass is None or not len(content.mass):
        return None
    mass, known = np.empty(len(content.mass), np.float32), 0
    for at in range(0, len(mass), STEP):
        part = content.mass[at : at + STEP].float().numpy()
        part = part[(part > 0) & np.isfinite(part)]
        mass[known : known + len(part)] = part
        known += len(part)
    if not known:
        return None
    mass = mass[:known]
    mass.sort()
    largest_first = mass[::-1]
    edges = np.linspace(0, known, BARS + 1).astype(np.int64)
    shares = np.array([largest_first[low:high].sum(dtype=np.float64) for low, high in pairwise(edges)]).cumsum()
    total = float(shares[-1])
    block = int(np.searchsorted(shares, total / 2))
    before = float(shares[block - 1]) if block else 0.0
    inside = before + largest_first[edges[block] : edges[block + 1]].cumsum(dtype=np.float64)
    half = int(edges[block]) + int(np.searchsorted(inside, total / 2)) + 1
    scaled = mass / mass[-1]  # whose squares neither overflow nor vanish
    effective = float(scaled.sum(dtype=np.float64)) ** 2 / float(np.dot(scaled, scaled))
    return Priorities(known, float(mass[-1]) / total, half, effective, tuple((shares / total).tolist()))
