"""The updates of a replay run, in a fixed ratio to the frames that were collected."""

from __future__ import annotations

from fractions import Fraction


class UpdateClock:
    """Count updates, and say when the next one waits for frames.

    Args:
        frames_per_update: New frames of a rank for each update.

    Attributes:
        updates: Updates whose batch was drawn.
        refilled: Frames that are collected anew, because a checkpoint held no buffer.
        in_step: Updates that an unfinished step has made.

    Example:
        >>> clock = UpdateClock(0.5)
        >>> clock.updates = 2
        >>> clock.waits(0), clock.waits(1)
        (True, False)
    """

    def __init__(self, frames_per_update: float) -> None:
        # A fraction: as a floating-point number 30 * 0.1 exceeds 3, which would ask for a fourth frame.
        self.ratio = Fraction(frames_per_update).limit_denominator(1_000_000)
        self.updates = self.refilled = self.in_step = 0

    def waits(self, frames: int) -> bool:
        """Return whether the next update needs more frames than a rank has collected behind the warm-up."""
        return (self.refilled - frames) * self.ratio.denominator + self.updates * self.ratio.numerator > 0
