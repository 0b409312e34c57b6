"""Steps that were replayed in the place of the environment's, counted apart from its frames."""

from __future__ import annotations

from torch import Tensor

from torchrl_lightning.ranks import gathered
from torchrl_lightning.state import whole
from torchrl_lightning.stated import Kept, Stated


class ReplayedSteps(Stated):
    """Count the replayed steps of all ranks, such as those of demonstrations, which are no frames of the environment.

    Attributes:
        count: Replayed steps of the run.
        alone: Replayed steps since the last frame of the environment.

    Example:
        >>> import torch
        >>> replayed = ReplayedSteps()
        >>> replayed.add(torch.tensor([[[True], [False], [True]]])), replayed.count
        (1, 2)
    """

    OWNER = "replayed steps"
    STATE = {"count": Kept(whole()), "alone": Kept(whole())}

    def __init__(self) -> None:
        self.count = self.alone = 0

    def add(self, mask: Tensor) -> int:
        """Take which steps of a rollout were replayed, bool, and return how many of all ranks' were not."""
        replayed = int(mask.sum())
        counts = gathered((mask.numel() - replayed, replayed))
        own, replayed = (sum(each) for each in zip(*counts, strict=True))
        self.count += replayed
        self.alone = 0 if own else self.alone + replayed
        return own

    def metrics(self) -> dict[str, float]:
        """Return ``frames/replayed``, the replayed steps; nothing where none were."""
        return {"frames/replayed": float(self.count)} if self.count else {}

    def reason(self, frames: int, total_frames: int) -> str:
        """Return why a run ends that has come so far."""
        if frames >= total_frames:
            return f"all {frames} frames are collected; raise total_frames={total_frames} to go on."
        return (
            f"the last {self.alone} steps were all replayed, none came from the environment: training stops after "
            f"{frames} of total_frames={total_frames}; lower the probability of a replay (rho + phi of PPODBuffer)."
        )
