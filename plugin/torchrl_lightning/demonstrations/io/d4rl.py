"""Read the episodes of D4RL's HDF5 files as demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning._core.file_limits import FILE_BYTES
from torchrl_lightning.demonstrations.io.hdf5 import check_declared_size, open_hdf5
from torchrl_lightning.demonstrations.io.safetensors_files import demonstration_from_arrays, single_observation_key
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.specs import EnvironmentSpecs

Array = NDArray[Any]
END_FLAGS = ("terminals", "timeouts")
REQUIRED = ("observations", "actions", "rewards")
OPTIONAL = (*END_FLAGS, "next_observations")


def d4rl_demonstrations(
    path: Path, specs: EnvironmentSpecs, time_limit: int | None = None, *, limit: int = FILE_BYTES
) -> Iterator[Demonstration]:
    """Read the episodes of a D4RL file, one at a time; requires h5py from the extra ``d4rl`` or ``minari``.

    For files without ``next_observations``, the transitions equal D4RL's ``qlearning_dataset``. The step of a timeout
    is left out, because the observation after that step is unknown. For the same reason, the last step of the file is
    left out unless it ends an episode. The observation before the omitted step becomes the last observation of the
    shortened episode. The observation after a terminal step is unknown, but not required. ``infos`` and other entries
    are not read.

    Args:
        path: The file.
        specs: The specs of the environment. Its observation must be one array.
        time_limit: The number of steps until a timeout, for files without ``timeouts``.
        limit: The maximum size in bytes that the file may declare for its arrays.

    Raises:
        ImportError: h5py is not installed.
        ValueError: The file is damaged, lacks an entry or an episode end, or exceeds ``limit``.
    """
    key = single_observation_key(specs, "a D4RL file", "choose an environment with one observation array")
    with open_hdf5(path) as file:
        arrays = _read_arrays(file, path, limit)
    terminals, timeouts = _end_masks(arrays, path, time_limit)
    next_observations, count = arrays.get("next_observations"), len(terminals)
    last = np.flatnonzero(terminals | timeouts)
    for number, (begin, end) in enumerate(zip([0, *last + 1], [*last, count - 1], strict=True)):
        terminal, timeout = bool(terminals[end : end + 1].any()), bool(timeouts[end : end + 1].any())
        keeps_last_step = next_observations is not None or (terminal and not timeout)
        steps = slice(begin, end + keeps_last_step)
        if steps.stop <= steps.start:
            continue
        observations = arrays["observations"][begin : end + 1]
        if next_observations is not None:
            observations = np.concatenate((observations, next_observations[end : end + 1]))
        yield demonstration_from_arrays(
            specs,
            {key: observations},
            arrays["actions"][steps],
            arrays["rewards"][steps],
            last_known=next_observations is not None or not keeps_last_step,
            name=f"{path}, episode {number}",
            terminated=terminal and keeps_last_step,
            truncated=timeout or not terminal,
        )


def _read_arrays(file: Any, path: Path, limit: int) -> dict[str, Array]:
    """Return the arrays ``[T, ...]`` in a file as a dict."""
    from h5py import Dataset

    datasets = {name: file[name] for name in (*REQUIRED, *OPTIONAL) if name in file}
    if missing := [name for name in REQUIRED if name not in datasets]:
        raise ValueError(f"{path} was refused: a D4RL file must contain {' and '.join(missing)}.")
    # An HDF5 group does not have a shape and dtype, and an empty data set does not have a shape.
    shapes = {name: entry.shape or () if isinstance(entry, Dataset) else () for name, entry in datasets.items()}
    for name, entry in datasets.items():
        if not shapes[name] or shapes[name][:1] != shapes["rewards"][:1] or entry.dtype.kind not in "biuf":
            raise ValueError(f"{path} was refused: {name!r} must be a numeric array with a row for each reward.")
    check_declared_size(datasets.values(), path, limit)
    return {name: entry[()] for name, entry in datasets.items()}


def _end_masks(arrays: Mapping[str, Array], path: Path, time_limit: int | None) -> tuple[Array, Array]:
    """Return two masks ``[T]``: the steps that terminated an episode, and the steps that timed out."""
    count = len(arrays["rewards"])
    flags = (arrays.get(name, np.zeros(count)).reshape(count, -1) for name in END_FLAGS)
    terminals, timeouts = (np.asarray(flag.any(1)) for flag in flags)
    if "timeouts" not in arrays and time_limit is not None:
        begins = np.maximum.accumulate(np.where(np.r_[True, terminals[:-1]], np.arange(count), 0))
        timeouts = ((np.arange(count) - begins + 1) % time_limit == 0) & ~terminals
    if not np.any(terminals | timeouts):
        raise ValueError(f"{path} was refused: neither terminals nor timeouts marks the end of an episode.")
    return terminals, timeouts
