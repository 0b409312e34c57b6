"""Count the frames of a run, and, separately, the replayed steps."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from torch import Tensor

from torchrl_lightning._core.ranks import all_gather
from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer
from torchrl_lightning.datamodules._run.trainer_checks import is_endless

logger = logging.getLogger(__name__)


class HasTotalFrames(Protocol):
    """A DataModule with the setting ``total_frames``."""

    total_frames: int


class FrameClock(Stateful):
    """Count the frames of all ranks and, separately, replayed steps, for example of demonstrations.

    Args:
        run: Has ``total_frames``: the run ends after this number of frames, or after this number of replayed steps
            without a new frame; -1 for never. This number may change during the run.
        frames: Initial number of frames.

    Attributes:
        frames: Frames of the run.
        replayed: Replayed steps of the run.
        consecutive_replays: Replayed steps since the last frame.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> clock = FrameClock(SimpleNamespace(total_frames=9))
        >>> clock.add(3, 1, torch.tensor([[[True], [False], [True]]]))
        >>> clock.frames, clock.replayed, clock.is_exhausted
        (1, 2, False)
    """

    OWNER = "replayed steps"
    STATE = {
        "count": Attribute(bounded_integer(), "replayed"),
        "alone": Attribute(bounded_integer(), "consecutive_replays"),
    }

    def __init__(self, run: HasTotalFrames, frames: int = 0) -> None:
        self.run, self.frames = run, frames
        self.replayed = self.consecutive_replays = 0
        self._has_warned = False

    @property
    def is_exhausted(self) -> bool:
        """Whether ``total_frames`` frames are collected, or so many steps were replayed since the last frame."""
        return 0 <= self.run.total_frames <= max(self.frames, self.consecutive_replays)

    def announce(self, rollout: int, trainer: Any) -> None:
        """Log if the run never ends, or if its last rollout (``rollout`` frames on all ranks) will exceed the total."""
        self.check_end(trainer)
        total = self.run.total_frames
        if total > 0 and total % rollout:
            last = -(-total // rollout) * rollout
            logger.info(
                "total_frames=%d is rounded up to %d, a multiple of %d frames per rollout.", total, last, rollout
            )

    def check_end(self, trainer: Any, collected: float = -1) -> None:
        """Warn once if neither the total, nor the trainer, nor the collector's number of frames ends the run."""
        has_end = self.run.total_frames >= 0 or 0 <= collected < float("inf")  # TorchRL's collectors replace -1 by inf
        if self._has_warned or trainer is None or has_end or not is_endless(trainer):
            return
        self._has_warned = True
        if trainer.is_global_zero:
            logger.warning(
                "this run never ends: the DataModule has total_frames=%d, and the Trainer has no max_epochs, max_steps "
                "or max_time. Set one of them.",
                self.run.total_frames,
            )

    def announce_warmup(self, frames: int) -> None:
        """Log a warning if the warm-up exceeds the total of the run."""
        if 0 <= self.run.total_frames < frames:
            logger.warning(
                "total_frames=%d is raised to %d, because warmup_frames=%d frames come before the first update, which "
                "is then the only one. Raise total_frames, or lower warmup_frames.",
                self.run.total_frames,
                frames,
                frames,
            )

    def add(self, steps: int, world_size: int, replayed: Tensor | None) -> None:
        """Count the steps of one rollout on each rank; ``replayed`` is the mask of replayed steps, or None.

        A warning is logged if ``total_frames`` steps were replayed since the last frame.
        """
        if replayed is None:
            self.frames += steps * world_size
            return
        num_replayed = int(replayed.sum())
        counts = all_gather((replayed.numel() - num_replayed, num_replayed))
        num_collected, num_replayed = (sum(rank) for rank in zip(*counts, strict=True))
        self.frames += num_collected
        self.replayed += num_replayed
        self.consecutive_replays = 0 if num_collected else self.consecutive_replays + num_replayed
        if 0 <= self.run.total_frames <= self.consecutive_replays:
            logger.warning(self.end_reason)

    def metrics(self) -> dict[str, float]:
        """Return ``frames``, and ``frames/replayed`` if steps were replayed."""
        return {"frames": float(self.frames), **({"frames/replayed": float(self.replayed)} if self.replayed else {})}

    @property
    def end_reason(self) -> str:
        """The reason why the run ends, as a sentence."""
        if self.frames >= self.run.total_frames:
            return f"all {self.frames} frames are collected; raise total_frames={self.run.total_frames} to continue."
        return (
            f"the last {self.consecutive_replays} steps were all replayed: training stops after {self.frames} of "
            f"total_frames={self.run.total_frames}. Lower the probability of a replay (rho + phi of PPODBuffer)."
        )
