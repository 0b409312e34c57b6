"""The base class of transforms that read further steps of the sampled episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.tree import entry_of
from torchrl_lightning.kernels.indices import as_integers
from torchrl_lightning.replay.episode_index import NO_INDEX_HINT, EpisodeIndex
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.rings import rings_of


class EpisodeTransform(Transform):
    """A transform of samples that reads other steps of the same episodes.

    An :class:`ExperienceBuffer` binds the transform, also inside a ``Compose``, to its storage, and adds the cells of
    each batch as the entry ``index``.
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._storage: RingStorage | None = None

    @property
    def storage(self) -> RingStorage:
        """The storage of the buffer; ValueError if the transform is in no buffer."""
        if self._storage is None:
            raise ValueError(
                f"{type(self).__name__} must belong to an ExperienceBuffer, because it reads the buffer's storage. "
                "Pass it as transform=, or call buffer.append_transform."
            )
        return self._storage

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the storage; ValueError if episodes are not tracked."""
        rings = rings_of(self.storage)
        if rings is None or rings.index is None:
            raise ValueError(
                f"{type(self).__name__} needs an episode index, which the writer does not have. Write "
                '("next", "done") with the first data, with a RingWriter that tracks episodes. ' + NO_INDEX_HINT
            )
        return rings.index

    def cells_of(self, batch: TensorDictBase) -> Tensor:
        """Return the cells of a batch, in the batch's shape; raise KeyError without the entry ``index``."""
        index = entry_of(batch, "index")
        if index is None:
            raise KeyError(f"{type(self).__name__} needs the entry 'index', the cells that a batch was read from.")
        return as_integers(index, "Cells").cpu()

    def check_unbound(self, *storages: RingStorage | None) -> None:
        """Validate that the transform reads one of these storages or none; raise ValueError otherwise."""
        if self._storage not in (None, *storages):
            raise ValueError(
                f"This {type(self).__name__} belongs to another buffer. Build one for each buffer, e.g. with clone()."
            )

    def bind_storage(self, storage: RingStorage | None) -> None:
        """Set the storage to read."""
        self._storage = storage

    def clone(self) -> Self:
        """Return a copy that is bound to no storage."""
        copied = super().clone()
        copied.bind_storage(None)
        return copied


def iter_transforms(transform: Any) -> Iterator[nn.Module]:
    """Iterate over a transform and its nested transforms."""
    return transform.modules() if isinstance(transform, nn.Module) else iter(())


def set_goal_functions(transform: Any, goal_functions: Any) -> None:
    """Pass the goal functions of an environment to all transforms with a method ``use_environment``."""
    for module in iter_transforms(transform):
        if (use_environment := getattr(module, "use_environment", None)) is not None:
            use_environment(goal_functions)


def bind_transforms(transform: Any, storage: RingStorage, previous: RingStorage | None = None) -> None:
    """Bind the transforms of a buffer to its storage; raise ValueError if one of them belongs to another buffer."""
    episode_transforms = [module for module in iter_transforms(transform) if isinstance(module, EpisodeTransform)]
    for module in episode_transforms:
        module.check_unbound(storage, previous)
    for module in episode_transforms:
        module.bind_storage(storage)
