"""A page that shows what the buffer holds, renewed while a run trains."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase

from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.inspection.draws import EVERY, Draws
from torchrl_lightning.inspection.report import inspect_buffer
from torchrl_lightning.protocols import UpdateBatches
from torchrl_lightning.ranges import Checked, integer

logger = logging.getLogger(__name__)


class BufferPage(SparseCallback):
    """Write a page of what the buffer holds at each evaluation, with how often and how old what is drawn is.

    One batch in eight is counted, from the beginning of this run. The page is replaced as a whole, by the first rank.

    Args:
        path: The file.
        last: How many of the newest cells are looked at, at most.

    Raises:
        ValueError: ``last`` is not positive.

    Examples:
        >>> BufferPage("inspect.html", last=0)
        Traceback (most recent call last):
        ValueError: last must be a positive integer, got 0.
    """

    last = Checked(integer)

    def __init__(self, path: str, last: int = 1_000_000) -> None:
        super().__init__()
        self.path, self.last = path, last
        self._draws: Draws | None = None
        self._batches = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count, where a buffer tells the cells of what it draws."""
        writer = getattr(_buffer(trainer), "writer", None)
        length, num_envs = getattr(writer, "length", None), getattr(writer, "num_envs", None)
        self._draws = Draws(length, num_envs) if length and num_envs else None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count what is drawn for each update of this step."""
        if self._draws is None:
            return
        if isinstance(batch, UpdateBatches):
            batch.watch(self._note)
        else:
            self._note(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page, in a fit."""
        buffer = _buffer(trainer)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not trainer.is_global_zero:
            return
        try:
            found = inspect_buffer(buffer, last=self.last)
        except ValueError as error:  # a run does not end for a page
            logger.warning("%s is not written: %s", self.path, error)
            return
        if self._draws is not None and self._draws.number and found.summaries:
            drawn = replace(found.summaries[0], draws=self._draws)
            found = replace(found, summaries=(drawn, *found.summaries[1:]))
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        found.write_html(self.path)

    def _note(self, batch: TensorDictBase) -> None:
        self._batches += 1
        if self._draws is None or self._batches % EVERY:
            return
        index, stamp = batch.get("index", None), batch.get("write_position", None)
        if index is not None and stamp is not None:
            self._draws.note(index, stamp.expand(index.shape))


def _buffer(trainer: Trainer) -> Any:
    return getattr(getattr(trainer, "datamodule", None), "buffer", None)
