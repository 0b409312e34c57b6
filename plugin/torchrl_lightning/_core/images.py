"""Find the channel axis of an image. This module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence


def stack_axis(shape: Sequence[int]) -> int:
    """Return the axis for stacking frames: the channel axis of an image, or a new first axis for other observations."""
    return 2 if channels_are_last(shape) else 0


def channels_are_last(shape: Sequence[int]) -> bool:
    """Return whether images of this shape are ``[H, W, C]``; False unless the shape has three dimensions.

    If two adjacent sizes are equal, they are the height and the width; the number of channels may be larger, as in a
    stack of small images. Otherwise the smaller of the first and the last size is the number of channels.

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
