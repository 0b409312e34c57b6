"""Limit the number of draws per inserted row in a replay service."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.validators import Checked, exact_ratio, finite_positive, integer, optional, positive

_ROUNDING = 1 - 1e-12  # tolerance, because the caller's bound may contain rounding errors


class RateLimiter:
    r"""Let writers and learners wait, so that each row is drawn ``samples_per_insert`` times on average.

    Let \(I\) be the number of written rows, \(S\) the number of drawn rows, \(m\) ``min_size``, \(k\)
    ``samples_per_insert``, and \(e\) ``error_buffer``. An insert waits if it would result in
    \(k (I - m) - S > e\). A draw waits if it would result in \(k (I - m) - S < -e\). Below \(m\) rows, inserts never
    wait and draws always wait. The calculation is exact, because the decimal form of the ratio is converted to a
    fraction.

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
    min_size = Checked(integer)

    def __init__(
        self, samples_per_insert: float | None = None, error_buffer: float | None = None, min_size: int = 1
    ) -> None:
        samples_per_insert = optional(positive)(samples_per_insert, "samples_per_insert")
        if samples_per_insert == math.inf:
            raise ValueError("samples_per_insert must be finite and above 0, got inf. Leave it out for no limit.")
        error_buffer = optional(positive)(error_buffer, "error_buffer")
        self.min_size = min_size
        if (samples_per_insert is None) != (error_buffer is None):
            raise ValueError(
                f"samples_per_insert={samples_per_insert} and error_buffer={error_buffer} must be set together. Set "
                "both or neither."
            )
        self._is_bound = samples_per_insert is not None
        self._ratio: Fraction | None = None
        self.samples_per_insert, self.error_buffer = samples_per_insert, error_buffer
        self.inserted = self.drawn = 0
        """The numbers of inserted and drawn rows so far."""
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
        self._ratio = None if ratio is None else exact_ratio(ratio)
        return ratio

    def _check_error(self, value: float | None, name: str) -> float | None:
        return self._bound_setting(value, name, positive)

    def _bound_setting(self, value: float | None, name: str, check: Callable[..., float]) -> float | None:
        """Validate a number that is required with a bound, and must be None without a bound."""
        if (value is None) == self._is_bound:
            expected = "a number" if self._is_bound else "None"
            raise ValueError(
                f"{name} must be {expected} in this RateLimiter, because samples_per_insert and error_buffer are set "
                f"together, got {value!r}. Build another RateLimiter with both or neither."
            )
        return optional(check)(value, name)

    def restore(self, inserted: int, drawn: int) -> None:
        """Set the numbers of inserted and drawn rows."""
        self.inserted, self.drawn = inserted, drawn

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

    def _surplus(self, ratio: Fraction, inserted: int, drawn: int) -> Fraction:
        """Return the number of draws that would be missing after further inserts and draws; negative if too many."""
        return ratio * (self.inserted + inserted - self.min_size) - (self.drawn + drawn)

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
