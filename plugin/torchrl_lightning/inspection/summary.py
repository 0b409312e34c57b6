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
from torchrl_lightning.inspection.buffer_views import CHUNK_BYTES, BufferView
from torchrl_lightning.inspection.episode_gallery import Episodes, episodes_in
from torchrl_lightning.inspection.leaves import Leaf
from torchrl_lightning.inspection.sample_counts import SampleCounter

MAX_CELLS = 200_000_000  # maximum number of inspected cells
SAMPLE_ROWS = 4096  # sampled rows per entry, for figures and action bounds
MAX_COLUMNS = 64  # a row with more numbers counts as an image
BARS = 32
ACTIONS = ("action", "actions")
MAX_DISCRETE_VALUES = 64  # largest range of a discrete action


@dataclass(frozen=True)
class Entry:
    """One entry of the steps.

    Attributes:
        key: The key.
        shape: The shape of one step.
        dtype: The name of the dtype.
        bytes: The size of all filled cells in bytes.
        low: The smallest finite number.
        high: The largest finite number.
        mean: The mean of the finite numbers.
        std: The standard deviation of the finite numbers.
        nans: Number of NaN and infinite numbers.
        constant: Number of columns with the same number in all steps.
        size: Numbers per row.
        sample: Evenly spaced rows ``[n, size]``; for a wide entry, only one column ``[n, 1]``.
        counts: For a discrete action, the number of occurrences of each integer from ``low`` to ``high``.
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
        num_cells: Number of cells with a positive, finite priority.
        largest: The largest probability of a cell.
        half: The smallest number of cells that together have half of the probability.
        effective: Effective sample size. Sampling from this number of equally likely cells would repeat cells as often.
        shares: Total probability of each 1/32 of the cells; the first part has the largest priorities.
    """

    num_cells: int
    largest: float
    half: int
    effective: float
    shares: tuple[float, ...] = field(repr=False)


@dataclass(frozen=True)
class Summary:
    """The statistics of one buffer."""

    view: BufferView
    entries: tuple[Entry, ...]
    episodes: Episodes | None
    ages: Ages | None
    priorities: Priorities | None
    draws: SampleCounter | None = None

    def entry(self, *names: str) -> Entry | None:
        """Return the entry with one of these names, by the rules of :meth:`BufferView.find`."""
        path = self.view.find(*names)
        return next((entry for entry in self.entries if entry.key == path), None)


def summarize(view: BufferView) -> Summary:
    """Compute the statistics of a buffer.

    Args:
        view: The buffer.

    Raises:
        UserError: The buffer has more cells to inspect than the limit.
    """
    if view.num_inspected > MAX_CELLS:
        raise UserError(
            f"{view.name} has {view.num_inspected:,} cells, but at most {MAX_CELLS:,} can be inspected; "
            "inspect only the newest ones: --last 10000000 (from Python: last=10_000_000)."
        )
    with np.errstate(all="ignore"):  # numbers may be infinite, and sums may overflow
        entries = tuple(_entry(view, path, leaf) for path, leaf in view.leaves.items())
        ages = _ages(view) if view.kind == "replay buffer" and view.num_inspected else None
        return Summary(view, entries, episodes_in(view), ages, _priorities(view.sampling_weights))


def _entry(view: BufferView, path: tuple[str, ...], leaf: Leaf) -> Entry:
    first = leaf[:1]
    size, dtype = first.numel(), first.dtype
    low = torch.full((size,), math.inf, dtype=torch.float64)
    high, moments = -low, Moments.empty()
    nans = num_seen = num_sampled = 0
    stride = max(1, view.num_inspected // SAMPLE_ROWS)
    # Preallocate one array, because many small arrays would keep the heap from reusing freed memory.
    sample = np.empty((-(-view.num_inspected // stride), size if size <= MAX_COLUMNS else 1), np.float64)
    for rows in view.chunks(leaf) if size and not dtype.is_complex else ():
        rows = rows.reshape(-1, size)
        sampled_rows = rows[-num_seen % stride :: stride]
        sampled_rows = sampled_rows if size <= MAX_COLUMNS else sampled_rows[:, (size // 2) : (size // 2) + 1]
        sample[num_sampled : num_sampled + len(sampled_rows)] = sampled_rows.double().numpy()
        num_sampled, num_seen = num_sampled + len(sampled_rows), num_seen + len(rows)
        is_half_precision = dtype.is_floating_point and dtype.itemsize < 4
        values = rows.to(torch.uint8) if dtype is torch.bool else rows.float() if is_half_precision else rows
        chunk_low, chunk_high = values.amin(0), values.amax(0)
        if not bool((chunk_low.isfinite() & chunk_high.isfinite()).all()):
            finite = values.isfinite()
            nans += values.numel() - int(finite.sum())
            chunk_low = values.where(finite, math.inf).amin(0)
            chunk_high = values.where(finite, -math.inf).amax(0)
            values = values[finite]
        moments = moments.merged(_moments(values))
        low, high = torch.minimum(low, chunk_low.double()), torch.maximum(high, chunk_high.double())
    number = moments.count
    counts: tuple[int, ...] = ()
    if (
        number
        and size == 1
        and path[-1] in ACTIONS
        and not dtype.is_floating_point
        and float(high - low) < MAX_DISCRETE_VALUES
    ):
        begin = min(int(rows.long().min()) for rows in view.chunks(leaf))
        end = max(int(rows.long().max()) for rows in view.chunks(leaf)) + 1
        parts = [torch.bincount(rows.long().ravel() - begin, minlength=end - begin) for rows in view.chunks(leaf)]
        counts = tuple(torch.stack(parts).sum(0).tolist())
    return Entry(
        path,
        tuple(first.shape[1:]),
        str(dtype).removeprefix("torch."),
        first.nbytes * view.count,
        float(low.min()) if number else math.nan,
        float(high.max()) if number else math.nan,
        float(moments.mean) if number else math.nan,
        math.sqrt(max(float(moments.variance), 0.0)) if number else math.nan,
        nans,
        int((low == high).sum()) if view.num_inspected > 1 and not nans else 0,
        size,
        sample[:num_sampled],
        counts,
    )


def _moments(values: Tensor) -> Moments:
    """Return the moments of all numbers; one-byte dtypes, such as images, take a faster path through float32."""
    flat = values.reshape(-1)
    if flat.element_size() > 1 or not len(flat):
        return Moments.from_samples(flat) if len(flat) else Moments.empty()
    flat = flat.float()
    mean = flat.sum(dtype=torch.float64) / len(flat)
    flat -= mean.float()
    return Moments(len(flat), mean, flat.square_().sum(dtype=torch.float64))


def _valid_priorities(mass: Leaf, begin: int, end: int) -> NDArray[Any]:
    """Return the priorities of a range of cells; 0 for cells that cannot be sampled."""
    valid: NDArray[Any] = np.zeros(end - begin, mass[:0].numpy().dtype)
    stored = mass[begin:end].numpy()
    valid[: len(stored)] = np.where((stored > 0) & (stored < np.inf), stored, 0)
    return valid


def _ages(view: BufferView) -> Ages:
    oldest = int((view.stop - view.first).max()) - 1
    width = -(-(oldest + 1) // BARS)
    stored, drawn, total, drawn_total = np.zeros(BARS), np.zeros(BARS), 0.0, 0.0
    for _, cells, _, age in view.walk(32):
        begin, span, weights = int(cells[0]), age // width, None
        if view.sampling_weights is not None:
            weights = _valid_priorities(view.sampling_weights, begin, int(cells[-1]) + 1)[cells - begin].astype(
                np.float64
            )
        stored += np.bincount(span, minlength=BARS)
        drawn += np.bincount(span, weights, BARS)
        total += float(age.sum())
        drawn_total += float(age.sum() if weights is None else np.dot(age, weights))
    stored_sum, drawn_sum = float(stored.sum()), float(drawn.sum()) or 1.0
    bars = [tuple((part / number).tolist()) for part, number in ((stored, stored_sum), (drawn, drawn_sum))]
    return Ages(oldest, total / stored_sum, drawn_total / drawn_sum, *bars)


def _priorities(leaf: Leaf | None) -> Priorities | None:
    if leaf is None:
        return None
    mass, num_cells = np.empty(len(leaf), leaf[:0].numpy().dtype), 0
    for begin in range(0, len(leaf), CHUNK_BYTES // 16):
        part = _valid_priorities(leaf, begin, min(begin + CHUNK_BYTES // 16, len(leaf)))
        part = part[part > 0]
        mass[num_cells : num_cells + len(part)] = part
        num_cells += len(part)
    if not num_cells:
        return None
    mass = mass[:num_cells]
    mass.sort()
    mass = mass[::-1]  # the largest first
    edges = np.linspace(0, num_cells, BARS + 1).astype(np.int64)
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
    return Priorities(num_cells, float(mass[0]) / total, half, scaled_sum**2 / squares, tuple(shares.tolist()))
