"""Write an HTML report of the buffer during training."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase

from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning._core.validators import Checked, integer
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.inspection.report import inspect_buffer
from torchrl_lightning.inspection.sample_counts import EVERY, SampleCounter

logger = logging.getLogger(__name__)


class BufferReport(SparseCallback):
    """Write an HTML report of the buffer at each evaluation, with sample counts and ages of steps.

    The callback counts every eighth batch from the start of this run. Rank zero replaces the file atomically.

    Args:
        path: The HTML file.
        last: The maximum number of newest cells to inspect.

    Raises:
        ValueError: ``last`` is not positive.

    Examples:
        >>> BufferReport("inspect.html", last=0)
        Traceback (most recent call last):
        ValueError: last must be a positive integer, got 0.
    """

    last = Checked(integer)

    def __init__(self, path: str, last: int = 1_000_000) -> None:
        super().__init__()
        self.path, self.last = path, last
        self._sample_counter: SampleCounter | None = None
        self._batches = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to count samples if the buffer's writer has cells."""
        writer = getattr(_buffer(trainer), "writer", None)
        length, num_envs = getattr(writer, "length", None), getattr(writer, "num_envs", None)
        self._sample_counter = SampleCounter(length, num_envs) if length and num_envs else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the sampled cells of each update in this step."""
        if self._sample_counter is None:
            return
        if isinstance(batch, UpdateBatches):
            batch.watch(self._count_samples)
        else:
            self._count_samples(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the report if the validation is part of a fit."""
        buffer = _buffer(trainer)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not trainer.is_global_zero:
            return
        try:
            report = inspect_buffer(buffer, last=self.last)
        except ValueError as error:  # a failed report must not end the run
            logger.warning("%s is not written: %s", self.path, error)
            return
        if self._sample_counter is not None and self._sample_counter.num_samples and report.summaries:
            summary = replace(report.summaries[0], draws=self._sample_counter)
            report = replace(report, summaries=(summary, *report.summaries[1:]))
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        report.write_html(self.path)

    def _count_samples(self, batch: TensorDictBase) -> None:
        self._batches += 1
        if self._sample_counter is None or self._batches % EVERY:
            return
        source = batch.get("source", None)
        if source is not None:  # the cells of the other buffers of a MixedReplay have the same numbers
            batch = batch[source == 0]
        index, write_position = batch.get("index", None), batch.get("write_position", None)
        if index is not None and write_position is not None:
            self._sample_counter.update(index, write_position.expand(index.shape))


def _buffer(trainer: Trainer) -> Any:
    return getattr(getattr(trainer, "datamodule", None), "buffer", None)
