"""The number of updates in a Lightning step: choose it automatically, and serve several updates in one step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar

from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar, ThroughputMonitor, Timer
from tensordict import TensorDictBase
from torch.nn.parameter import is_lazy

from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.state import Attribute, bounded_integer
from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.datamodules._run.loaders import Batches, batches_served
from torchrl_lightning.datamodules._run.trainer_checks import check_batches, val_check_interval
from torchrl_lightning.datamodules._run.trainer_hooks import StepHooks, outside_autocast
from torchrl_lightning.datamodules.base import ExperienceDataModule

logger = logging.getLogger(__name__)

AUTO = "auto"
# Each pair has a limit for (number of parameters * batch size), and the number of updates per step up to this limit.
# Lightning's overhead per step takes as long as an update of a small network. For two layers of 256 units and 256
# samples, the overhead is a fifteenth of an update. The first pair covers both networks.
TABLE = ((2**26, 16), (2**31, 4))
HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


def count_or_auto(value: Any, name: str) -> int | str:
    """Return a positive integer, or ``"auto"``."""
    try:
        return AUTO if isinstance(value, str) and value == AUTO else integer(value, name)
    except ValueError:
        raise ValueError(f"{name} must be 'auto' or a positive integer, got {value!r}. Leave it out.") from None


class StepSize:
    """The number of updates in a step: the user's number, or a number that is chosen before the first epoch of a fit.

    Args:
        updates_per_step: The number, or ``"auto"``.
    """

    def __init__(self, updates_per_step: int | str) -> None:
        self._requested = updates_per_step if isinstance(updates_per_step, int) else None
        self._chosen: int | None = None

    @property
    def stored(self) -> int | None:
        """The number in checkpoints; None before it is chosen. The user's number replaces a checkpoint's number."""
        return self._chosen if self._requested is None else self._requested

    @stored.setter
    def stored(self, number: int | None) -> None:
        self._chosen = number

    @property
    def number(self) -> int:
        """Updates of a step."""
        return self.stored or 1

    def begin(self, learner: Any) -> None:
        """Begin a fit; raise a ValueError if a step has several updates but the module optimizes automatically."""
        self._chosen = None
        if self.number > 1 and learner.automatic_optimization:
            raise ValueError(
                f"updates_per_step must be 1 with automatic_optimization=True of {type(learner).__name__}, got "
                f"{self.number}. Set it to 1, or optimize manually, once for each batch of updates_of(batch)."
            )

    def choose(self, trainer: Any, batch_size: int) -> None:
        """Choose the number once, by the size of an update, and log it.

        The number is 1 if the trainer or a hook counts steps or handles batches.
        """
        if self.stored is not None or trainer is None:
            return
        learner = trainer.lightning_module
        reason = _reason_for_one(trainer, learner)
        parameters = sum(
            parameter.numel()
            for parameter in learner.parameters()
            if parameter.requires_grad and not is_lazy(parameter)
        )
        fitting = (updates for most, updates in TABLE if parameters * batch_size <= most)
        self._chosen = next(fitting, 1) if reason is None else 1
        if trainer.is_global_zero:
            cause = (
                f"for {parameters} parameters and batches of {batch_size}" if reason is None else f"because {reason}"
            )
            logger.info("Updates in each Lightning step: %d (updates_per_step=auto, %s).", self._chosen, cause)


def _reason_for_one(trainer: Any, learner: Any) -> str | None:
    """Return the reason why each step must be one update; None if a step may contain several."""
    name = type(learner).__name__
    if learner.automatic_optimization:
        return f"{name} optimizes automatically"
    if not _declares_loop(learner):
        return f"{name} does not declare loops_over_updates = True beside its training_step"
    if trainer.max_steps != -1 or trainer.min_steps:
        return "max_steps or min_steps counts the steps"
    interval = val_check_interval(trainer)
    if interval != 1.0 or isinstance(interval, int):
        return f"val_check_interval={interval} counts the steps"
    if trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int):
        return f"limit_train_batches={trainer.limit_train_batches} counts the steps"
    callback = next((part for part in trainer.callbacks if getattr(part, "_every_n_train_steps", 0)), None)
    if callback is not None:
        return f"every_n_train_steps of {type(callback).__name__} counts the steps"
    part = next(filter(_has_batch_hooks, (learner, trainer.datamodule, *trainer.callbacks)), None)
    return None if part is None else f"{type(part).__name__} has hooks on batches"


def _declares_loop(learner: Any) -> bool:
    """Return ``loops_over_updates``, but False if a subclass of the declaring class overrides ``training_step``."""
    for owner in (learner, *type(learner).__mro__):
        if "loops_over_updates" in vars(owner):
            return bool(learner.loops_over_updates)
        if "training_step" in vars(owner):
            return False
    return False


def _has_batch_hooks(part: Any) -> bool:
    """Return whether a part has batch hooks other than ours and Lightning's harmless ones."""
    harmless = not isinstance(part, Callback) or isinstance(part, ProgressBar | Checkpoint | Timer)
    for name in HOOKS:
        hook = getattr(part, name, None)
        if hook is None or hook.__module__ == Callback.__module__:
            continue
        package = str(hook.__module__).partition(".")[0]
        if package != "torchrl_lightning" and not (package == "lightning" and harmless):
            return True
    return False


class UpdatesDataModule(ExperienceDataModule):
    """A DataModule that serves several updates in one Lightning step.

    Args:
        updates_per_step: updates in one ``training_step``; Lightning's hooks then run once for all of them. Each batch
            is drawn when its update begins, so that frames, batches and weights do not depend on this number.
            ``global_step`` counts steps. If the number is above 1, the module must optimize manually and learn from
            each batch of :func:`~torchrl_lightning.updates_of`, like our modules. The last step of an epoch has the
            remaining updates. ``"auto"`` chooses by the size of network and batch; a resumed run keeps the choice. The
            choice is 1 if the trainer or a callback counts or handles batches, or if the module does not declare
            ``loops_over_updates``.

    The other arguments are documented in :class:`ExperienceDataModule`.
    """

    CONFIG_NAME: ClassVar[str | None] = None
    updates_per_step: Annotated[int | str, count_or_auto] = AUTO

    RUN_STATE = {
        **ExperienceDataModule.RUN_STATE,
        "in_step": Attribute(bounded_integer(), "_updates_in_step"),
        "updates_per_step": Attribute(optional(bounded_integer(1)), "_step_size.stored"),
    }
    HOOKS: ClassVar[type[StepHooks]] = StepHooks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._step_size = StepSize(self.updates_per_step)
        self._updates_in_step = 0  # updates made in an unfinished step
        self._hooks = self.HOOKS(self)

    @property
    def resolved_updates_per_epoch(self) -> int:
        """Number of updates in an epoch, the same on every rank."""
        raise NotImplementedError

    @property
    def batches_per_epoch(self) -> int:
        """Lightning steps of an epoch, the same on every rank."""
        return -(-self.resolved_updates_per_epoch // self._step_size.number)

    @property
    def _rows_of_update(self) -> int:
        """Number of samples in an update."""
        raise NotImplementedError

    def _build_parts(self) -> None:
        if self._learner is not None:
            self._step_size.begin(self._learner)
            self._hooks.attach(self._learner.trainer)

    def check_trainer(self, trainer: Any, learner: Any, stage: str = "fit") -> None:
        """Also validate that the trainer's limits leave a batch, and that callbacks can read the batch of a step."""
        super().check_trainer(trainer, learner, stage)
        if stage != "fit":
            return
        size = 1 if isinstance(self.updates_per_step, str) else self.updates_per_step  # limits turn "auto" into 1
        check_batches(trainer, -(-self.resolved_updates_per_epoch // size), 1)
        if size > 1 and any(isinstance(callback, ThroughputMonitor) for callback in trainer.callbacks):
            raise IncompatibleError(
                f"updates_per_step must be 1 or 'auto' with a ThroughputMonitor, got {size}: the callback reads the "
                "batch of each step. Leave updates_per_step out."
            )

    def train_dataloader(self) -> Batches:
        """Return the loader of training steps."""
        if self.trainer is not None:  # the trainer has restored a checkpoint before
            self._normalization.check_frozen()
        self._step_size.choose(self.trainer, self._rows_of_update)
        return super().train_dataloader()

    def _begin_epoch(self) -> tuple[int, int]:
        """Return how many updates of this epoch the checkpoint contains, and how many the epoch has in total."""
        size = self._step_size.number
        update = batches_served(self.trainer) * size + self._updates_in_step
        return update, min(self._epoch_length() * size, self.resolved_updates_per_epoch)

    def _steps(
        self, draw: Callable[[int], TensorDictBase | None], update: int, end: int
    ) -> Iterator[TensorDictBase | UpdateBatches]:
        """Yield an epoch's steps, beginning with ``update``; ``draw`` returns an update's batch, or None at the end."""
        size = self._step_size.number
        while update < end:
            next_step = min(update - update % size + size, end)
            self._updates_in_step = update % size
            self._begin_step()
            batch = draw(update)
            interrupts.between_steps = False
            if batch is None:
                return
            if size == 1:
                yield batch
            else:
                yield UpdateBatches(self._batches_of_step(draw, self._transfer(batch), range(update + 1, next_step)))
            update = next_step

    def _begin_step(self) -> None:
        """End the run if Ctrl-C was pressed, and allow Ctrl-C to end it until the batch of the step is drawn."""
        if interrupts.pending or rank_stop.is_active:
            interrupts.check()
            rank_stop.check()
        interrupts.between_steps = True

    def _batches_of_step(
        self, draw: Callable[[int], TensorDictBase | None], first: TensorDictBase, later: range
    ) -> Iterator[TensorDictBase]:
        """Yield the batches of a step, each when its update begins."""
        yield first
        for update in later:
            if not self._end_update():
                return
            self._updates_in_step += 1
            with outside_autocast():
                batch = draw(update)
            if batch is None:
                return
            yield self._transfer(batch)

    def _end_update(self) -> bool:
        """End an update within a step; return whether another update follows."""
        return True

    def end_step(self) -> None:
        """End a step; our first callback calls this, before the user's callbacks."""
        self._updates_in_step = 0
