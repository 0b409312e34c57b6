"""A buffer whose storage, writer, sampler and transforms can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from torchrl_lightning.replay.builders import check_parts, init_priorities
from torchrl_lightning.replay.episode_transform import bind_transforms
from torchrl_lightning.replay.sharing import ShareableBuffer


class ReplaceableParts(ShareableBuffer):
    """A buffer over rings that validates new parts before it replaces the old ones."""

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Replace the storage by another RingStorage; return the old one."""
        check_parts(storage, None, None)
        bind_transforms(self.transform, storage, self.storage)
        return super().set_storage(storage, collate_fn)

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer by another RingWriter; return the old one."""
        check_parts(None, writer, None)
        return super().set_writer(writer)

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; return the old one."""
        check_parts(None, None, sampler)
        init_priorities(sampler, self.storage.max_size)
        return super().set_sampler(sampler)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Append a transform; return the buffer itself."""
        bind_transforms(transform, self.storage)
        return super().append_transform(transform, invert=invert)

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> Self:
        """Insert a transform before position ``index``; return the buffer itself."""
        bind_transforms(transform, self.storage)
        return super().insert_transform(index, transform, invert=invert)
