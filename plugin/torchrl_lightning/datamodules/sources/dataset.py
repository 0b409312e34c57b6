"""Fill a replay buffer from a data set: read and check it before training, write it when the policy is built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.tree import path_of
from torchrl_lightning.datamodules._run.discounts import build_buffer
from torchrl_lightning.datamodules.sources.mixed_replay import MixedReplay
from torchrl_lightning.demonstrations.io.demo_dataset import assign_rings, read_dataset, transitions, write_episode
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.policy_calls import recurrent_states
from torchrl_lightning.replay import ExperienceBuffer


class BufferedDataset:
    """The demonstrations of a data set, each assigned to the ring with the fewest steps so far.

    Args:
        dataset: an argument of :func:`~torchrl_lightning.read_dataset`.
        env: the expected environment: an id, a factory or a ready environment.
        specs: the specs of the environment, after frame stacking.
        buffer: the empty buffer.

    Raises:
        DemonstrationFault: The data set cannot be read, is of another environment, or has more steps than the buffer.
    """

    def __init__(self, dataset: Any, env: Any, specs: EnvironmentSpecs, buffer: ExperienceBuffer) -> None:
        self._specs, self._buffer = specs, buffer
        self._demonstrations = assign_rings(buffer, read_dataset(dataset, env), f"dataset={dataset}")

    def write(self, policy: Any, update_statistics: Callable[[TensorDictBase, Tensor], None] | None) -> None:
        """Write the demonstrations and free them, unless a checkpoint has already filled the buffer.

        Args:
            policy: the policy; the initial states of a recurrent policy are stored in each step.
            update_statistics: adds rows ``[1, T]`` of an environment to the statistics; None leaves the statistics
                unchanged.
        """
        if len(self._buffer):
            return
        states = recurrent_states(policy, 1)
        while self._demonstrations:
            ring, demonstration = self._demonstrations.popleft()  # frees the demonstration
            rows = transitions(demonstration, self._specs)
            for key, state in states.items():
                rows[key] = rows["next", *path_of(key)] = state.expand(len(rows), *state.shape[1:])
            write_episode(self._buffer, ring, rows)
            if update_statistics is not None:
                update_statistics(rows.unsqueeze(0), torch.tensor([ring]))


class DatasetMix:
    """Build a source that draws a share of each batch from a data set in a separate buffer.

    Args:
        make_buffer: the factory of both buffers.
        share: the share of the data in each batch.
        dataset: the data set of the run.
        source: the ``source`` argument of the run, which must be None.

    Raises:
        ValueError: The data set is missing, the share is not between 0 and 1, or a source is given.
    """

    def __init__(self, make_buffer: Callable[..., ExperienceBuffer], share: float, dataset: Any, source: Any) -> None:
        if not 0 < share < 1:
            raise ValueError(
                f"dataset_share must be above 0 and below 1, got {share}. Leave it out to sample data and collected "
                "steps alike; leave frames_per_update out, too, to learn only from the data."
            )
        if dataset is None or source is not None:
            raise ValueError(
                f"dataset_share must be None without dataset= or with source=, got {share}. Set dataset= and leave "
                "source= out, or leave dataset_share out."
            )
        # Copy the factory, because a storage or sampler that a partial binds can serve only one buffer. It then serves
        # the buffer of collected steps.
        self._make, self._share = copy.deepcopy(make_buffer), share

    def __call__(self, buffer: ExperienceBuffer) -> MixedReplay:
        """Return a source over two buffers: the buffer of collected steps, and a new, empty one for the data."""
        # One ring holds episodes of any length. Both buffers have the same discount.
        data = build_buffer(self._make, buffer, trial=True, num_envs=1)
        return MixedReplay(buffer, [data], [1 - self._share, self._share])


def check_no_collection(collector: Any, warmup_frames: float, total_frames: int) -> None:
    """Raise a ValueError if a run without collection has settings of collection."""
    settings = {"collector": collector, "warmup_frames": warmup_frames or None}
    settings["total_frames"] = None if total_frames == -1 else total_frames
    if unused := [f"{name}={value}" for name, value in settings.items() if value is not None]:
        raise ValueError(
            f"{', '.join(unused)} would have no effect: with dataset= and frames_per_update=0 the run collects no "
            "frames. Leave it out (max_epochs, max_steps or max_time end the run), or set frames_per_update=1."
        )
