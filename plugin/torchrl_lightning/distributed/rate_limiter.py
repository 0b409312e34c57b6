"""How often what a replay service holds is learned from, kept within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from torchrl_lightning.fitting import Fault
from torchrl_lightning.ranges import Checked, exact_ratio, finite_positive, integer, optional, positive

_ROUNDING = 1 - 1e-12  # a bound that was computed in floating-point numbers may be that much too small


class RateLimiter:
    r"""Let writers and learners wait for each other, so that rows are drawn ``samples_per_insert`` times on average.

    With ``I`` rows written, ``S`` drawn and ``m = min_size``, an insert waits while it would make
    \(k (I - m) - S > e\), a draw while it would make it \(< -e\), for \(k\) ``samples_per_insert`` and \(e\)
    ``error_buffer``. Until there are ``m`` rows nobody waits to insert, and nothing is drawn. All counts are exact: the
    ratio is the fraction that its decimal form stands for.

    Args:
        samples_per_insert: How often each row is to be drawn; nobody waits if None.
        error_buffer: By how many draws the ratio may be missed on either side. For inserts of up to ``n`` and draws of
            up to ``d`` rows it is at least ``(samples_per_insert * n + d) / 2``: with less, both would wait for ever. A
            smaller one is refused as soon as these sizes are known.
        min_size: Rows before the first draw.

    Raises:
        ValueError: A number is out of range, or only one of the first two is given.

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
            raise ValueError("samples_per_insert must be finite and above 0, got inf; leave it out to draw freely.")
        error_buffer = optional(positive)(error_buffer, "error_buffer")
        self.min_size = min_size
        if (samples_per_insert is None) != (error_buffer is None):
            raise ValueError(
                f"samples_per_insert={samples_per_insert} and error_buffer={error_buffer} go together; give both or "
                "neither."
            )
        self._is_bound = samples_per_insert is not None
        self._ratio: Fraction | None = None
        self.samples_per_insert, self.error_buffer = samples_per_insert, error_buffer
        self.inserted = self.drawn = 0
        """Rows so far."""
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
        """Return a new ratio, which is counted with from now on."""
        ratio = self._bound_setting(value, name, finite_positive)
        self._ratio = None if ratio is None else exact_ratio(ratio)
        return ratio

    def _check_error(self, value: float | None, name: str) -> float | None:
        return self._bound_setting(value, name, positive)

    def _bound_setting(self, value: float | None, name: str, check: Callable[..., float]) -> float | None:
        """Validate a number that is there if the other one is."""
        if (value is None) == self._is_bound:
            expected = "a number" if self._is_bound else "None"
            raise ValueError(
                f"{name} must be {expected} in this RateLimiter, because samples_per_insert and error_buffer go "
                f"together, got {value!r}. Build another RateLimiter with both or neither."
            )
        return optional(check)(value, name)

    def restore(self, inserted: int, drawn: int) -> None:
        """Continue after so many rows."""
        self.inserted, self.drawn = inserted, drawn

    def admits_insert(self, rows: int) -> bool:
        """Return whether so many rows may be written now."""
        self._largest_insert = max(self._largest_insert, rows)
        if self.inserted < self.min_size or self._ratio is None:
            return True
        return self._surplus(self._ratio, rows, 0) <= self._bound(self._ratio)

    def admits_draw(self, rows: int) -> bool:
        """Return whether so many rows may be drawn now."""
        self._largest_draw = max(self._largest_draw, rows)
        if self.inserted < self.min_size or self._ratio is None:
            return self.inserted >= self.min_size
        return self._surplus(self._ratio, 0, rows) >= -self._bound(self._ratio)

    def _surplus(self, ratio: Fraction, inserted: int, drawn: int) -> Fraction:
        """Return how many draws are due once so much more is written and drawn."""
        return ratio * (self.inserted + inserted - self.min_size) - (self.drawn + drawn)

    def _bound(self, ratio: Fraction) -> Fraction | float:
        """Return the bound; refuse one within which an insert and a draw would wait for each other for ever."""
        assert self.error_buffer is not None
        needed = (ratio * self._largest_insert + self._largest_draw) / 2
        both_known = self._largest_insert and self._largest_draw
        if both_known and self.error_buffer < float(needed) * _ROUNDING:
            raise Fault(
                f"error_buffer={self.error_buffer:.12g} is too small for inserts of {self._largest_insert} rows and "
                f"draws of {self._largest_draw} at samples_per_insert={self.samples_per_insert:.12g}: they would wait "
                f"for each other. Give at least {float(needed):.16g}, or smaller ones (frames_per_batch, "
                "batches_per_call)."
            )
        return self.error_buffer if math.isinf(self.error_buffer) else max(exact_ratio(self.error_buffer), needed)
