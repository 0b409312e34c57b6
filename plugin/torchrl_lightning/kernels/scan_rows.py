"""The recurrence and its blocks, for calls from compiled kernels: flat rows at an address."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchrl_lightning.kernels.compiled import carray, pointer

ELEMENTS = 1024  # number of elements in a kernel's block; a longer row is a block of its own


def floats_at(address: int, low: int, high: int, like: Any) -> Any:
    """View elements ``low`` to ``high`` of the array at an address, with the dtype of ``like``."""
    return carray(pointer(address + low * like.itemsize), (high - low,), like.dtype)


def bools_at(address: int, low: int, high: int) -> Any:
    """View elements ``low`` to ``high`` of the bool array at an address."""
    return carray(pointer(address + low), (high - low,), np.bool_)


def block_of(steps: int, size: int) -> tuple[int, int]:
    """Return the lengths of a row and of a block of whole rows, in elements; a block has at least 1 element."""
    width = size // max(1, steps)
    return width, max(1, width, ELEMENTS - ELEMENTS % max(1, width))


def row_is_finite(row: Any) -> bool:
    """Return whether a row is finite. A recurrence carries NaN and infinity of all earlier rows into its last row."""
    zero = row.dtype.type(0.0)
    total = zero
    for i in range(len(row)):
        total += row[i] * zero
    return bool(total == zero)


def scan_rows(y: Any, c: Any, carry: Any, width: int, reverse: bool) -> None:
    """Run ``y[t] += c[t] * y[t+1]`` in place over flat rows of ``width``, starting from the row ``carry``."""
    rows = len(y) // width
    if width == 1:  # a separate loop keeps the carry in a register
        previous = carry[0]
        for k in range(rows):
            t = rows - 1 - k if reverse else k
            previous = y[t] + c[t] * previous
            y[t] = previous
        return
    previous_row = carry
    for k in range(rows):
        start = (rows - 1 - k if reverse else k) * width
        y_t, c_t = y[start : start + width], c[start : start + width]
        for n in range(width):
            y_t[n] += c_t[n] * previous_row[n]
        previous_row = y_t
