"""A data set on its way into a replay buffer: read and checked before training, written when the policy is there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.datamodules.discounts import build_buffer
from torchrl_lightning.datamodules.mixed_replay import MixedReplay
from torchrl_lightning.demonstrations.dataset import placed, read_dataset, transitions, write_episode
from torchrl_lightning.entries import path_of
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.policies import recurrent_states
from torchrl_lightning.replay import ExperienceBuffer


class BufferedDataset:
    """The demonstrations of a data set, each whole in the ring that had the fewest steps before.

    Args:
        dataset: what :func:`~torchrl_lightning.read_dataset` takes.
        env: the environment that they are to be of: an id, a factory or a ready one.
        specs: its specs, with a frame stack.
        buffer: where they are to be written; it is empty.

    Raises:
        DemonstrationFault: the data set cannot be read, is of another environment, or has more steps than the buffer.
    """

    def __init__(self, dataset: Any, env: Any, specs: EnvironmentSpecs, buffer: ExperienceBuffer) -> None:
        self._specs, self._buffer = specs, buffer
        self._placed = placed(buffer, read_dataset(dataset, env), f"dataset={dataset}")

    def write(self, policy: Any, note: Callable[[TensorDictBase, Tensor], None] | None) -> None:
        """Write and let go of them, unless a checkpoint has brought them.

        Args:
            policy: what acts; a recurrent one finds its first states at each step.
            note: what takes rows ``[1, T]`` of an environment into the statistics; None if they hold them.
        """
        if len(self._buffer):
            return
        states = recurrent_states(policy, 1)
        while self._placed:
            ring, demonstration = self._placed.popleft()  # which frees it
            rows = transitions(demonstration, self._specs)
            for key, state in states.items():
                rows[key] = rows["next", *path_of(key)] = state.expand(len(rows), *state.shape[1:])
            write_episode(self._buffer, ring, rows)
            if note is not None:
                note(rows.unsqueeze(0), torch.tensor([ring]))


class BesideData:
    """Make the source of batches of which a share comes from data, in a buffer of their own that nothing overwrites.

    Args:
        make_buffer: what builds the buffers.
        share: that of the data in each batch.
        dataset: the data set that the run was given.
        source: the source that it was given.

    Raises:
        ValueError: there are no data, the share is none, or another source is given.
    """

    def __init__(self, make_buffer: Callable[..., ExperienceBuffer], share: float, dataset: Any, source: Any) -> None:
        if not 0 < share < 1:
            raise ValueError(
                f"dataset_share={share} must be between 0 and 1; leave it out to draw from data and what is collected "
                "alike, and frames_per_update, too, to learn from the data alone."
            )
        if dataset is None or source is not None:
            raise ValueError(
                f"dataset_share={share} mixes what is collected with a data set; give dataset= and no source=, or "
                "leave it out."
            )
        # Storage and sampler of a partial serve one buffer, and will be those of what is collected.
        self._make, self._share = copy.deepcopy(make_buffer), share

    def __call__(self, buffer: ExperienceBuffer) -> MixedReplay:
        """Return it over the buffer of what is collected; that of the data is its second one, still empty."""
        # One ring, which holds an episode of any length; the discount is the one that the other was given.
        data = build_buffer(self._make, buffer, trial=True, num_envs=1)
        return MixedReplay(buffer, [data], [1 - self._share, self._share])


def refuse_collection(collector: Any, warmup_frames: float, total_frames: int) -> None:
    """Refuse, by a ValueError, what means nothing where nothing is collected."""
    given = {"collector": collector, "warmup_frames": warmup_frames or None}
    given["total_frames"] = None if total_frames == -1 else total_frames
    if useless := [f"{name}={value}" for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{', '.join(useless)}: with dataset= and frames_per_update=0 nothing is collected. Leave it out "
            "(max_epochs, max_steps or max_time of the trainer end such a run), or give frames_per_update=1."
        )
