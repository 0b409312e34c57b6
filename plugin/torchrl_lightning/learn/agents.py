"""Base of all agents: networks built from specs, manual optimization, learning-rate schedules."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lightning._modules import owner_of
from torchrl_lightning.fitting import Fault, check_precision, require_fit
from torchrl_lightning.keys import ACTION_MASK
from torchrl_lightning.learn.analytic import LeanAdam, OptimizedParameters, settled_parameters, update_for
from torchrl_lightning.learn.dry_run import ROWS, dry_run, network_faults
from torchrl_lightning.learn.optimizer_states import (
    check_optimizer_states,
    configured_optimizers,
    copied_optimizer,
)
from torchrl_lightning.learn.reports import ReportingModule, train_names
from torchrl_lightning.learn.schedules import ConstantSchedule, Schedule, as_schedule, progress_of
from torchrl_lightning.parts import PickledByValue
from torchrl_lightning.protocols import DataApi
from torchrl_lightning.ranges import Check
from torchrl_lightning.seal import check_seal, seal, with_own_numbers
from torchrl_lightning.settings import FinitePositive, Positive, Settings, setting
from torchrl_lightning.torch_defaults import check_default_dtype

T = TypeVar("T")


def makes_optimizers(value: Any, name: str) -> Any:
    """Return what makes an optimizer of parameters; a TypeError if it cannot be called."""
    if not callable(value):
        raise TypeError(
            f"{name} is {value!r}; expected a callable that makes an optimizer of parameters, such as "
            "functools.partial(torch.optim.Adam, lr=1e-3)."
        )
    return value


OptimizerFactory = Annotated[Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], makes_optimizers]


class AgentModule(PickledByValue, Settings, ReportingModule):
    """An agent whose networks are built from a DataModule's specs.

    Args:
        learning_rate: Learning rate of the default optimizer.
        optimizer: A callable (e.g. a ``functools.partial``) that takes parameters and returns an optimizer; fused Adam
            by default.
        max_grad_norm: Clip the gradient of each optimizer's parameters to this norm; None does not clip.
        schedule: Schedule of the learning rates over frames: ``"constant"``, ``"linear"``, ``"cosine"`` or a function
            of progress.
    """

    adam_eps: ClassVar[float] = 1e-8
    learns_from: ClassVar[str | None] = None
    """The stream that it learns from, as a DataModule names it in ``serves``; any, if None."""
    stream_for_it: ClassVar[str] = ""

    dry_run_of: ClassVar[str | None] = None
    """The method that builds the networks of :meth:`network_outputs`; None without a dry run of networks."""
    batch_shapes: ClassVar[Sequence[tuple[int, ...]]] = ((ROWS,),)
    """The shapes of batches for which encoders are tried."""

    honours_masks: ClassVar[bool] = False
    """Whether its policy takes what an ``action_mask`` of the observation allows alone, and its losses know of it."""

    learning_rate: FinitePositive = 3e-4
    optimizer: OptimizerFactory | None = None
    max_grad_norm: Positive | None = None
    schedule: str | Schedule = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.automatic_optimization = False
        self._schedule = as_schedule(self.schedule)
        # The parameters of each optimizer, under the name of their gradient's norm.
        self._groups: dict[str, OptimizedParameters] = {}
        self.passed_dry_run = False
        self._unchecked_states: Any = None

    @classmethod
    def check_later(cls, attribute: str, check: Check | None, name: str) -> None:
        """Leave the check to ``__setattr__``: a descriptor would hide a buffer that takes the place of a setting."""
        row = None if check is None else (check, name)
        cls.checks_of_attributes = {**cls.checks_of_attributes, attribute: row}

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether the networks exist."""

    @abstractmethod
    def build(self, specs: Any) -> Self:
        """Build networks and loss for an environment's specs, once; return the module."""

    def setup(self, stage: str) -> None:
        """Refuse a DataModule that does not fit, and a schedule over a run whose end is unknown, by a ValueError."""
        super().setup(stage)
        check_default_dtype()
        if stage == "fit":
            require_fit(self, self._data)
        moving = any(schedule != ConstantSchedule() for schedule in self.schedules)
        if stage == "fit" and moving and progress_of(self.trainer) is None:
            raise ValueError(
                "a schedule needs the end of the run, but nothing says how long it is: give the DataModule "
                "total_frames, or the trainer max_epochs or max_steps; or take schedule='constant'"
            )

    def misfit(self, data: Any) -> str | None:
        """Return why it does not fit a DataModule; None if it does."""
        specs = DataApi.of(data).specs
        if self.honours_masks or specs is None or ACTION_MASK not in specs.observation:
            return None
        return (
            f"the environment observes {ACTION_MASK!r}, which {type(self).__name__} does not look at; take a learner "
            "that does, model=ppo, a2c, vtrace, reinforce or dqn, or leave it out by drop=[action_mask] of an "
            "EnvironmentRecipe."
        )

    def configure_model(self) -> None:
        """Build the networks from the DataModule's specs.

        Before a fit a copy of the networks runs forward and backward once.

        Raises:
            ValueError: The trainer's precision is ``64-true``, ``bf16-true`` or the like, or a network fails.
            RuntimeError: The DataModule has no specs.
        """
        check_precision(self.trainer)
        data = DataApi.of(self._data)
        specs = data.specs
        if not self.is_built:
            if specs is None:
                raise RuntimeError(
                    f"the networks are built from `trainer.datamodule.specs`, but the datamodule is "
                    f"{type(self._data).__name__}; fit with one of our DataModules, or call `build(specs)` first"
                )
            with network_faults(self, specs):
                self.build(specs, **data.build_options)
        # A policy that is loaded from a file has no trainer, but a stand-in.
        trainer: Any = self.trainer
        if specs is not None and isinstance(trainer, Trainer) and trainer.state.fn == TrainerFn.FITTING:
            self.try_networks(specs, trainer)

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the outputs of actor and critics for observations ``[B]``, for a dry run."""
        return []

    def try_networks(self, specs: Any, trainer: Any) -> None:
        """Run a copy of the networks forward and backward, once; raise NetworkFault if they fail.

        A subclass that builds other networks is not tried: its outputs are unknown.
        """
        owner = None if self.dry_run_of is None else owner_of(self, self.dry_run_of)
        if owner is not None and owner is owner_of(self, "network_outputs") and not self.passed_dry_run:
            check_precision(trainer)
            dry_run(self, specs, trainer.strategy.root_device, trainer.precision_plugin.forward_context())
            self.passed_dry_run = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add checksums of weights, optimizers and data; in a subclass, what changes these comes before this."""
        checkpoint.update({key: with_own_numbers(entry) for key, entry in checkpoint.items()})
        seal(checkpoint, "state_dict", "optimizer_states", type(self._data).__qualname__)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint that is damaged, or another environment's, before it is loaded, by a ValueError."""
        check_seal(checkpoint, "the checkpoint")
        state = checkpoint.get(type(self._data).__qualname__)
        if state is not None:
            DataApi.of(self._data).check_state(state)
        self._unchecked_states = None
        trainer: Any = self._trainer
        if self.is_built and isinstance(trainer, Trainer) and trainer.state.fn == TrainerFn.FITTING:
            states = checkpoint.get("optimizer_states")  # Lightning names the remedy if there are none
            if states is not None and not self.check_optimizer_states(states):
                self._unchecked_states = states

    def on_fit_start(self) -> None:
        """Validate the states of optimizers that a subclass configures; they are loaded after this hook."""
        states, self._unchecked_states = self._unchecked_states, None
        if states is not None:
            with _as_fault():
                check_optimizer_states([copied_optimizer(each) for each in self.trainer.optimizers], states)

    def check_optimizer_states(self, states: Any) -> bool:
        """Validate stored optimizer states by a trial step on a copy of the module.

        Returns:
            False if a subclass from outside this package configures the optimizers: that may need the trainer.

        Raises:
            Fault: A state does not fit.
        """
        if not type(self).configure_optimizers.__module__.startswith(f"{__name__.partition('.')[0]}."):
            return False
        trainer = self._trainer
        trial = copy.deepcopy(self, {id(trainer): trainer})
        with _as_fault():
            check_optimizer_states(configured_optimizers(trial.configure_optimizers()), states)
        return True

    @staticmethod
    def require_built(network: T | None) -> T:
        """Return a network, or say by a RuntimeError that there is none yet."""
        if network is None:
            raise RuntimeError("the networks do not exist yet; the trainer builds them, or call `build(specs)`")
        return network

    # -- optimizers -------------------------------------------------------------------------------------------------

    def build_optimizers(
        self,
        actor: list[nn.Parameter],
        critic: list[nn.Parameter],
        critic_optimizer: OptimizerFactory | None = None,
    ) -> list[torch.optim.Optimizer]:
        """Return one optimizer over all parameters, or a second one over the critics' own."""
        self._groups = {}
        main = self.optimizer or self._default_optimizer
        if critic_optimizer is None:
            built = [self.build_optimizer(main, "grad_norm", actor, critic)]
        elif not actor:
            if self.optimizer is not None:
                raise ValueError(
                    f"optimizer must be None beside critic_optimizer, got {self.optimizer}: all parameters of "
                    f"{type(self).__name__} are a critic's. Give one of them."
                )
            built = [self.build_optimizer(critic_optimizer, "grad_norm", critic)]
        else:
            built = [
                self.build_optimizer(main, "grad_norm", actor),
                self.build_optimizer(critic_optimizer, "critic_grad_norm", critic),
            ]
        rates = [group.get("lr") for optimizer in built for group in optimizer.param_groups]
        needs = "an optimizer of that rate (optimizer and critic_optimizer have rates of their own)"
        self.require_effect("learning_rate", self.learning_rate in rates, needs)
        return built

    def build_optimizer(
        self, factory: OptimizerFactory, norm: str, *parts: list[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Return an optimizer over parts that are trained together, and have ``update`` step it."""
        optimizer = factory([parameter for part in parts for parameter in part])
        self._groups[norm] = OptimizedParameters(optimizer, parts, self.settled_parameters())
        return optimizer

    def settled_parameters(self) -> set[nn.Parameter]:
        """Return the parameters that must stay where they lie."""
        return settled_parameters(self)

    def _default_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return LeanAdam(parameters, lr=self.learning_rate, eps=self.adam_eps)

    def _optimizers(self) -> list[Any]:
        optimizers = self.optimizers()
        return list(optimizers) if isinstance(optimizers, list) else [optimizers]

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules that the run follows."""
        return [self._schedule]

    def on_train_start(self) -> None:
        """Set what an epoch starts with, if a resumed run starts one.

        Behind a checkpoint that was written at the end of an epoch's last batch Lightning leaves out
        ``on_train_epoch_start``. In the midst of an epoch everything stays as it was restored.
        """
        loop: Any = self.trainer.fit_loop.epoch_loop
        is_over = loop.batch_progress.current.processed >= self.trainer.num_training_batches
        if is_over and not loop.val_loop.restarted_mid_evaluation:  # which the epoch ends with
            self.on_train_epoch_start()

    def on_train_epoch_start(self) -> None:
        """Follow the schedules."""
        self.follow_schedules()

    def follow_schedules(self) -> None:
        """Set learning rates from the frames, so that a resumed run has the same."""
        factor = self._schedule(self.progress)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                # The initial rate is kept in the optimizer's own state, as torch's schedulers do.
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the learnt parameters that do not take part in this update."""
        return []

    def update(self, loss: Tensor, *, inner: bool = False) -> dict[str, Tensor]:
        """Step all optimizers on the loss; return the gradient norms before clipping.

        An ``inner`` update, of several in a step of Lightning's, is made without Lightning's hooks and step counter.
        """
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        for group in self._groups.values():
            group.clear()
        idle = self.idle_parameters() if self.trainer.world_size > 1 else []
        # Ranks wait for a gradient of each parameter. One of zeros keeps them in step, but would let momentum move it.
        loss = loss + sum(0.0 * parameter.sum() for parameter in idle) if idle else loss
        if inner and not is_scaled and type(self.trainer.strategy) is SingleDeviceStrategy:
            loss.backward()  # there are no ranks to wait for either
        else:
            self.manual_backward(loss)
        for parameter in idle:
            parameter.grad = None
        for group in self._groups.values():
            group.gather()
        return self.step_optimizers(inner=inner)

    def step_optimizers(self, *, inner: bool = False) -> dict[str, Tensor]:
        """Step all optimizers on the gradients that are handed over; return the norms of these before clipping."""
        norms: dict[str, Tensor] = {}
        plugin: Any = self.trainer.precision_plugin
        is_scaled = getattr(plugin, "scaler", None) is not None
        optimizers = self._optimizers()
        with _unscaled(plugin, optimizers) if is_scaled else nullcontext() as scaler:
            for number, (name, group) in enumerate(self._groups.items()):
                optimizer = optimizers[number]
                if self.max_grad_norm is not None:
                    norms[name] = group.clip(self.max_grad_norm)
                if not inner:
                    optimizer.step()
                elif scaler is None:
                    optimizer.optimizer.step()
                else:
                    scaler.step(optimizer.optimizer)
        return norms

    def minimise(self, terms: Mapping[str, Tensor | float], *, inner: bool = False) -> None:
        """Update on the sum of the entries ``loss_...`` (or ``loss``); report all entries and the gradient norms.

        The gradients of entries that are numbers have been written already.
        """
        loss: Any = None
        for name, value in terms.items():
            if name == "loss" or name.startswith("loss_"):
                loss = value if loss is None else loss + value
        norms = self.step_optimizers(inner=inner) if isinstance(loss, float) else self.update(loss, inner=inner)
        self.accumulate({**terms, **norms})

    def report(self) -> dict[str, float]:
        """Return the learning rate."""
        return {"learning_rate": float(self._optimizers()[0].param_groups[0]["lr"])}


class TermsModule(AgentModule):
    """An agent that says in ``terms`` what it minimises; arguments as of :class:`AgentModule`, and one.

    Args:
        compile: Compute the loss by ``torch.compile``.
    """

    training_metrics = train_names("learning_rate", "grad_norm", "critic_grad_norm")

    compiled: bool = setting(default=False, alias="compile")

    @abstractmethod
    def terms(self, batch: Any) -> Any:
        """Return the parts of the loss (``loss_...``) on a batch, and diagnostics; pure, so that it can be compiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._update: Callable[[Any], Any] = autograd

    def on_train_start(self) -> None:
        """Look for a way to compute gradients without autograd, which equals it to float error."""
        super().on_train_start()
        self._update = update_for(self) or autograd

    def on_train_end(self) -> None:
        """Release the memory of this fit."""
        super().on_train_end()
        self._update = autograd

    def compute(self, batch: Any) -> Any:
        """Return ``terms``, compiled if asked for."""
        return compiled(type(self).terms)(self, batch) if self.compiled else self.terms(batch)


def autograd(batch: Any) -> None:
    """Write no gradients: :meth:`TermsModule.compute` and autograd do."""


@contextmanager
def _unscaled(plugin: Any, optimizers: list[Any]) -> Iterator[_UnscaledSteps]:
    """Unscale the gradients of all optimizers, and update the gradient scaler once after the block.

    Lightning unscales and updates at each optimizer's step: too late to clip, and with another scale for the next one.
    """
    scaler = plugin.scaler
    moving = [each.optimizer for each in optimizers if _has_gradients(each.optimizer)]
    for optimizer in moving:
        scaler.unscale_(optimizer)
    plugin.scaler = _UnscaledSteps(scaler)
    try:
        yield plugin.scaler
    finally:
        plugin.scaler = scaler
    if moving:
        scaler.update()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


class _UnscaledSteps:
    """Stand-in for a gradient scaler while all gradients are unscaled already."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def update(self) -> None:
        pass  # other optimizers are still to step

    def step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> float | None:
        return self._scaler.step(optimizer, **kwargs) if _has_gradients(optimizer) else None


@contextmanager
def _as_fault() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Fault(str(error)) from error


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by ``torch.compile``, the same for all modules of one class."""
    return torch.compile(function)
