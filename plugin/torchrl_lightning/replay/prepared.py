"""Rows whose memory stays the same while their content changes, matched with a buffer's cells once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.kernels.rows import NO_FLAGS

if TYPE_CHECKING:
    from torchrl_lightning.replay.buffer import ExperienceBuffer


class PreparedRows:
    """Write the same TensorDict again and again, as ``buffer.extend(rows)`` does, by one compiled call.

    Args:
        buffer: where to; it has stored these rows before.
        rows: steps of all environments, ``[num_envs]`` or time-major ``[T, num_envs]``.

    Raises:
        ValueError: ``extend`` has more to do with them each time.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning.replay import ExperienceBuffer, RingStorage
        >>> buffer, rows = ExperienceBuffer(storage=RingStorage(4)), TensorDict({"a": torch.zeros(1)}, [1])
        >>> _ = buffer.extend(rows)
        >>> prepared = PreparedRows(buffer, rows)
        >>> rows["a"].fill_(3)
        tensor([3.])
        >>> prepared.write().tolist(), buffer[:]["a"].tolist()
        ([1], [0.0, 3.0])
    """

    def __init__(self, buffer: ExperienceBuffer, rows: TensorDictBase) -> None:
        self.buffer, self.rows = buffer, rows
        storage, _, writer = buffer.parts
        if storage.cells is None:
            raise ValueError(f"Rows are prepared for a ring that has stored some, got {storage} and {writer}.")
        flat = rows if rows.ndim == 1 else rows.reshape(-1)
        count = flat.shape[0]
        self._writer, self._storage, self._steps = writer, storage, count // writer.num_envs
        self._leaves, addresses = storage.check(flat, count)  # the addresses are valid as long as these are kept
        self._done, self._init = writer.flags(flat, self._leaves, self._steps)
        given = [rows.get(path).data_ptr() for path in storage.cells.places]
        flags = [flag for key in (writer.done_key, writer.init_key) if (flag := flat.get(key, None)) is not None]
        if (
            addresses is None
            or given != [leaf.data_ptr() for leaf in self._leaves]
            or any(flag.dtype != torch.bool or flag.numel() != count for flag in flags)
            or flat.get(buffer.priority_key, None) is not None
            or buffer.transforms
        ):
            raise ValueError(
                "Rows that are converted, transformed or bring priorities cannot be prepared; write them by extend."
            )
        self._sources = addresses[0]

    def write(self) -> Tensor:
        """Write what the rows hold now, and return the cells."""
        return self.buffer.write_by(self._advance)

    def _advance(self) -> Tensor:
        writer, cells = self._writer, self._storage.cells
        assert cells is not None
        flags = (NO_FLAGS, NO_FLAGS) if writer.rings.index is None else (self._done, self._init)
        return writer.advance((self._sources, cells.table), None, self._steps, *flags)
