"""Show a progress bar over the environment frames of the whole run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.validators import Checked, non_negative
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.kernels.compiled import COMPILING, when_compiling

BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# In a file, every refresh is a new line.
SECONDS_BETWEEN_LINES = 10.0
DEMOS = "demos/"  # metrics of demonstrations
TRAINING = "training"


class FramesProgressBar(SparseCallback, ProgressBar):
    """Show frames, frames per second, remaining time, latest training and evaluation returns, and demonstrations.

    Lightning's own bar counts the mini-batches of an epoch, not the progress of the run. This bar stays hidden if the
    DataModule does not have ``frames`` and ``total_frames``.

    Args:
        refresh_every: Seconds between two refreshes. A refresh at each batch would take a tenth of a small update's
            time. The interval is at least ten seconds if stderr is not a terminal.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[FramesProgressBar()], logger=False, enable_checkpointing=False)
        >>> type(trainer.progress_bar_callback).__name__
        'FramesProgressBar'
    """

    CONFIG_NAME: ClassVar[str | None] = "frames_bar"

    refresh_every = Checked(non_negative)

    def __init__(self, refresh_every: float = 0.2) -> None:
        super().__init__()
        self.refresh_every = refresh_every
        self._enabled = True
        self._bar: Tqdm | None = None
        self._unsubscribe_compilation: Callable[[], None] | None = None
        self._last_refresh = 0.0
        self._interval = refresh_every
        self._has_new_frames = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar; Lightning calls this on all ranks except rank zero."""
        self._enabled = False

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Write a line above the bar."""
        if self._bar is not None:
            self._bar.write(sep.join(map(str, args)), **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar at the number of frames collected so far."""
        data = DataApi.of_run(trainer)
        if data.clock is None or data.total_frames is None or not self._enabled:
            return
        total, (count, unit) = data.total_frames if data.total_frames > 0 else None, data.clock
        self._interval = max(self.refresh_every, 0.0 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES)
        self._last_refresh = time.monotonic()
        self._has_new_frames = False
        self._bar = Tqdm(
            total=total,
            initial=count,
            unit=f" {unit}",
            unit_scale=True,
            dynamic_ncols=True,
            smoothing=0.1,
            # Redraw on every update; this class decides when to update.
            mininterval=0,
            miniters=0,
            file=sys.stderr,
            desc=TRAINING,
            bar_format=BAR_FORMAT if total else None,
        )
        self._unsubscribe_compilation = when_compiling(self._show_compilation)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh the bar, at most every ``refresh_every`` seconds."""
        now = time.monotonic()
        if self._bar is not None and now - self._last_refresh >= self._interval:
            self._last_refresh = now
            self._refresh(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refresh the bar once more after a final evaluation, then close it."""
        self._refresh(trainer)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the terminal stays usable."""
        self._close()

    def _show_compilation(self) -> None:
        """Until the first frames are collected, display that kernels are being compiled."""
        if self._bar is not None and not self._has_new_frames and self._bar.desc != COMPILING:
            self._bar.set_description_str(COMPILING)

    def _refresh(self, trainer: Trainer) -> None:
        bar, data = self._bar, DataApi.of_run(trainer)
        if bar is None or data.clock is None:
            return
        bar.set_description_str(TRAINING, refresh=False)
        # With several ranks, the DataModule's metrics cover only this rank.
        metrics = data.metrics() if trainer.world_size == 1 else trainer.callback_metrics
        returns = {"return": metrics.get("train/return"), "eval": trainer.callback_metrics.get("eval/return")}
        text = {name: f"{float(value):.1f}" for name, value in returns.items() if value is not None}
        if deaths := metrics.get("collector/deaths"):
            text["deaths"] = f"{deaths:.0f}"
        text |= {name.removeprefix(DEMOS): f"{value:.3g}" for name, value in metrics.items() if name.startswith(DEMOS)}
        bar.set_postfix(text, refresh=False)
        count, _ = data.clock
        # The last rollout may exceed total_frames, which may change during the run.
        if bar.total is not None:
            bar.total = max(data.total_frames or 0, count)
        if not self._has_new_frames and count > bar.n:
            # The estimate of the remaining time must not include the start of workers and the compilation of kernels.
            self._has_new_frames = True
            bar.n = bar.last_print_n = count
            bar.last_print_t = time.time()
            bar.refresh()
        else:
            bar.update(count - bar.n)

    def _close(self) -> None:
        if self._unsubscribe_compilation is not None:
            self._unsubscribe_compilation()
            self._unsubscribe_compilation = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
