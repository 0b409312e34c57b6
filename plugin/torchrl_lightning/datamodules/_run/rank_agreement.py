"""Keep all ranks of a run in one loop: a rank that collects or stops alone leaves the others waiting forever."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase

from torchrl_lightning._core.ranks import world_size

logger = logging.getLogger(__name__)


def rollouts_of_all_ranks(rollouts: Iterable[TensorDictBase], trainer: Any) -> Iterator[TensorDictBase]:
    """Yield this rank's rollouts until the collector of any rank has ended.

    The ranks compare their rollouts before each use. Our own collectors do not need this comparison, because all ranks
    collect the same number of frames.

    Args:
        rollouts: This rank's rollouts.
        trainer: The run's trainer; None without a run.

    Raises:
        ValueError: The rollouts of the ranks have different numbers of frames.
    """
    if world_size() == 1:
        yield from rollouts
        return
    iterator = iter(rollouts)
    while True:
        rollout = next(iterator, None)
        frames = 0 if rollout is None else rollout.numel()
        limits = torch.tensor([-frames, frames], device=trainer.strategy.root_device)
        dist.all_reduce(limits, dist.ReduceOp.MAX)
        smallest, largest = -int(limits[0]), int(limits[1])
        if rollout is None:
            return
        if not smallest:
            logger.warning("the last %d frames are not used, because another rank's collector has ended.", frames)
            return
        if smallest != largest:
            raise ValueError(
                f"the rollouts of a collector must have the same number of frames on all ranks, got {smallest} to "
                f"{largest}. Correct frames_per_batch of the collector."
            )
        yield rollout
