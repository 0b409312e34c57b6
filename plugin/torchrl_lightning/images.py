"""Where the channels of an image are. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence


def stack_axis(shape: Sequence[int]) -> int:
    """Return the axis of an image along which frames are stacked: that of its channels, a new one where it has none."""
    return 2 if channels_are_last(shape) else 0


def channels_are_last(shape: Sequence[int]) -> bool:
    """Return whether images of three dimensions are ``[H, W, C]``.

    Squares show where the channels are, as a stack of small images has more channels than rows; of others the channels
    are fewer than rows or columns.

    Examples:
        >>> channels_are_last((64, 64, 12)), channels_are_last((4, 84, 84)), channels_are_last((210, 160, 3))
        (True, False, True)
        >>> channels_are_last((7, 7, 12)), channels_are_last((12, 7, 7))
        (True, False)
    """
    if len(shape) != 3:
        return False
    first, between, last = shape
    return first == between != last or (between != last and last < first)
