"""Log the means of an epoch and the results of evaluation episodes; the logged step is the frame count."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.metric_logging import TRAINING, log_over_clock, log_over_lightning_steps, publish_metrics
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.rank_metrics import LENGTH, RETURN, SUCCESS, ExplainedVariance, Mean, gather_episodes
from torchrl_lightning._core.ranks import world_size
from torchrl_lightning._core.torchrl_compat import buffers_of
from torchrl_lightning._core.validators import Check
from torchrl_lightning.agents.schedules import progress_of


def train_names(*names: str) -> tuple[str, ...]:
    """Return the names of training metrics as loggers receive them.

    Examples:
        >>> train_names("entropy")
        ('train/entropy',)
    """
    return tuple(f"{TRAINING}{name}" for name in names)


class MetricSums:
    """Collect scalar metrics until a log; return their means and the explained variance of a value prediction.

    ``add`` takes 1 us for each key, because it only stores the value.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor | float]] = {}
        self._predictions: list[tuple[Tensor, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add one observation of each metric."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def add_prediction(self, prediction: Tensor, target: Tensor) -> None:
        """Add values and their targets of equal shape; both are kept without a copy until ``flush``."""
        self._predictions.append((prediction.detach(), target.detach()))

    def explained_variance(self) -> float | None:
        r"""Return \(1 - \mathrm{Var}(y - \hat y) / \mathrm{Var}(y)\) of all predictions; None if \(y\) is constant.

        With several ranks, the result is NaN if \(y\) is constant, and contains the moments to combine the ranks.
        """
        if not self._predictions:
            return None
        value, target = (
            torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
            for tensors in zip(*self._predictions, strict=True)
        )
        if world_size() > 1:
            return ExplainedVariance.of(value, target)
        unexplained, variance = torch.stack(((target - value).var(correction=0), target.var(correction=0))).tolist()
        return 1.0 - unexplained / variance if variance > 1e-12 else None

    def means(self) -> dict[str, float]:
        """Return the means so far; empty if nothing was added since the last ``flush``."""
        means: dict[str, float] = {name: Mean(_mean(values), len(values)) for name, values in self._values.items()}
        explained = self.explained_variance()
        if explained is not None:
            means["explained_variance"] = explained
        return means

    def flush(self) -> dict[str, float]:
        """Return the means and reset."""
        means = self.means()
        self._values, self._predictions = {}, []
        return means


def _mean(values: list[Tensor | float]) -> float:
    tensors = [value for value in values if isinstance(value, Tensor)]
    total = float(torch.stack(tensors).double().sum()) if tensors else 0.0
    if len(tensors) < len(values):
        total += sum(value for value in values if not isinstance(value, Tensor))
    return total / len(values)


class MetricsModule(L.LightningModule):
    """Accumulate metrics, write them to the loggers at the end of an epoch, and log evaluation episodes."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("eval/return", "eval/return_std", "eval/length", "eval/success")
    """Metrics of :meth:`validation_step`; it logs the last metric only if the environment reports success."""

    training_metrics: ClassVar[tuple[str, ...]] = ()
    """All training metrics (``train/...``) of this class; empty if some are unknown."""

    checks_of_attributes: ClassVar[Mapping[str, tuple[Check, str] | None]] = {}
    """Maps each attribute that stores a setting to a check of its values and the setting's name."""

    loops_over_updates: ClassVar[bool] = False
    """True if ``training_step`` learns from each batch of :func:`~torchrl_lightning.updates_of`."""

    def __init__(self) -> None:
        super().__init__()
        self.metric_sums = MetricSums()
        self.last_epoch_metrics: dict[str, float] = {}  # of all ranks
        self._evaluated: list[TensorDictBase] = []  # the batches of the current evaluation

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Cache the signature of ``training_step``; inspecting it takes a tenth of Lightning's time in each step."""
        super().__init_subclass__(**kwargs)
        step = vars(cls).get("training_step")
        if inspect.isfunction(step):
            vars(step)["__signature__"] = inspect.signature(step)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; bypass PyTorch's registries for the current hook's name.

        Lightning stores the name of the current hook in the module more than thirty times a step.
        """
        if name == "_current_fx_name":
            self.__dict__[name] = value
            return
        check = self.checks_of_attributes.get(name)
        if check is not None and name not in buffers_of(self):
            value = check[0](value, check[1])
        super().__setattr__(name, value)

    @property
    def frames(self) -> int:
        """Number of environment frames collected so far; 0 if the DataModule does not count them."""
        return int(getattr(self._data, "frames", 0))

    @property
    def progress(self) -> float:
        """Completed fraction of the run; 0 if its end is unknown."""
        return (progress_of(self._trainer) if self._trainer is not None else None) or 0.0

    @property
    def _data(self) -> Any:
        return None if self._trainer is None else getattr(self.trainer, "datamodule", None)

    def accumulate(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add scalars to this epoch's means; the end of the epoch logs them as ``train/...``."""
        self.metric_sums.add(metrics)

    def epoch_metrics(self) -> dict[str, float]:
        """Return additional metrics of the ending epoch."""
        return {}

    def setup(self, stage: str) -> None:
        """Use the DataModule's frame count as the step of the rows that Lightning logs."""
        log_over_clock(self.trainer)

    def teardown(self, stage: str) -> None:
        """Restore Lightning's own step count for the rows that Lightning logs."""
        log_over_lightning_steps(self.trainer)

    def on_validation_start(self) -> None:
        """Publish the means of the epoch so far, so that callbacks can monitor them at the end of this evaluation."""
        self._evaluated = []
        if self.trainer.state.fn == TrainerFn.FITTING:
            means = self.metric_sums.means()
            # A rank without updates must also call this function, because the other ranks wait for it.
            publish_metrics(self.trainer, self._with_prefix({**means, **self.epoch_metrics()} if means else {}))

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means of all ranks over the frames collected so far, and publish them for callbacks.

        ``self.log`` would take about 0.4 ms for each key, a tenth of the learning time of a small agent.
        """
        metrics = publish_metrics(self.trainer, self._with_prefix({**self.metric_sums.flush(), **self.epoch_metrics()}))
        self.last_epoch_metrics = metrics
        step = (DataApi.of(self._data).clock or (self.global_step,))[0]
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)

    @staticmethod
    def _with_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
        return {f"{TRAINING}{name}": value for name, value in metrics.items()}

    def validation_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Log the returns and the lengths ``[E]`` of finished evaluation episodes, and the success rate if reported.

        With several ranks, the metrics are logged at the end of the evaluation, over the episodes of all ranks.
        """
        self._evaluated.append(batch)
        if world_size() == 1:
            self._log_episodes([batch])

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of an evaluation that has several batches or ranks; all ranks call this together."""
        batches, self._evaluated = self._evaluated, []
        if world_size() > 1 or len(batches) > 1:
            self._log_episodes(batches)

    def _log_episodes(self, batches: Sequence[TensorDictBase]) -> None:
        """Log the metrics of the episodes of all ranks."""
        episodes = gather_episodes(batches)
        if not len(episodes):
            return
        returns = episodes[RETURN]
        metrics: dict[str, Any] = {
            "eval/return": returns.mean(),
            "eval/return_std": returns.std(correction=0),
            "eval/length": episodes[LENGTH].mean(),
        }
        if SUCCESS in episodes:
            metrics["eval/success"] = episodes[SUCCESS].double().mean()
        # The metrics cover all ranks already. The last two arguments prevent Lightning's reduction and its warning.
        several = world_size() > 1
        self.log_dict(
            metrics,
            batch_size=returns.numel(),
            on_step=False,
            on_epoch=True,
            sync_dist=several,
            rank_zero_only=several,
        )

    def on_test_start(self) -> None:
        """Begin a test without the batches of an interrupted evaluation."""
        self._evaluated = []

    def test_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Log test episodes as :meth:`validation_step` does."""
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log the metrics of a test as :meth:`on_validation_epoch_end` does."""
        MetricsModule.on_validation_epoch_end(self)
