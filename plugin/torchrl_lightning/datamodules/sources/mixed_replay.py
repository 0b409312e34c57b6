"""Batches from several replay buffers, for example experience and demonstrations, or real and imagined steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from operator import itemgetter
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.keys import SOURCE
from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, sequence, state_error
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import is_tensordict, raw_items
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import exact_ratio
from torchrl_lightning.replay import ExperienceBuffer

LARGEST_INTEGER = 1 << 2000  # denominators of ratios with many digits exceed 64 bits


def _to_pairs(owed: list[Fraction]) -> list[list[int]]:
    return [[fraction.numerator, fraction.denominator] for fraction in owed]


class MixedReplay(Stateful, ConfigSafe):
    """Draw a share of each batch from each of several buffers.

    The shares are exact: fractions of a row carry over to the next batches, so that each buffer is always less than one
    row behind its share. Rows are sorted by buffer, and their entry ``source`` is the number of the buffer. Priorities
    and rewritten entries of a row are written to the buffer that contains the row.

    Args:
        buffer: the first buffer; a ``ReplayDataModule`` collects into it.
        others: further buffers, filled elsewhere.
        ratios: the share of each buffer, including the first; they sum to 1.

    Raises:
        ValueError: The ratios are not one positive number for each buffer, or do not sum to 1.

    Examples:
        >>> from tensordict import TensorDict
        >>> online, demonstrations = ExperienceBuffer(), ExperienceBuffer()
        >>> for number, buffer in enumerate((online, demonstrations)):
        ...     _ = buffer.extend(TensorDict({"a": torch.full((3,), number)}, [3]))
        >>> MixedReplay(online, [demonstrations], [0.75, 0.25]).draw(4)["source"].tolist()
        [0, 0, 0, 1]
    """

    OWNER = "mixed replay"
    STATE = {
        "others": Attribute(check_for=lambda mixed: mixed._validate_others, attribute="_others"),
        "owed": Attribute(check_for=lambda mixed: mixed._validate_owed, attribute="_owed", to_saved=_to_pairs),
    }

    def __init__(self, buffer: ExperienceBuffer, others: Sequence[ExperienceBuffer], ratios: Sequence[float]) -> None:
        self.buffers = [buffer, *others]
        if len(ratios) != len(self.buffers) or not all(0 < ratio < math.inf for ratio in ratios):
            raise ValueError(
                f"ratios must be {len(self.buffers)} positive numbers, one for each buffer, got {list(ratios)}."
            )
        self.ratios = list(map(exact_ratio, ratios))
        total = float(sum(self.ratios))
        if abs(total - 1) > 1e-5:
            raise ValueError(f"ratios must sum to 1, got {list(ratios)} with the sum {total:g}.")
        self.ratios[0] = 1 - sum(self.ratios[1:], Fraction(0))
        if self.ratios[0] <= 0:
            raise ValueError(f"ratios must sum to 1, got {list(ratios)}, which leaves no rows for the first buffer.")
        self._owed = [Fraction(0)] * len(self.buffers)

    def _partition(self, batch_size: int) -> tuple[list[int], list[Fraction]]:
        """Return each buffer's number of rows in the next batch, and the fractions that carry over."""
        due = [owed + ratio * batch_size for owed, ratio in zip(self._owed, self.ratios, strict=True)]
        sizes = [int(ratio * batch_size) for ratio in self.ratios]
        for _ in range(batch_size - sum(sizes)):
            sizes[max(range(len(due)), key=lambda number: due[number] - sizes[number])] += 1
        return sizes, [fraction - size for fraction, size in zip(due, sizes, strict=True)]

    def draw(self, batch_size: int) -> TensorDictBase:
        """Draw a batch ``[batch_size, *]``.

        Raises:
            RuntimeError: A buffer is empty.
            ValueError: The buffers' batches have different entries.
        """
        (sizes, owed), parts = self._partition(batch_size), []
        for number, (buffer, size) in enumerate(zip(self.buffers, sizes, strict=True)):
            if not len(buffer):
                raise RuntimeError(f"buffer {number} of {len(self.buffers)} is empty. Fill it before the first batch.")
            if size:
                part = buffer.draw(size)
                parts.append(part.set(SOURCE, torch.full(part.batch_size, number, device=part.device)))
        batch = _concat(parts, torch.Size([batch_size, *parts[0].batch_size[1:]]))
        if batch is None:
            keys = [set(part.keys(True, True)) for part in parts]
            differing = sorted(map(str, set.union(*keys) - set.intersection(*keys)))
            raise ValueError(
                f"the buffers' batches differ in {', '.join(differing)}. Store the same entries in all buffers, and "
                "use the same sampler class."
            )
        self._owed = owed
        return batch

    def _parts(self, batch: TensorDictBase) -> Iterator[tuple[ExperienceBuffer, TensorDictBase]]:
        """Yield each buffer that has rows in a batch, and these rows."""
        source = batch.get(SOURCE).flatten(1)[:, 0] if batch.ndim > 1 else batch.get(SOURCE)
        counts = torch.bincount(source, minlength=len(self.buffers)).tolist()
        for buffer, rows in zip(self.buffers, batch.split(counts), strict=True):
            if len(rows):
                yield buffer, rows

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Write the priorities of a batch to the buffers of its rows."""
        for buffer, rows in self._parts(data):
            buffer.update_tensordict_priority(rows)

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> None:
        """Write rewritten entries of a batch back into their cells, in all buffers or (after an error) in none."""
        parts = list(self._parts(batch))
        with ExitStack() as locks:
            for buffer, _ in parts:
                locks.enter_context(buffer.locked())
            for write in [buffer.plan_write_back(rows, keys) for buffer, rows in parts]:
                write()

    @property
    def _others(self) -> list[dict[str, Any]]:
        """The states of the other buffers; the DataModule saves the first one."""
        return [buffer.state_dict(copy=False) for buffer in self.buffers[1:]]

    @_others.setter
    def _others(self, states: Sequence[dict[str, Any]]) -> None:
        for buffer, state in zip(self.buffers[1:], states, strict=True):
            buffer.load_state_dict(state)

    def _validate_others(self, value: Any, name: str) -> Sequence[dict[str, Any]]:
        states = sequence(value, name)
        if len(states) + 1 != len(self.buffers):
            raise ValueError(f"the state has {len(states) + 1} mixed buffers, expected {len(self.buffers)}.")
        for buffer, state in zip(self.buffers[1:], states, strict=True):
            buffer.check_state(state)
        return states

    def _validate_owed(self, value: Any, name: str) -> list[Fraction]:
        if len(sequence(value, name)) != len(self.buffers):
            raise state_error(value, name, f"{len(self.buffers)} fractions")
        for pair in value:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise state_error(pair, f"an entry of {name}", "a numerator and a denominator")
            bounded_integer(-LARGEST_INTEGER, LARGEST_INTEGER)(pair[0], f"a numerator in {name}")
            bounded_integer(1, LARGEST_INTEGER)(pair[1], f"a denominator in {name}")
        return [Fraction(*pair) for pair in value]


def _concat(parts: Sequence[TensorDictBase], shape: torch.Size) -> TensorDictBase | None:
    """Concatenate parts faster than ``torch.cat``; return None if they have different entries.

    Args:
        parts: ``[b, *]`` each.
        shape: batch shape of the result.
    """
    items = list(map(raw_items, parts))
    keys = items[0].keys()
    for part_items in items:
        if part_items.keys() != keys:
            return None
    entries: dict[str, Any] = {}
    for key in keys:
        values = list(map(itemgetter(key), items))
        concatenated = _concat(values, shape) if is_tensordict(values[0]) else torch.cat(values)
        if concatenated is None:
            return None
        entries[key] = concatenated
    return new_tensordict(entries, shape, parts[0].names if len(shape) > 1 else None, parts[0].device)
