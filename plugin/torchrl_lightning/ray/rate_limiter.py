"""Limit the number of draws per inserted row in a replay service."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.validators import Checked, exact_ratio, finite_positive, integer, optional, positive

logger = logging.getLogger(__name__)

_ROUNDING = 1 - 1e-12  # tolerance, because the caller's bound may contain rounding errors


class RateLimiter:
    r"""Let writers and learners wait, so that each row is drawn ``samples_per_insert`` times on average.

    Let \(I\) be the number of written rows, \(S\) the number of drawn rows, \(m\) ``min_size``, \(k\)
    ``samples_per_insert``, and \(e\) ``error_buffer``. An insert waits if it would result in
    \(k (I - m) - S > e\). A draw waits if it would result in \(k (I - m) - S < -e\). Below \(m\) rows, inserts never
    wait and draws always wait. The calculation is exact, because the decimal form of the ratio is converted to a
    fraction.

    A changed ratio counts from the moment of the change: rows that were written or drawn earlier are left out of
    \(I - m\) and \(S\). A smaller ``error_buffer`` and a larger ``min_size`` have the same effect if the present
    counts violate them.

    Args:
        samples_per_insert: The mean number of draws of each row. With None, no writer or learner waits for this ratio.
        error_buffer: The maximum deviation from the ratio, in draws and in both directions. If inserts have up to ``n``
            rows and draws up to ``d`` rows, the minimum is ``(samples_per_insert * n + d) / 2``. With a smaller
            value, inserts and draws could wait for each other forever. The limiter therefore raises an error as soon as
            both sizes are known.
        min_size: The number of rows before the first draw.

    Raises:
        ValueError: A number is out of range, or only one of ``samples_per_insert`` and ``error_buffer`` is given.

    Source:
        Cassirer et al. (2021), Reverb: A Framework for Experience Replay, https://arxiv.org/abs/2102.04736

    Examples:
        >>> limiter = RateLimiter(2.0, error_buffer=8, min_size=4)
        >>> limiter.admits_insert(4), limiter.admits_draw(1)
        (True, False)
        >>> limiter.inserted += 4
        >>> limiter.admits_draw(8)
        True
        >>> limiter.drawn += 8
        >>> limiter.admits_draw(1), limiter.admits_insert(4)
        (False, True)
    """

    samples_per_insert = Checked("_check_ratio")
    error_buffer = Checked("_check_error")
    min_size = Checked("_check_min_size")

    def __init__(
        self, samples_per_insert: float | None = None, error_buffer: float | None = None, min_size: int = 1
    ) -> None:
        samples_per_insert = optional(positive)(samples_per_insert, "samples_per_insert")
        if samples_per_insert == math.inf:
            raise ValueError("samples_per_insert must be finite and above 0, got inf. Leave it out for no limit.")
        error_buffer = optional(positive)(error_buffer, "error_buffer")
        self.inserted = self.drawn = 0
        """The numbers of inserted and drawn rows so far."""
        self._counted_from: tuple[int, int] | None = (
            None  # inserted and drawn rows that do not count; None: min_size, 0
        )
        self.min_size = min_size
        if (samples_per_insert is None) != (error_buffer is None):
            raise ValueError(
                f"samples_per_insert={samples_per_insert} and error_buffer={error_buffer} must be set together. Set "
                "both or neither."
            )
        self._is_bound = samples_per_insert is not None
        self._ratio: Fraction | None = None
        self.samples_per_insert, self.error_buffer = samples_per_insert, error_buffer
        self._largest_insert = self._largest_draw = 0

    @property
    def settings(self) -> dict[str, float | None]:
        """The arguments of the constructor."""
        return {
            "samples_per_insert": self.samples_per_insert,
            "error_buffer": self.error_buffer,
            "min_size": self.min_size,
        }

    def _check_ratio(self, value: float | None, name: str) -> float | None:
        """Validate and return a new ratio, which applies to all later inserts and draws."""
        ratio = self._bound_setting(value, name, finite_positive)
        previous, self._ratio = self._ratio, None if ratio is None else exact_ratio(ratio)
        if ratio is not None and previous not in (None, self._ratio) and self._has_counts:
            logger.warning("%s", self._change_ratio(ratio, self.samples_per_insert))
        return ratio

    def _check_error(self, value: float | None, name: str) -> float | None:
        error = self._bound_setting(value, name, positive)
        if error is not None and self._has_counts and not self._is_within(error):
            self.count_from_now()
        return error

    def _check_min_size(self, value: int, name: str) -> int:
        size = integer(value, name)
        if self._has_counts:
            self._counted_from = self._counted_from or (self.min_size, 0)
            if self.inserted < size:
                self._counted_from = size, self.drawn
        return size

    def _bound_setting(self, value: float | None, name: str, check: Callable[..., float]) -> float | None:
        """Validate a number that is required with a bound, and must be None without a bound."""
        if (value is None) == self._is_bound:
            expected = "a number" if self._is_bound else "None"
            raise ValueError(
                f"{name} must be {expected} in this RateLimiter, because samples_per_insert and error_buffer are set "
                f"together, got {value!r}. Build another RateLimiter with both or neither."
            )
        return optional(check)(value, name)

    @property
    def state(self) -> dict[str, Any]:
        """The settings and the counts of a snapshot, for :meth:`restore`."""
        return {"settings": self.settings, "counted_from": list(self._counted_from or (self.min_size, 0))}

    def restore(self, inserted: int, drawn: int, previous: Mapping[str, Any] | None = None) -> str | None:
        """Set the numbers of inserted and drawn rows.

        If the limiter of the snapshot had another ratio, the ratio of this limiter counts from now on.

        Args:
            inserted: The number of inserted rows.
            drawn: The number of drawn rows.
            previous: The ``state`` of the limiter that counted these rows; None if it is unknown.

        Returns:
            A sentence about the changed ratio; None if the ratio is unchanged or not set.
        """
        self.inserted, self.drawn = inserted, drawn
        settings = {} if previous is None else previous["settings"]
        if previous is not None:
            counted_from = previous["counted_from"]
            self._counted_from = int(counted_from[0]), int(counted_from[1])
        if settings == self.settings or self._ratio is None:
            return None
        before = settings.get("samples_per_insert")
        if previous is not None and before != self.samples_per_insert:
            return self._change_ratio(self.samples_per_insert, before)
        if not self._has_counts or not self._is_within(self.error_buffer):
            self.count_from_now()
        return None

    @property
    def _has_counts(self) -> bool:
        """True if rows were written before that may count for the ratio."""
        return self.inserted >= vars(self).get("min_size", math.inf)

    def _is_within(self, error: float) -> bool:
        """Return True if the present deviation from the ratio is at most ``error``."""
        return self._ratio is None or abs(self._surplus(self._ratio, 0, 0)) <= error

    def count_from_now(self) -> None:
        """Let the ratio count from now on, without the rows that were written or drawn earlier."""
        self._counted_from = max(self.inserted, self.min_size), self.drawn

    def _change_ratio(self, ratio: float, previous: float | None) -> str:
        """Let a changed ratio count from now on, and return a sentence about the change."""
        self.count_from_now()
        before = "without samples_per_insert" if previous is None else f"with samples_per_insert={previous:.12g}"
        return (
            f"samples_per_insert={ratio:.12g} counts from now on, after {self.inserted} written and {self.drawn} drawn "
            f"rows {before}."
        )

    def admits_insert(self, rows: int) -> bool:
        """Return True if this number of rows may be written now."""
        self._largest_insert = max(self._largest_insert, rows)
        if self.inserted < self.min_size or self._ratio is None:
            return True
        return self._surplus(self._ratio, rows, 0) <= self._bound(self._ratio)

    def admits_draw(self, rows: int) -> bool:
        """Return True if this number of rows may be drawn now."""
        self._largest_draw = max(self._largest_draw, rows)
        if self.inserted < self.min_size or self._ratio is None:
            return self.inserted >= self.min_size
        return self._surplus(self._ratio, 0, rows) >= -self._bound(self._ratio)

    def describe_insert_wait(self, rows: int, reason: str = "only this process draws") -> str:
        """Return the setting because of which an insert waits, and the number of draws after which it may proceed."""
        assert self._ratio is not None
        missing = math.ceil(self._surplus(self._ratio, rows, 0) - self._bound(self._ratio))
        return (
            f"at {self._described_rate} an insert of {rows} rows waits for {missing} more drawn rows, but {reason}. "
            f"Draw more often, lower samples_per_insert, or set error_buffer to at least "
            f"{self._sufficient_error(rows, 0):.12g}."
        )

    def describe_draw_wait(self, rows: int, reason: str = "only this process writes") -> str:
        """Return the setting because of which a draw waits, and the number of rows after which it may proceed."""
        missing = max(self.min_size - self.inserted, 0)
        advice = "Write more rows before the first draw"
        if self._ratio is not None:
            deficit = -self._surplus(self._ratio, 0, rows) - self._bound(self._ratio)
            missing = max(missing, math.ceil(deficit / self._ratio) if deficit > 0 else 0)
            advice = (
                "Write more often, lower batch_size or batches_per_call, raise samples_per_insert, or set error_buffer "
                f"to at least {self._sufficient_error(0, rows):.12g}"
            )
        return (
            f"at {self._described_rate} a draw of {rows} rows waits for {missing} more written rows, but {reason}. "
            f"{advice}."
        )

    @property
    def _described_rate(self) -> str:
        size = f"min_size={self.min_size}"
        if self.samples_per_insert is None:
            return size
        return f"samples_per_insert={self.samples_per_insert:.12g}, error_buffer={self.error_buffer:.12g} and {size}"

    def _sufficient_error(self, inserted: int, drawn: int) -> float:
        assert self._ratio is not None
        return float(abs(self._surplus(self._ratio, inserted, drawn)))

    def _surplus(self, ratio: Fraction, inserted: int, drawn: int) -> Fraction:
        """Return the number of draws that would be missing after further inserts and draws; negative if too many."""
        first_inserted, first_drawn = self._counted_from or (self.min_size, 0)
        return ratio * (self.inserted + inserted - first_inserted) - (self.drawn + drawn - first_drawn)

    def _bound(self, ratio: Fraction) -> Fraction | float:
        """Return the bound; raise an error if an insert and a draw would wait for each other forever."""
        assert self.error_buffer is not None
        needed = (ratio * self._largest_insert + self._largest_draw) / 2
        are_both_known = self._largest_insert and self._largest_draw
        if are_both_known and self.error_buffer < float(needed) * _ROUNDING:
            raise UserError(
                f"error_buffer={self.error_buffer:.12g} is too small for inserts of {self._largest_insert} rows and "
                f"draws of {self._largest_draw} at samples_per_insert={self.samples_per_insert:.12g}: they would wait "
                f"for each other forever. Set at least {float(needed):.16g}, or lower frames_per_batch or "
                "batches_per_call."
            )
        return self.error_buffer if math.isinf(self.error_buffer) else max(exact_ratio(self.error_buffer), needed)
