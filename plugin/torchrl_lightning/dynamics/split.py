"""Split stored rows into training and validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, tensor
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import Checked, fraction, integer
from torchrl_lightning.replay import RingWriter
from torchrl_lightning.replay.positions import steps_between
from torchrl_lightning.replay.rings import Rings

_STEP, _ONCE, _TWICE = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class HoldoutSplit(Stateful, ConfigSafe):
    """Split the rows of ring buffers into a training and a validation part; a row never changes its part.

    A hash of the seed, the environment and the ever-increasing position assigns a row when it is first seen. The
    assignment stays until another row overwrites the cell, even if ``max_size`` changes and the rings are rebuilt. So
    runs with the same seed split the same rows in the same way, however they were written. Once ``max_validation`` rows
    are held out, all further rows are training rows until held-out rows are overwritten.

    Args:
        validation_fraction: fraction of held-out rows.
        max_validation: maximum number of held-out rows.
        seed: seed of the hash.

    Raises:
        ValueError: the fraction is not between 0 and 1, or a number is out of range.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer, RingStorage
        >>> buffer, split = ExperienceBuffer(storage=RingStorage(100)), HoldoutSplit(0.25, max_validation=10)
        >>> _ = buffer.extend(TensorDict({"a": torch.arange(20)}, [20]))
        >>> split.extend(buffer.writer)
        >>> training, validation = split.parts(torch.arange(20))
        >>> validation.tolist()
        [0, 4, 8, 18]
    """

    OWNER, VERSION = "split", 1
    STATE = {
        "seed": Attribute(bounded_integer()),
        "validation_fraction": Attribute(),
        "max_validation": Attribute(),
        "cells": Attribute(bounded_integer(), "_num_cells"),
        "held": Attribute(tensor(torch.int64, None, low=0), "_held_cells"),
        "seen": Attribute(tensor(torch.int64, None, low=0), "_seen"),
        "restart_offset": Attribute(bounded_integer(), "_era"),
    }

    validation_fraction = Checked("_check_fraction")
    max_validation = Checked(integer)
    seed = Checked(lambda value, name: integer(value, name, 0))

    def __init__(self, validation_fraction: float = 0.2, max_validation: int = 5000, *, seed: int = 0) -> None:
        self.validation_fraction, self.max_validation, self.seed = validation_fraction, max_validation, seed
        self._held = torch.zeros(0, dtype=torch.bool)  # one flag per cell
        self._seen = torch.zeros(0, dtype=torch.int64)  # first unseen position of each ring, counted over restarts
        self._era = 0

    @staticmethod
    def _check_fraction(value: Any, name: str) -> float:
        number = fraction(value, name)
        if number in (0.0, 1.0):
            raise ValueError(f"{name} must be above 0 and below 1, so that neither part is empty, got {value!r}.")
        return number

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": (len(self._held), self._held_cells)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        count, cells = state["_held"]
        self._held = torch.zeros(count, dtype=torch.bool)
        self._held[cells] = True

    def extend(self, writer: RingWriter) -> None:
        """Assign all rows written since the last call."""
        snapshot, era = writer.rings.snapshot(), writer.rings.restart_offset
        stamps = snapshot.numpy()
        oldest = stamps - writer.filled.numpy()
        cells = writer.length * writer.num_envs
        if len(self._seen) != writer.num_envs:
            self._held = torch.zeros(cells, dtype=torch.bool)
            self._seen = torch.zeros(writer.num_envs, dtype=torch.int64)
        elif era != self._era or len(self._held) != cells:  # the rings were emptied or rebuilt
            self._move(writer, torch.from_numpy(oldest), era)
        else:  # removed steps do not count as held out
            held = self._held.nonzero().squeeze(1)
            self._held[held[~writer.rings.is_filled(held)]] = False
        env, stamp, _ = steps_between(np.maximum(self._seen.numpy(), oldest), stamps - 1)
        order = np.lexsort((env, stamp))
        env, stamp = env[order], stamp[order]
        written = writer.cell(torch.from_numpy(env), torch.from_numpy(stamp - era))
        self._held[written] = False
        room = self.max_validation - int(self._held.sum())
        drawn = _shares(self.seed, env, stamp) < self.validation_fraction
        self._held[written] = torch.from_numpy(drawn & (drawn.cumsum() <= room))
        self._seen, self._era = snapshot.clone(), era

    def count_training(self, num_envs: int, steps: int) -> int:
        """Return the number of training rows among the first ``steps`` of each environment, written or not."""
        stamp, env = (each.reshape(-1) for each in np.mgrid[:steps, :num_envs])
        drawn = _shares(self.seed, env, stamp) < self.validation_fraction
        return int(len(drawn) - min(drawn.sum(), self.max_validation))

    def _move(self, writer: RingWriter, oldest: Tensor, era: int) -> None:
        """Move the flags of the held-out rows that are still stored to their new cells."""
        before = Rings.at(len(self._held) // len(self._seen), self._seen - self._era)
        cells = self._held.nonzero().squeeze(1)
        env, stamp = before.env_of(cells), before.position_of(cells) + self._era
        there = stamp >= oldest[env]
        self._held = torch.zeros(writer.length * writer.num_envs, dtype=torch.bool)
        self._held[writer.cell(env[there], stamp[there] - era)] = True

    def parts(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training cells and the validation cells among ``cells``, in their order.

        Raises:
            ValueError: one of the two parts is empty.
        """
        held = self._held[cells.cpu()].to(cells.device)
        training, validation = cells[~held], cells[held]
        for part, name in ((training, "training"), (validation, "validation")):
            if not len(part):
                raise ValueError(
                    f"validation_fraction={self.validation_fraction} and max_validation={self.max_validation} leave "
                    f"none of {len(cells)} rows for {name}; collect more first, or choose another fraction."
                )
        return training, validation

    # ------------------------------------------------------------------ state

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        tensor(torch.int64, None, high=values["cells"] - 1)(values["held"], "'held'")

    @property
    def _num_cells(self) -> int:
        return len(self._held)

    @_num_cells.setter
    def _num_cells(self, number: int) -> None:
        self._held = torch.zeros(number, dtype=torch.bool)

    @property
    def _held_cells(self) -> Tensor:
        return self._held.nonzero().squeeze(1)

    @_held_cells.setter
    def _held_cells(self, cells: Tensor) -> None:
        self._held[cells] = True


def _shares(seed: int, env: NDArray[np.int64], stamp: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for each row (SplitMix64)."""
    mixed = _mixed(np.full(len(env), seed, np.uint64))
    mixed = _mixed(_mixed(mixed + env.astype(np.uint64)) + stamp.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = numbers + _STEP
    numbers = (numbers ^ numbers >> np.uint64(30)) * _ONCE
    numbers = (numbers ^ numbers >> np.uint64(27)) * _TWICE
    return numbers ^ numbers >> np.uint64(31)
