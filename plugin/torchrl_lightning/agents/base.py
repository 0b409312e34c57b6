"""Base classes of all agents. They build networks from specs, step optimizers and apply learning-rate schedules."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lightning._core.checksums import add_checksums, copy_expanded_tensors, verify_checksums
from torchrl_lightning._core.errors import UserError, check_compatible, check_precision
from torchrl_lightning._core.keys import ACTION_MASK
from torchrl_lightning._core.launchers import MainProcessState
from torchrl_lightning._core.mixins import PickleByValueMixin
from torchrl_lightning._core.modules import owner_of
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import FinitePositive, Positive, Settings, setting
from torchrl_lightning._core.torch_defaults import check_default_dtype
from torchrl_lightning._core.validators import Check
from torchrl_lightning.agents.analytic import (
    FusedAdam,
    OptimizedParameters,
    make_analytic_update,
    unflattenable_parameters,
)
from torchrl_lightning.agents.dry_run import ROWS, dry_run, network_errors
from torchrl_lightning.agents.metrics import MetricsModule, train_names
from torchrl_lightning.agents.optimizer_states import (
    check_optimizer_states,
    copy_optimizer,
    flatten_optimizers,
)
from torchrl_lightning.agents.schedules import ConstantSchedule, Schedule, as_schedule, progress_of

T = TypeVar("T")
ZERO_GRAD_HOOK = "on_before_zero_grad"


def check_optimizer_factory(value: Any, name: str) -> Any:
    """Validate an optimizer factory and return it; raise TypeError if it is not callable."""
    if not callable(value):
        raise TypeError(
            f"{name} must be a callable that takes parameters and returns an optimizer, got {value!r}. Use, for "
            "example, functools.partial(torch.optim.Adam, lr=1e-3)."
        )
    return value


OptimizerFactory = Annotated[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], check_optimizer_factory]


class AgentModule(PickleByValueMixin, MainProcessState, Settings, MetricsModule):
    """An agent with networks built from a DataModule's specs.

    Args:
        learning_rate: Learning rate of the default optimizer.
        optimizer: A callable (e.g. a ``functools.partial``) that takes parameters and returns an optimizer; fused Adam
            by default.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Schedule of the learning rates over frames: ``"constant"``, ``"linear"``, ``"cosine"`` or a function
            of progress.
    """

    adam_eps: ClassVar[float] = 1e-8
    stream_kind: ClassVar[str | None] = None
    """The required kind of data stream, compared with the DataModule's ``stream_kind``; None accepts any kind."""
    suggested_data: ClassVar[str] = ""

    build_method: ClassVar[str | None] = None
    """Name of the method that builds the networks; :meth:`network_outputs` calls them. None skips the dry run."""
    batch_shapes: ClassVar[Sequence[tuple[int, ...]]] = ((ROWS,),)
    """The batch shapes that the dry run passes to the encoders."""

    supports_action_masks: ClassVar[bool] = False
    """True if the policy and the losses respect an ``action_mask`` in the observation."""

    learning_rate: FinitePositive = 3e-4
    optimizer: OptimizerFactory | None = None
    max_grad_norm: Positive | None = None
    schedule: str | Schedule = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic_optimization = False
        self._schedule = as_schedule(self.schedule)
        # The keys are the metric names of the gradient norms.
        self._groups: dict[str, OptimizedParameters] = {}
        self._has_zero_grad_hooks = False
        self.passed_dry_run = False
        self._unchecked_states: Any = None

    @classmethod
    def check_assignments(cls, attribute: str, check: Check | None, name: str) -> None:
        """Let ``__setattr__`` run the check, because a descriptor would hide a buffer that replaces a setting."""
        row = None if check is None else (check, name)
        cls.checks_of_attributes = {**cls.checks_of_attributes, attribute: row}

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """True once the networks exist."""

    @abstractmethod
    def build(self, specs: Any) -> Self:
        """Build networks and loss for an environment's specs and return the module; a second call does nothing."""

    def setup(self, stage: str) -> None:
        """Raise ValueError for an incompatible DataModule, and for a schedule in a run of unknown length."""
        super().setup(stage)
        check_default_dtype()
        if stage == "fit":
            check_compatible(self, self._data)
        has_schedule = any(schedule != ConstantSchedule() for schedule in self.schedules)
        if stage == "fit" and has_schedule and progress_of(self.trainer) is None:
            raise ValueError(
                "A schedule needs the length of the run, which is unknown. Set total_frames of the DataModule, set "
                "max_epochs or max_steps of the trainer, or use schedule='constant'."
            )

    def incompatibility(self, data: Any) -> str | None:
        """Return the reason why the module cannot learn from a DataModule, or None if it can."""
        specs = DataApi.of(data).specs
        if self.supports_action_masks or specs is None or ACTION_MASK not in specs.observation:
            return None
        return (
            f"the observation contains {ACTION_MASK!r}, but {type(self).__name__} does not support action masks. Use "
            "model=ppo, a2c, vtrace, reinforce or dqn, or remove the mask with drop=[action_mask] of an "
            "EnvironmentRecipe."
        )

    def configure_model(self) -> None:
        """Build the networks from the DataModule's specs.

        Before a fit, a copy of the networks runs one forward and one backward pass.

        Raises:
            ValueError: A network fails, or the trainer's precision is unsupported (such as ``64-true`` or
                ``bf16-true``).
            RuntimeError: The DataModule has no specs.
        """
        check_precision(self.trainer)
        data = DataApi.of(self._data)
        specs = data.specs
        if not self.is_built:
            if specs is None:
                raise RuntimeError(
                    f"The networks are built from `trainer.datamodule.specs`, but the datamodule is "
                    f"{type(self._data).__name__}. Fit with one of our DataModules, or call `build(specs)` first."
                )
            with network_errors(self, specs):
                self.build(specs, **data.build_options)
        # The trainer of a policy loaded from a file is a stub, not a Trainer.
        trainer: Any = self.trainer
        if specs is not None and isinstance(trainer, Trainer) and trainer.state.fn == TrainerFn.FITTING:
            self.dry_run_networks(specs, trainer)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the outputs of actor and critics for observations ``[B]``; used by the dry run."""
        return []

    def dry_run_networks(self, specs: Any, trainer: Any) -> None:
        """Run a copy of the networks forward and backward once; raise NetworkFault if they fail.

        Skip the run if different classes define the build method and ``network_outputs``, because the outputs of the
        networks are then unknown.
        """
        owner = None if self.build_method is None else owner_of(self, self.build_method)
        if owner is not None and owner is owner_of(self, "network_outputs") and not self.passed_dry_run:
            check_precision(trainer)
            dry_run(self, specs, trainer.strategy.root_device, trainer.precision_plugin.forward_context())
            self.passed_dry_run = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add checksums of weights, optimizers and data. A subclass must call this after its own changes."""
        checkpoint.update({key: copy_expanded_tensors(entry) for key, entry in checkpoint.items()})
        add_checksums(checkpoint, "state_dict", "optimizer_states", type(self._data).__qualname__)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Validate a checkpoint before loading; raise ValueError if it is damaged or for another environment."""
        verify_checksums(checkpoint, "the checkpoint")
        state = checkpoint.get(type(self._data).__qualname__)
        if state is not None:
            DataApi.of(self._data).check_state(state)
        self._unchecked_states = None
        trainer: Any = self._trainer
        if self.is_built and isinstance(trainer, Trainer) and trainer.state.fn == TrainerFn.FITTING:
            states = checkpoint.get("optimizer_states")  # if they are missing, Lightning's error names a remedy
            if states is not None and not self.check_optimizer_states(states):
                self._unchecked_states = states

    def on_fit_start(self) -> None:
        """Validate the states of optimizers that a subclass configures; Lightning loads them after this hook."""
        states, self._unchecked_states = self._unchecked_states, None
        if states is not None:
            with _as_user_error():
                check_optimizer_states([copy_optimizer(optimizer) for optimizer in self.trainer.optimizers], states)

    def check_optimizer_states(self, states: Any) -> bool:
        """Validate stored optimizer states with a trial step on a copy of the module.

        Returns:
            False if a subclass outside this package configures the optimizers. The subclass may need the trainer, so
            the states are not validated.

        Raises:
            UserError: A state does not fit its optimizer.
        """
        if not type(self).configure_optimizers.__module__.startswith(f"{__name__.partition('.')[0]}."):
            return False
        trainer = self._trainer
        copied = copy.deepcopy(self, {id(trainer): trainer})
        with _as_user_error():
            check_optimizer_states(flatten_optimizers(copied.configure_optimizers()), states)
        return True

    @staticmethod
    def require_built(network: T | None) -> T:
        """Return the network; raise RuntimeError if it is None."""
        if network is None:
            raise RuntimeError(
                "The networks are not built yet. The trainer builds them; without a trainer, call `build(specs)`."
            )
        return network

    # -- optimizers -------------------------------------------------------------------------------------------------

    def build_optimizers(
        self,
        actor: list[nn.Parameter],
        critic: list[nn.Parameter],
        critic_optimizer: OptimizerFactory | None = None,
    ) -> list[torch.optim.Optimizer]:
        """Return one optimizer of all parameters, or separate optimizers for the actor and the critics."""
        self._groups = {}
        factory = self.optimizer or self._default_optimizer
        if critic_optimizer is None:
            optimizers = [self.build_optimizer(factory, "grad_norm", actor, critic)]
        elif not actor:
            if self.optimizer is not None:
                raise ValueError(
                    f"optimizer must be None if critic_optimizer is set, got {self.optimizer}: all parameters of "
                    f"{type(self).__name__} belong to the critic. Set only one of them."
                )
            optimizers = [self.build_optimizer(critic_optimizer, "grad_norm", critic)]
        else:
            optimizers = [
                self.build_optimizer(factory, "grad_norm", actor),
                self.build_optimizer(critic_optimizer, "critic_grad_norm", critic),
            ]
        rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
        needs = "an optimizer with this rate (optimizer and critic_optimizer have their own rates)"
        self.require_effect("learning_rate", self.learning_rate in rates, needs)
        return optimizers

    def build_optimizer(
        self, factory: OptimizerFactory, norm_name: str, *parameter_lists: list[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return an optimizer over the given parameter lists, and register it so that ``update`` steps it."""
        optimizer = factory([parameter for parameters in parameter_lists for parameter in parameters])
        self._groups[norm_name] = OptimizedParameters(optimizer, parameter_lists, self.unflattenable_parameters())
        return optimizer

    def unflattenable_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that must not be flattened."""
        return unflattenable_parameters(self)

    def _default_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return FusedAdam(parameters, lr=self.learning_rate, eps=self.adam_eps)

    def _optimizers(self) -> list[Any]:
        optimizers = self.optimizers()
        return list(optimizers) if isinstance(optimizers, list) else [optimizers]

    @property
    def schedules(self) -> list[Schedule]:
        """All schedules of the run."""
        return [self._schedule]

    def on_train_start(self) -> None:
        """Look for ``on_before_zero_grad`` hooks; call ``on_train_epoch_start`` if a resumed run starts a new epoch.

        Lightning skips ``on_train_epoch_start`` if the checkpoint was saved after the last batch of an epoch. If the
        run resumes inside an epoch, the restored state stays unchanged.
        """
        owners = (self, *self._trainer_callbacks)
        self._has_zero_grad_hooks = any(is_overridden(ZERO_GRAD_HOOK, owner) for owner in owners)
        loop: Any = self.trainer.fit_loop.epoch_loop
        is_over = loop.batch_progress.current.processed >= self.trainer.num_training_batches
        if is_over and not loop.val_loop.restarted_mid_evaluation:  # a validation run is still part of the epoch
            self.on_train_epoch_start()

    def on_train_epoch_start(self) -> None:
        """Apply the schedules."""
        self.apply_schedules()

    def apply_schedules(self) -> None:
        """Set the learning rates from the frame count, so that a resumed run uses the same rates."""
        factor = self._schedule(self.progress)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                # Like torch's schedulers, store the initial rate in the optimizer state.
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters without a gradient in this update."""
        return []

    def update(self, loss: Tensor, *, inner: bool = False) -> dict[str, Tensor]:
        """Step all optimizers on the loss; return the gradient norms before clipping.

        An ``inner`` update is a further update of the same training step. It skips Lightning's optimizer hooks and
        step counter.
        """
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if self._has_zero_grad_hooks and not inner:
            self._call_zero_grad_hooks()
        for group in self._groups.values():
            group.clear()
        idle = self.idle_parameters() if self.trainer.world_size > 1 else []
        # DDP waits for the gradients of all parameters, so idle parameters get zeros. The zeros are removed below,
        # because an optimizer with momentum would move the parameters.
        loss = loss + sum(0.0 * parameter.sum() for parameter in idle) if idle else loss
        if inner and not is_scaled and type(self.trainer.strategy) is SingleDeviceStrategy:
            loss.backward()  # a single device has no ranks to synchronise
        else:
            self.manual_backward(loss)
        for parameter in idle:
            parameter.grad = None
        for group in self._groups.values():
            group.gather()
        return self.step_optimizers(inner=inner)

    @property
    def _trainer_callbacks(self) -> list[Any]:
        trainer: Any = self.trainer
        return list(trainer.callbacks)

    def _call_zero_grad_hooks(self) -> None:
        """Call the hooks that Lightning calls only under automatic optimization, before the backward pass."""
        for optimizer in self._optimizers():
            for callback in self._trainer_callbacks:
                if (hook := getattr(callback, ZERO_GRAD_HOOK)) is not None:  # callbacks remove hooks with None
                    hook(self.trainer, self, optimizer.optimizer)
            self.on_before_zero_grad(optimizer.optimizer)

    def step_optimizers(self, *, inner: bool = False) -> dict[str, Tensor]:
        """Step all optimizers on the current gradients; return the gradient norms before clipping.

        The trainer counts one step, with any number of optimizers.
        """
        norms: dict[str, Tensor] = {}
        plugin: Any = self.trainer.precision_plugin
        is_scaled = getattr(plugin, "scaler", None) is not None
        optimizers = self._optimizers()
        with _unscaled(plugin, optimizers) if is_scaled else nullcontext() as scaler:
            for number, (name, group) in enumerate(self._groups.items()):
                optimizer = optimizers[number]
                if self.max_grad_norm is not None:
                    norms[name] = group.clip(self.max_grad_norm)
                if not inner and number:
                    optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
                if not inner:
                    optimizer.step()
                elif scaler is None:
                    optimizer.optimizer.step()
                else:
                    scaler.step(optimizer.optimizer)
        return norms

    def minimise(self, terms: Mapping[str, Tensor | float], *, inner: bool = False) -> None:
        """Minimise the sum of the entries ``loss_...`` (or ``loss``); log all entries and the gradient norms.

        If the losses are Python floats, the gradients are already computed.
        """
        loss: Any = None
        for name, value in terms.items():
            if name == "loss" or name.startswith("loss_"):
                loss = value if loss is None else loss + value
        norms = self.step_optimizers(inner=inner) if isinstance(loss, float) else self.update(loss, inner=inner)
        self.accumulate({**terms, **norms})

    def epoch_metrics(self) -> dict[str, float]:
        """Return the learning rate."""
        return {"learning_rate": float(self._optimizers()[0].param_groups[0]["lr"])}


class LossTermsModule(AgentModule):
    """An agent that computes its loss in ``losses``; it adds one argument to :class:`AgentModule`.

    Args:
        compile: Compile the loss with ``torch.compile``.
    """

    training_metrics = train_names("learning_rate", "grad_norm", "critic_grad_norm")

    compiled: bool = setting(default=False, alias="compile")

    @abstractmethod
    def losses(self, batch: Any) -> Any:
        """Return the loss terms (``loss_...``) and diagnostics of a batch; compilation forbids side effects."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._analytic_update: Callable[[Any], Any] = no_analytic_update

    def on_train_start(self) -> None:
        """Use analytic gradients if they support this agent; they equal autograd's gradients up to float error."""
        super().on_train_start()
        self._analytic_update = make_analytic_update(self) or no_analytic_update

    def on_train_end(self) -> None:
        """Release the buffers of the analytic gradients."""
        super().on_train_end()
        self._analytic_update = no_analytic_update

    def compute(self, batch: Any) -> Any:
        """Return ``losses`` of a batch, compiled if ``compile`` is set."""
        return compiled(type(self).losses)(self, batch) if self.compiled else self.losses(batch)


def no_analytic_update(batch: Any) -> None:
    """Return None, so that the caller uses :meth:`LossTermsModule.compute` and autograd."""


@contextmanager
def _unscaled(plugin: Any, optimizers: list[Any]) -> Iterator[_UnscaledSteps]:
    """Unscale the gradients of all optimizers, and update the gradient scaler once after the block.

    Lightning unscales the gradients and updates the scale in each optimizer's step. This is too late for clipping, and
    the next optimizer would use a different scale.
    """
    scaler = plugin.scaler
    stepping = [optimizer.optimizer for optimizer in optimizers if _has_gradients(optimizer.optimizer)]
    for optimizer in stepping:
        scaler.unscale_(optimizer)
    plugin.scaler = _UnscaledSteps(scaler)
    try:
        yield plugin.scaler
    finally:
        plugin.scaler = scaler
    if stepping:
        scaler.update()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


class _UnscaledSteps:
    """Replace a gradient scaler while all gradients are already unscaled."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def update(self) -> None:
        pass  # the scale must not change, because other optimizers still step with it

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> float | None:
        return self._scaler.step(optimizer, **kwargs) if _has_gradients(optimizer) else None


@contextmanager
def _as_user_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by ``torch.compile``; the cache shares it between modules of one class."""
    return torch.compile(function)
