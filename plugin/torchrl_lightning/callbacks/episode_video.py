"""Record videos of evaluation episodes during training."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.validators import Checked, integer
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.collectors.video import check_renderable

logger = logging.getLogger(__name__)


class EpisodeVideo(SparseCallback):
    """Write a video of one evaluation episode at every n-th evaluation.

    All videos of a run start in the same state, which training never uses. Recording does not change training. Rank
    zero writes each video, with the number of frames so far in the file name. The images of an episode stay in memory
    until the episode ends.

    Args:
        dirpath: The output folder, created when needed.
        every_n_evaluations: Number of evaluations from one video to the next. The first evaluation of a fit has a
            video.

    Raises:
        ValueError: ``every_n_evaluations`` is below 1.

    Examples:
        >>> EpisodeVideo("videos", every_n_evaluations=0)
        Traceback (most recent call last):
        ValueError: every_n_evaluations must be a positive integer, got 0.
    """

    every_n_evaluations = Checked(integer)

    def __init__(self, dirpath: str | Path, every_n_evaluations: int = 1) -> None:
        super().__init__()
        self.dirpath = Path(dirpath)
        self.every_n_evaluations = every_n_evaluations
        self._evaluations = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate before training that the evaluation environment can be recorded."""
        if stage != "fit" or not trainer.is_global_zero:
            return
        data = DataApi.of_run(trainer)
        if data.record_video is None or data.clock is None:
            kind = type(data.part).__name__
            raise UserError(f"EpisodeVideo needs the evaluation environment of an ExperienceDataModule, got a {kind}.")
        check_renderable(data.eval_env)
        self._evaluations = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a video if the validation is part of a fit and a video is due."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not trainer.is_global_zero:
            return
        self._evaluations += 1
        if (self._evaluations - 1) % self.every_n_evaluations:
            return
        data = DataApi.of_run(trainer)
        assert data.record_video is not None
        assert data.clock is not None
        count, unit = data.clock
        path = self.dirpath / f"{unit}_{count:09d}.mp4"
        try:
            data.record_video(pl_module.policy, path)
        except OSError as error:  # a failed video must not end the run
            logger.warning("%s is not written: %s", path, error)
