"""Where the steps of a batch lie, for transforms that read more of their episodes."""

from __future__ import annotations

from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.entries import entry_of
from torchrl_lightning.replay import EpisodeIndex, RingStorage, RingWriter
from torchrl_lightning.segment_kernels import integers


class ReadsEpisodes(Protocol):
    """A transform that reads a storage."""

    storage: RingStorage


def episodes_of(transform: ReadsEpisodes) -> EpisodeIndex:
    """Return the episode index over the storage that a transform reads; a ValueError if there is none."""
    writer: Any = transform.storage.writer
    if not isinstance(writer, RingWriter) or writer.index is None:
        raise ValueError(
            f"{type(transform).__name__} needs to know where episodes end, but nothing does: give it the storage of "
            'its own buffer, and write ("next", "done") with the first data, into a RingWriter that tracks episodes.'
        )
    return writer.index


def cells_of(batch: TensorDictBase, transform: ReadsEpisodes) -> Tensor:
    """Return the cells that a batch was read from, of its shape; a KeyError if it does not say."""
    index = entry_of(batch, "index")
    if index is None:
        raise KeyError(
            f"{type(transform).__name__} needs the entry 'index', the cells that a batch was read from; append it to "
            "an ExperienceBuffer, which shows it to its transforms."
        )
    return integers(index, "Cells").cpu()
