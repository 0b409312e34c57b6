"""Compute statistics of a buffer in pieces, without loading a whole entry."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.inspection.buffer_views import PIECE, BufferView
from torchrl_lightning.inspection.episode_gallery import Episodes, episodes_in
from torchrl_lightning.inspection.leaves import Leaf
from torchrl_lightning.inspection.sample_counts import SampleCounter

MOST = 200_000_000  # cells to inspect at most
SAMPLED = 4096  # sampled rows per entry, for figures and action bounds
WIDE = 64  # a row with more numbers counts as an image
BARS = 32
ACTIONS = ("action", "actions")
VALUES = 64  # largest range of a discrete action


@dataclass(frozen=True)
class Entry:
    """One entry of the steps.

    Attributes:
        key: The key.
        shape: The shape of one step.
        dtype: The name of the dtype.
        bytes: The size of all filled cells.
        low: The smallest finite number.
        high: The largest finite number.
        mean: The mean of the finite numbers.
        std: The standard deviation of the finite numbers.
        nans: Count of NaN and infinite numbers.
        constant: Count of the columns with the same number in all steps.
        size: Numbers per row.
        sample: Evenly spaced rows ``[n, size]``; only one column ``[n, 1]`` of a wide entry.
        counts: Count of each integer from ``low`` on, for a discrete action.
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
        """The key as a dotted, printable string."""
        return printable(".".join(self.key))


@dataclass(frozen=True)
class Ages:
    """Ages of stored and sampled steps, in steps of their environment.

    Attributes:
        oldest: The age of the oldest step.
        mean: Mean age of the stored steps.
        drawn: Expected age of a sampled step; equal to ``mean`` without priorities.
        stored_bars: Share of the stored steps in each of 32 equal age ranges.
        drawn_bars: Probability of sampling from each of these ranges.
    """

    oldest: int
    mean: float
    drawn: float
    stored_bars: tuple[float, ...] = field(repr=False)
    drawn_bars: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Priorities:
    """Concentration of the sampling probability.

    Attributes:
        known: Number of cells with a positive, finite priority.
        largest: The largest probability of a cell.
        half: The smallest number of cells with half of the probability together.
        effective: Effective sample size: the number of equally likely cells with the same rate of repeats.
        shares: Probability of each 1/32 of the cells, sorted from the largest priorities to the smallest.
    """

    known: int
    largest: float
    half: int
    effective: float
    shares: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Summary:
    """The statistics of one buffer."""

    content: BufferView
    entries: tuple[Entry, ...]
    episodes: Episodes | None
    ages: Ages | None
    priorities: Priorities | None
    draws: SampleCounter | None = None

    def entry(self, *names: str) -> Entry | None:
        """Return the entry with one of these names, by the rules of :meth:`BufferView.find`."""
        path = self.content.find(*names)
        return next((entry for entry in self.entries if entry.key == path), None)


def summarize(content: BufferView) -> Summary:
    """Compute the statistics of a buffer.

    Args:
        content: The buffer.

    Raises:
        Fault: The buffer has more cells to inspect than the limit.
    """
    if content.looked_at > MOST:
        raise UserError(
            f"{content.name} holds {content.looked_at:,} cells, of which at most {MOST:,} are looked at; "
            "look at its newest ones: --last 10000000 (from Python: last=10_000_000)."
        )
    with np.errstate(all="ignore"):  # numbers may be infinite, and sums may overflow
        entries = tuple(_entry(content, path, leaf) for path, leaf in content.leaves.items())
        ages = _ages(content) if content.kind == "replay buffer" and content.looked_at else None
        return Summary(content, entries, episodes_in(content), ages, _priorities(content.mass))


def _entry(content: BufferView, path: tuple[str, ...], leaf: Leaf) -> Entry:
    first = leaf[:1]
    size, dtype = first.numel(), first.dtype
    low = torch.full((size,), math.inf, dtype=torch.float64)
    high, moments = -low, Moments.none()
    nans = seen = taken = 0
    every = max(1, content.looked_at // SAMPLED)
    # Preallocate one array: small arrays between the pieces would keep the heap from reusing freed memory.
    sample = np.empty((-(-content.looked_at // every), size if size <= WIDE else 1), np.float64)
    for rows in content.pieces(leaf) if size and not dtype.is_complex else ():
        rows = rows.reshape(-1, size)
        picked = rows[-seen % every :: every]
        picked = picked if size <= WIDE else picked[:, (size // 2) : (size // 2) + 1]
        sample[taken : taken + len(picked)] = picked.double().numpy()
        taken, seen = taken + len(picked), seen + len(rows)
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        values = rows.to(torch.uint8) if dtype is torch.bool else rows.float() if narrow else rows
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
    counts: tuple[int, ...] = ()
    if number and size == 1 and path[-1] in ACTIONS and not dtype.is_floating_point and float(high - low) < VALUES:
        begin = min(int(rows.long().min()) for rows in content.pieces(leaf))
        end = max(int(rows.long().max()) for rows in content.pieces(leaf)) + 1
        parts = [torch.bincount(rows.long().ravel() - begin, minlength=end - begin) for rows in content.pieces(leaf)]
        counts = tuple(torch.stack(parts).sum(0).tolist())
    return Entry(
        path,
        tuple(first.shape[1:]),
        str(dtype).removeprefix("torch."),
        first.nbytes * content.count,
        float(low.min()) if number else math.nan,
        float(high.max()) if number else math.nan,
        float(moments.mean) if number else math.nan,
        math.sqrt(max(float(moments.variance), 0.0)) if number else math.nan,
        nans,
        int((low == high).sum()) if content.looked_at > 1 and not nans else 0,
        size,
        sample[:taken],
        counts,
    )


def _moments(values: Tensor) -> Moments:
    """Return the moments of all numbers; one-byte dtypes, such as images, take a faster path through float32."""
    flat = values.reshape(-1)
    if flat.element_size() > 1 or not len(flat):
        return Moments.of(flat) if len(flat) else Moments.none()
    flat = flat.float()
    mean = flat.sum(dtype=torch.float64) / len(flat)
    flat -= mean.float()
    return Moments(len(flat), mean, flat.square_().sum(dtype=torch.float64))


def _known(mass: Leaf, begin: int, end: int) -> NDArray[Any]:
    """Return the priorities of a range of cells; 0 for cells that cannot be sampled."""
    known: NDArray[Any] = np.zeros(end - begin, mass[:0].numpy().dtype)
    found = mass[begin:end].numpy()
    known[: len(found)] = np.where((found > 0) & (found < np.inf), found, 0)
    return known


def _ages(content: BufferView) -> Ages:
    oldest = int((content.behind - content.first).max()) - 1
    width = -(-(oldest + 1) // BARS)
    stored, drawn, total, drawn_total = np.zeros(BARS), np.zeros(BARS), 0.0, 0.0
    for _, cells, _, age in content.walk(32):
        begin, span, drawn_by = int(cells[0]), age // width, None
        if content.mass is not None:
            drawn_by = _known(content.mass, begin, int(cells[-1]) + 1)[cells - begin].astype(np.float64)
        stored += np.bincount(span, minlength=BARS)
        drawn += np.bincount(span, drawn_by, BARS)
        total += float(age.sum())
        drawn_total += float(age.sum() if drawn_by is None else np.dot(age, drawn_by))
    stored_sum, drawn_sum = float(stored.sum()), float(drawn.sum()) or 1.0
    bars = [tuple((part / number).tolist()) for part, number in ((stored, stored_sum), (drawn, drawn_sum))]
    return Ages(oldest, total / stored_sum, drawn_total / drawn_sum, *bars)


def _priorities(leaf: Leaf | None) -> Priorities | None:
    if leaf is None:
        return None
    mass, known = np.empty(len(leaf), leaf[:0].numpy().dtype), 0
    for begin in range(0, len(leaf), PIECE // 16):
        part = _known(leaf, begin, min(begin + PIECE // 16, len(leaf)))
        part = part[part > 0]
        mass[known : known + len(part)] = part
        known += len(part)
    if not known:
        return None
    mass = mass[:known]
    mass.sort()
    mass = mass[::-1]  # the largest first
    edges = np.linspace(0, known, BARS + 1).astype(np.int64)
    sums, scaled_sum, squares = np.zeros(BARS + 1), 0.0, 0.0
    for number in range(BARS):
        part = mass[edges[number] : edges[number + 1]].astype(np.float64)
        sums[number + 1] = np.append(sums[number], part).cumsum()[-1]
        scaled = part / float(mass[0])  # the squares of scaled values do not overflow or vanish
        scaled_sum, squares = scaled_sum + float(scaled.sum()), squares + float(np.dot(scaled, scaled))
    total = float(sums[-1])
    block = int(np.searchsorted(sums[1:], total / 2))
    inside = np.append(sums[block], mass[edges[block] : edges[block + 1]]).cumsum()
    half = int(edges[block] + np.searchsorted(inside, total / 2))
    shares = np.diff(sums) / total
    return Priorities(known, float(mass[0]) / total, half, scaled_sum**2 / squares, tuple(shares.tolist()))
