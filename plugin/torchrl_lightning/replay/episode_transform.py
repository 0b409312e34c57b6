"""The base of transforms that read more of the episodes of sampled steps than a batch holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs.transforms import Transform

from torchrl_lightning.entries import entry_of
from torchrl_lightning.kernels.indices import integers
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex
from torchrl_lightning.replay.rings import rings_in
from torchrl_lightning.replay.storage import RingStorage


class EpisodeTransform(Transform):
    """A transform on read that looks up other steps of the episodes that a batch was drawn from.

    The :class:`ExperienceBuffer` that it is given to, alone or in a ``Compose``, binds it to its storage and shows it
    the cells of each batch.
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._storage: RingStorage | None = None

    @property
    def storage(self) -> RingStorage:
        """The storage of its buffer; a ValueError if it has none."""
        if self._storage is None:
            raise ValueError(
                f"{type(self).__name__} reads the storage of its buffer, and it is in none: give it to an "
                "ExperienceBuffer, by transform= or append_transform."
            )
        return self._storage

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index over the storage; a ValueError if there is none."""
        rings = rings_in(self.storage)
        if rings is None or rings.index is None:
            raise ValueError(
                f"{type(self).__name__} needs to know where episodes end, but nothing does: write "
                '("next", "done") with the first data, into a RingWriter that tracks episodes. ' + NO_INDEX_HINT
            )
        return rings.index

    def cells_of(self, batch: TensorDictBase) -> Tensor:
        """Return the cells that a batch was read from, of its shape; a KeyError if it does not say."""
        index = entry_of(batch, "index")
        if index is None:
            raise KeyError(f"{type(self).__name__} needs the entry 'index', the cells that a batch was read from.")
        return integers(index, "Cells").cpu()

    def check_free(self, *storages: RingStorage | None) -> None:
        """Refuse a transform that reads another storage than these."""
        if self._storage not in (None, *storages):
            raise ValueError(
                f"This {type(self).__name__} reads the storage of another buffer; give each buffer one of its own, "
                "e.g. by clone()."
            )

    def read_from(self, storage: RingStorage | None) -> None:
        """Read this storage from now on."""
        self._storage = storage

    def clone(self) -> Self:
        """Return a copy that is in no buffer."""
        copied = super().clone()
        copied.read_from(None)
        return copied


def transforms_in(transform: Any) -> Iterator[nn.Module]:
    """Iterate over a transform and those in it."""
    return transform.modules() if isinstance(transform, nn.Module) else iter(())


def tell(transform: Any, goals: Any) -> None:
    """Hand on what an environment says of goals to the transforms that ask for it, by a method ``use_environment``."""
    for each in transforms_in(transform):
        if (use := getattr(each, "use_environment", None)) is not None:
            use(goals)


def bind(transform: Any, storage: RingStorage, instead_of: RingStorage | None = None) -> None:
    """Let the transforms of a buffer read its storage; a ValueError if one of them belongs to another buffer."""
    bound = [each for each in transforms_in(transform) if isinstance(each, EpisodeTransform)]
    for each in bound:
        each.check_free(storage, instead_of)
    for each in bound:
        each.read_from(storage)
