"""The best checkpoint of a run whose score has an upper bound."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from torchrl_lightning.callbacks.sparse import SparseCallback


class BestCheckpoint(SparseCallback, ModelCheckpoint):
    """Keep the best checkpoint like Lightning's ``ModelCheckpoint``, but of equally good ones keep the latest.

    Where returns are bounded, the first policy that reaches the bound in a few episodes is rarely the best one.
    The arguments are those of ``ModelCheckpoint``.

    Example:
        >>> BestCheckpoint(monitor="eval/return", mode="max").monitor
        'eval/return'
    """

    on_train_batch_end = ModelCheckpoint.on_train_batch_end

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether the current policy is at least as good as the worst one that is kept."""
        kept = self.best_k_models.get(self.kth_best_model_path)
        tie = kept is not None and current is not None and bool(current == kept)
        return tie or super().check_monitor_top_k(trainer, current)
