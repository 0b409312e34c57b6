"""Stack the last frames of sampled steps when they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.images import stack_axis
from torchrl_lightning._core.tree import entry_of, nested_keys, next_key
from torchrl_lightning._core.validators import Checked, integer
from torchrl_lightning.environments.wrappers.frame_stack import is_image
from torchrl_lightning.replay.episode_transform import EpisodeTransform


class FrameStackTransform(EpisodeTransform):
    """Stack the last frames of sampled steps, like a recipe's ``frame_stack`` during collection.

    Use it as ``transform=`` of an :class:`ExperienceBuffer` with a writer that tracks episodes. The buffer stores
    single frames. ``[H, W]`` becomes ``[K, H, W]``, ``[C, H, W]`` becomes ``[K * C, H, W]``, and ``[H, W, C]`` becomes
    ``[H, W, K * C]``. A stack has frames of one episode only, also in windows. At the start of an episode, the first
    frame is repeated to fill the stack. If the first frame is overwritten, the oldest stored frame is repeated. Frames
    under ``"next"`` follow the frames of their step.

    Args:
        frame_stack: frames per stack, ``K``.
        keys: keys of the frame entries.

    Raises:
        ValueError: ``frame_stack`` is not positive. Sampling raises this error if the transform lacks a buffer, the
            writer does not track episodes, or an entry does not hold images.
        KeyError: a sampled batch lacks an entry.

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
        """Stack the frames of a batch; its entry ``index`` has the batch shape."""
        episodes = self.episodes
        env, position = episodes.steps_of(self.cells_of(tensordict).numpy())
        begin, _ = episodes.bounds(torch.from_numpy(env), torch.from_numpy(position))
        steps = entry_of(tensordict, "steps_to_next_obs")  # n-step returns: "next" belongs to a later step
        last = position if steps is None else position + steps.cpu().numpy() - 1

        def frames_before(last_position: NDArray[np.int64], count: int) -> Tensor:
            positions = np.maximum(last_position[..., None] + np.arange(1 - count, 1), begin.numpy()[..., None])
            return torch.from_numpy(episodes.cells_of(env[..., None], positions))

        stack_cells = frames_before(position, self.frame_stack)
        earlier_cells = frames_before(last, self.frame_stack - 1)
        for key in self.keys:
            (path, stored), *_ = self.storage.leaves(key)
            if not is_image(stored.shape[1:]):
                raise ValueError(
                    f"The entry {key!r} must be images [H, W] or with 3 dimensions, got {list(stored.shape[1:])}."
                )
            tensordict.set(key, _stack(_gather(stored, stack_cells), position.ndim))
            next_frames = entry_of(tensordict, next_key(path))
            if next_frames is not None:
                newest = next_frames.to(stored.device).unsqueeze(position.ndim)
                frames = torch.cat([_gather(stored, earlier_cells), newest], position.ndim)
                tensordict.set(next_key(path), _stack(frames, position.ndim))
        return tensordict


def _gather(stored: Tensor, cells: Tensor) -> Tensor:
    return stored.index_select(0, cells.reshape(-1).to(stored.device)).view(*cells.shape, *stored.shape[1:])


def _stack(frames: Tensor, batch_dims: int) -> Tensor:
    shape = frames.shape[batch_dims + 1 :]
    if len(shape) == 2:
        return frames
    axis = batch_dims + stack_axis(shape)
    return frames.movedim(batch_dims, axis).flatten(axis, axis + 1)
