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

# Constants of SplitMix64.
_INCREMENT, _MULTIPLIER_1, _MULTIPLIER_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class HoldoutSplit(Stateful, ConfigSafe):
    """Split the rows of ring buffers into a training and a validation part; a row never changes its part.

    When a row is first seen, a hash of the seed, the environment and the ever-increasing position selects its part. The
    row stays in this part until another row overwrites its cell, even if ``max_size`` changes and the rings are
    rebuilt. So runs with the same seed hold out the same rows, regardless of how the rows were written. While
    ``max_validation`` rows are held out, all new rows are training rows.

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
        "held": Attribute(tensor(torch.int64, None, low=0), "_held_out_cells"),
        "seen": Attribute(tensor(torch.int64, None, low=0), "_next_unseen"),
        "restart_offset": Attribute(bounded_integer(), "_restart_offset"),
    }

    validation_fraction = Checked("_check_fraction")
    max_validation = Checked(integer)
    seed = Checked(lambda value, name: integer(value, name, 0))

    def __init__(self, validation_fraction: float = 0.2, max_validation: int = 5000, *, seed: int = 0) -> None:
        self.validation_fraction, self.max_validation, self.seed = validation_fraction, max_validation, seed
        self._is_held_out = torch.zeros(0, dtype=torch.bool)  # one flag per cell
        # First unseen position of each ring. Positions continue when the rings are emptied.
        self._next_unseen = torch.zeros(0, dtype=torch.int64)
        self._restart_offset = 0

    @staticmethod
    def _check_fraction(value: Any, name: str) -> float:
        number = fraction(value, name)
        if number in (0.0, 1.0):
            raise ValueError(f"{name} must be above 0 and below 1, got {value!r}.")
        return number

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_held_out": (len(self._is_held_out), self._held_out_cells)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        count, cells = state["_is_held_out"]
        self._is_held_out = torch.zeros(count, dtype=torch.bool)
        self._is_held_out[cells] = True

    def extend(self, writer: RingWriter) -> None:
        """Assign all rows written since the last call."""
        snapshot, restart_offset = writer.rings.snapshot(), writer.rings.restart_offset
        ends = snapshot.numpy()
        oldest = ends - writer.filled.numpy()
        cells = writer.length * writer.num_envs
        if len(self._next_unseen) != writer.num_envs:
            self._is_held_out = torch.zeros(cells, dtype=torch.bool)
            self._next_unseen = torch.zeros(writer.num_envs, dtype=torch.int64)
        elif (restart_offset, cells) != (self._restart_offset, len(self._is_held_out)):  # rings were emptied or rebuilt
            self._move_flags(writer, torch.from_numpy(oldest), restart_offset)
        else:  # removed steps do not count as held out
            held_out = self._is_held_out.nonzero().squeeze(1)
            self._is_held_out[held_out[~writer.rings.is_filled(held_out)]] = False
        env, serial, _ = steps_between(np.maximum(self._next_unseen.numpy(), oldest), ends - 1)
        order = np.lexsort((env, serial))
        env, serial = env[order], serial[order]
        written = writer.cell(torch.from_numpy(env), torch.from_numpy(serial - restart_offset))
        self._is_held_out[written] = False
        num_free = self.max_validation - int(self._is_held_out.sum())
        is_selected = _hash_to_unit(self.seed, env, serial) < self.validation_fraction
        self._is_held_out[written] = torch.from_numpy(is_selected & (is_selected.cumsum() <= num_free))
        self._next_unseen, self._restart_offset = snapshot.clone(), restart_offset

    def count_training(self, num_envs: int, steps: int) -> int:
        """Return the number of training rows if each environment writes ``steps`` rows."""
        serial, env = (grid.reshape(-1) for grid in np.mgrid[:steps, :num_envs])
        is_selected = _hash_to_unit(self.seed, env, serial) < self.validation_fraction
        return int(len(is_selected) - min(is_selected.sum(), self.max_validation))

    def _move_flags(self, writer: RingWriter, oldest: Tensor, restart_offset: int) -> None:
        """Move the flags of held-out rows to their new cells; drop the flags of overwritten or removed rows."""
        old_rings = Rings.at(len(self._is_held_out) // len(self._next_unseen), self._next_unseen - self._restart_offset)
        cells = self._is_held_out.nonzero().squeeze(1)
        env, serial = old_rings.env_of(cells), old_rings.position_of(cells) + self._restart_offset
        is_stored = serial >= oldest[env]
        self._is_held_out = torch.zeros(writer.length * writer.num_envs, dtype=torch.bool)
        self._is_held_out[writer.cell(env[is_stored], serial[is_stored] - restart_offset)] = True

    def parts(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training cells and the validation cells among ``cells``, in the order of ``cells``.

        Raises:
            ValueError: one of the two parts is empty.
        """
        is_held_out = self._is_held_out[cells.cpu()].to(cells.device)
        training, validation = cells[~is_held_out], cells[is_held_out]
        for part, name in ((training, "training"), (validation, "validation")):
            if not len(part):
                raise ValueError(
                    f"validation_fraction={self.validation_fraction} and max_validation={self.max_validation} leave "
                    f"none of {len(cells)} rows for {name}. Collect more first, or choose another fraction."
                )
        return training, validation

    # ------------------------------------------------------------------ state

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        tensor(torch.int64, None, high=values["cells"] - 1)(values["held"], "'held'")

    @property
    def _num_cells(self) -> int:
        return len(self._is_held_out)

    @_num_cells.setter
    def _num_cells(self, number: int) -> None:
        self._is_held_out = torch.zeros(number, dtype=torch.bool)

    @property
    def _held_out_cells(self) -> Tensor:
        return self._is_held_out.nonzero().squeeze(1)

    @_held_out_cells.setter
    def _held_out_cells(self, cells: Tensor) -> None:
        self._is_held_out[cells] = True


def _hash_to_unit(seed: int, env: NDArray[np.int64], serial: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for each row (SplitMix64)."""
    mixed = _splitmix64(np.full(len(env), seed, np.uint64))
    mixed = _splitmix64(_splitmix64(mixed + env.astype(np.uint64)) + serial.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = numbers + _INCREMENT
    numbers = (numbers ^ numbers >> np.uint64(30)) * _MULTIPLIER_1
    numbers = (numbers ^ numbers >> np.uint64(27)) * _MULTIPLIER_2
    return numbers ^ numbers >> np.uint64(31)
