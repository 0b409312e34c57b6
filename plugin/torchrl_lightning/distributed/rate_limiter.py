"""How often what a replay service holds is learned from, kept within a bound."""

from __future__ import annotations

from torchrl_lightning.fitting import Fault
from torchrl_lightning.ranges import integer, optional, positive


class RateLimiter:
    r"""Let writers and learners wait for each other, so that rows are drawn ``samples_per_insert`` times on average.

    With ``I`` rows written, ``S`` drawn and ``m = min_size``, an insert waits while it would make
    \(k (I - m) - S > e\), a draw while it would make it \(< -e\), for \(k\) ``samples_per_insert`` and \(e\)
    ``error_buffer``. Until there are ``m`` rows nobody waits to insert, and nothing is drawn.

    Args:
        samples_per_insert: How often each row is to be drawn; nobody waits if None.
        error_buffer: By how many draws the ratio may be missed on either side.
        min_size: Rows before the first draw.

    Raises:
        ValueError: A number is out of range, or only one of the first two is given.

    Source:
        Cassirer et al. (2021), Reverb: A Framework for Experience Replay, https://arxiv.org/abs/2102.04736

    Example:
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

    def __init__(
        self, samples_per_insert: float | None = None, error_buffer: float | None = None, min_size: int = 1
    ) -> None:
        self.samples_per_insert = optional(positive)(samples_per_insert, "samples_per_insert")
        self.error_buffer = optional(positive)(error_buffer, "error_buffer")
        self.min_size = integer(min_size, "min_size")
        if (samples_per_insert is None) != (error_buffer is None):
            raise ValueError(
                f"samples_per_insert={samples_per_insert} and error_buffer={error_buffer} go together; give both or "
                "neither."
            )
        self.inserted = self.drawn = 0
        """Rows so far."""
        self._largest_insert = self._largest_draw = 0

    def admits_insert(self, rows: int) -> bool:
        """Return whether so many rows may be written now."""
        self._largest_insert = max(self._largest_insert, rows)
        if self.inserted < self.min_size or self.samples_per_insert is None:
            return True
        self._check_sizes()
        return self._surplus(rows, 0) <= self.error_buffer

    def admits_draw(self, rows: int) -> bool:
        """Return whether so many rows may be drawn now."""
        self._largest_draw = max(self._largest_draw, rows)
        if self.inserted < self.min_size or self.samples_per_insert is None:
            return self.inserted >= self.min_size
        self._check_sizes()
        return self._surplus(0, rows) >= -self.error_buffer

    def _surplus(self, inserted: int, drawn: int) -> float:
        """Return how many draws are due once so much more is written and drawn."""
        assert self.samples_per_insert is not None
        return self.samples_per_insert * (self.inserted + inserted - self.min_size) - (self.drawn + drawn)

    def _check_sizes(self) -> None:
        """Refuse a bound within which an insert and a draw would wait for each other for ever."""
        assert self.samples_per_insert is not None
        assert self.error_buffer is not None
        needed = (self.samples_per_insert * self._largest_insert + self._largest_draw) / 2
        if self.error_buffer < needed:
            raise Fault(
                f"error_buffer={self.error_buffer:g} is too small for inserts of {self._largest_insert} rows and draws "
                f"of {self._largest_draw} at samples_per_insert={self.samples_per_insert:g}: they would wait for each "
                f"other. Give at least {needed:g}, or smaller ones (frames_per_batch, batches_per_call)."
            )
