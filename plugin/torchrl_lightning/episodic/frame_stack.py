"""The last frames of sampled steps as one, put together when they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import entry_of, nested_keys, next_key
from torchrl_lightning.environments.frame_stack import is_image
from torchrl_lightning.images import stack_axis
from torchrl_lightning.ranges import Checked, integer
from torchrl_lightning.replay.episode_transform import EpisodeTransform


class FrameStackTransform(EpisodeTransform):
    """Show sampled steps the last frames of their episodes as one, as a recipe's ``frame_stack`` does while playing.

    A transform on read, for the ``transform=`` of an :class:`ExperienceBuffer` whose writer tracks episodes: what is
    stored are single frames. ``[H, W]`` becomes ``[K, H, W]``, ``[C, H, W]`` ``[K * C, H, W]``, and ``[H, W, C]``
    ``[H, W, K * C]``. Each step of a batch, in a window too, is stacked within its own episode: before the first frame
    of an episode comes that frame again, and before the oldest stored one, where the episode's beginning is
    overwritten, the oldest again. What lies under ``"next"`` is stacked behind the frames of its step.

    Args:
        frame_stack: frames of a stack, ``K``.
        keys: the entries that hold frames.

    Raises:
        ValueError: ``frame_stack`` is not positive; when sampling: it is in no buffer, nothing tracks episodes, or an
            entry holds no images.
        KeyError: when sampling: an entry is missing.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer
        >>> buffer = ExperienceBuffer(transform=FrameStackTransform(3))
        >>> frames, done = torch.arange(3.0).view(3, 1, 1).expand(3, 4, 4), torch.zeros(3, 1, dtype=torch.bool)
        >>> after = {"observation": frames + 1, "done": done}
        >>> _ = buffer.extend(TensorDict({"observation": frames, "next": after}, [3]))
        >>> batch = buffer.transform(buffer.storage.get(torch.tensor([0, 2])).set("index", torch.tensor([0, 2])))
        >>> batch["observation"][:, :, 0, 0].tolist(), batch["next", "observation"][:, :, 0, 0].tolist()
        ([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]], [[0.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
    """

    frame_stack = Checked(integer)
    keys = Checked(lambda value, name: nested_keys(value))

    def __init__(self, frame_stack: int, *, keys: Sequence[NestedKey] = ("observation",)) -> None:
        super().__init__()
        self.frame_stack = frame_stack
        self.keys = keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Stack the frames of a batch, which has an entry ``index`` of its shape."""
        episodes = self.episodes
        env, position = episodes.steps_of(self.cells_of(tensordict).numpy())
        begin, _ = episodes.bounds(torch.from_numpy(env), torch.from_numpy(position))
        steps = entry_of(tensordict, "steps_to_next_obs")  # what is under "next" may be of a later step
        last = position if steps is None else position + steps.cpu().numpy() - 1

        def before(where: NDArray[np.int64], count: int) -> Tensor:
            positions = np.maximum(where[..., None] + np.arange(1 - count, 1), begin.numpy()[..., None])
            return torch.from_numpy(episodes.cells_of(env[..., None], positions))

        stacks, earlier = before(position, self.frame_stack), before(last, self.frame_stack - 1)
        for key in self.keys:
            (path, stored), *_ = self.storage.leaves(key)
            if not is_image(stored.shape[1:]):
                raise ValueError(
                    f"Entry {key!r} is {list(stored.shape[1:])}; stacked are images, [H, W] or of 3 dimensions."
                )
            tensordict.set(key, _stacked(_read(stored, stacks), position.ndim))
            after = entry_of(tensordict, next_key(path))
            if after is not None:
                newest = after.to(stored.device).unsqueeze(position.ndim)
                frames = torch.cat([_read(stored, earlier), newest], position.ndim)
                tensordict.set(next_key(path), _stacked(frames, position.ndim))
        return tensordict


def _read(stored: Tensor, cells: Tensor) -> Tensor:
    return stored.index_select(0, cells.reshape(-1).to(stored.device)).view(*cells.shape, *stored.shape[1:])


def _stacked(frames: Tensor, batch_dims: int) -> Tensor:
    shape = frames.shape[batch_dims + 1 :]
    if len(shape) == 2:
        return frames
    axis = batch_dims + stack_axis(shape)
    return frames.movedim(batch_dims, axis).flatten(axis, axis + 1)
