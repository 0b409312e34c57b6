"""LightningModule of PETS: train an ensemble of dynamics networks and act by planning with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

import torch
from lightning import LightningDataModule
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import PositiveInt, setting
from torchrl_lightning._core.tree import path_of
from torchrl_lightning.agents.base import LossTermsModule
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.model_based.ensembles import GaussianEnsemble
from torchrl_lightning.agents.model_based.planners import CrossEntropyPlanner, ShootingPlanner
from torchrl_lightning.agents.model_based.terminations import TerminationCheck
from torchrl_lightning.agents.model_based.world_env import WorldModelEnvironment
from torchrl_lightning.agents.model_based.world_models import WorldModel, WorldModelSettings
from torchrl_lightning.dynamics import DynamicsTargets, QuadraticReward
from torchrl_lightning.environments import spawn_seed

STATE = "dynamics_ensemble"
Planner = Callable[[WorldModelEnvironment], TensorDictModuleBase]


def check_planner(value: Any, name: str) -> Planner:
    """Return a planner factory, by default CrossEntropyPlanner; raise TypeError if it is not callable."""
    if value is None:
        return CrossEntropyPlanner
    if not callable(value):
        raise TypeError(
            f"{name} must be a callable that builds a planner from a world model, such as "
            f"functools.partial(CrossEntropyPlanner, horizon=20), got {value!r}."
        )
    planner: Planner = value
    return planner


class DynamicsEnsemble(WorldModelSettings, LossTermsModule):
    r"""An ensemble of probabilistic dynamics networks with a planner as the policy: PETS (Chua et al., 2018).

    The inputs \(x = [s, a]\) and targets \(y = [s' - s, r]\) are standardised. On its own batch, each member minimises

    .. math::
        \overline{(\mu(x) - y)^2 e^{-\ell(x)}} + \overline{\ell(x)}
        + 0.01 \Big(\sum \ell_{\max} - \sum \ell_{\min}\Big) + \lambda \sum W^2

    with log-variances \(\ell\) between \(\ell_{\min}\) and \(\ell_{\max}\), as in MBPO (Janner et al., 2019). If the
    DataModule serves terminations and the setting ``terminated`` is None, a second perceptron of each member learns the
    terminations by binary cross-entropy.

    A ``DynamicsDataModule`` serves training batches as TensorDicts ``[M, B]`` with ``inputs`` ``[M, B, I]``,
    ``targets`` ``[M, B, O]`` and optionally ``terminated`` ``[M, B, 1]``. No member is trained on the rows of
    validation batches ``[B]``. ``begin_fit`` starts a fit. Each epoch stores the weights of the members that reduced
    their validation error by more than ``min_improvement``. The fit ends after ``patience`` epochs without an
    improvement. The planner uses the stored weights of the ``num_elites`` best members, and the next fit starts from
    the stored weights of all members. A checkpoint contains this state.

    Args:
        num_elites: Number of members in the world model; None takes all members.
        planner: A callable that takes the world model as a TorchRL environment and returns the policy, for example a
            partial of :class:`~torchrl_lightning.CrossEntropyPlanner` (the default) or of TorchRL's ``CEMPlanner``.
        compile: Compile the loss with ``torch.compile``.
        hidden_sizes: As in :class:`WorldModelSettings`, like all arguments that are not listed here.
        optimizer: As in :class:`AgentModule`, like ``max_grad_norm`` and ``schedule``.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> module = DynamicsEnsemble([16]).build(specs, num_members=3)
        >>> module.policy(specs.observation.zero([2]))["action"].shape
        torch.Size([2, 1])
    """

    CONFIG_NAME: ClassVar[str | None] = "pets"
    stream_kind = "fits"
    suggested_data = "data=model_based (DynamicsDataModule)"
    training_metrics = (
        *LossTermsModule.training_metrics,
        *train_names("loss_error", "loss_variance", "loss_bounds", "loss_decay", "loss_terminated", "error"),
    )

    _policy: TensorDictModuleBase | None = None  # built by the property policy

    num_elites: PositiveInt | None = None
    planner: Annotated[Planner, check_planner] = setting(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ensemble: GaussianEnsemble | None = None
        self.world_model: WorldModel | None = None
        # The smallest error of each member [M] in the current fit, and the number of epochs since the last improvement.
        self.register_buffer("best_errors", torch.empty(0))
        self.epochs_waited = 0
        self._policy_device: torch.device | None = None
        self._error_sums: Tensor | None = None
        self._validation_rows = 0
        self._check_terminations = TerminationCheck()
        self._is_validated = False  # True after the first validation of this fit

    # -- networks ---------------------------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        """True once the networks exist."""
        return self.ensemble is not None

    def build(self, specs: Any, *, num_members: int = 5, targets: DynamicsTargets | None = None) -> Self:
        """Build networks and world model for an environment's specs and return the module; a second call does nothing.

        Args:
            specs: ``EnvironmentSpecs``.
            num_members: Number of members, M.
            targets: Definition of inputs and targets; None predicts the changes of all observations and the reward.

        Raises:
            ValueError: There are fewer members than elites.
        """
        if self.ensemble is None:
            if self.num_elites is not None and self.num_elites > num_members:
                raise ValueError(f"num_elites must be at most num_members={num_members}, got {self.num_elites}.")
            targets = DynamicsTargets(specs.observation, specs.action) if targets is None else targets
            self.ensemble, stored = (self.new_ensemble(num_members, targets) for _ in range(2))
            stored.requires_grad_(False).copy_members(self.ensemble)
            self.world_model = self.new_world_model(stored, targets, self.num_elites or num_members)
            self.best_errors = torch.full((num_members,), torch.inf)
        return self

    def configure_model(self) -> None:
        """Build the networks from the DataModule's options; without a DataModule, ``on_load_checkpoint`` builds them.

        Raises:
            RuntimeError: The DataModule is not a DynamicsDataModule.
        """
        if "targets" in DataApi.of(self._data).build_options:
            super().configure_model()
        elif not self.is_built and isinstance(self._data, LightningDataModule):
            raise RuntimeError(
                f"the DataModule of {type(self).__name__} must be a DynamicsDataModule, got "
                f"{type(self._data).__name__}."
            )

    def incompatibility(self, data: Any) -> str | None:
        """Return why a DataModule is incompatible, or None; raise ValueError if a setting has no effect."""
        if self.terminated is not None and DataApi.of(data).terminated is True:
            return (
                f"data.terminated must be left at its default False if {type(self).__name__} has a function "
                "terminated, got True, which has no effect. Leave it out, or leave the function out."
            )
        if self._trainer is not None and self.trainer.limit_val_batches == 0:
            for name in ("patience", "min_improvement"):
                self.require_effect(name, False, "validation (limit_val_batches above 0)")
        return super().incompatibility(data)

    @property
    def policy(self) -> TensorDictModuleBase:
        """The planner, which plans with the stored weights of the ensemble."""
        model = self.require_built(self.world_model)
        planner = self._policy
        if planner is None or self._policy_device != model.elites.device:
            # Do not register the planner, so that a state dict contains the networks only once.
            previous, planner = planner, self.planner(WorldModelEnvironment(model, model.elites.device))
            if isinstance(planner, ShootingPlanner):
                seed = DataApi.of(self._data).seed
                planner.inherit_generator(previous, None if seed is None else spawn_seed(seed, "planner"))
            set_unregistered(self, _policy=planner)
            self._policy_device = model.elites.device
        return planner

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizer of all members."""
        return self.build_optimizers(list(self.require_built(self.ensemble).parameters()), [])

    # -- learning ---------------------------------------------------------------------------------------------------

    def begin_fit(self, targets: DynamicsTargets) -> None:
        """Start a fit from the stored weights, with newly standardised targets."""
        ensemble = self.require_built(self.ensemble)
        ensemble.copy_members(self.require_built(self.world_model).ensemble)
        ensemble.standardise(targets.input_scaler, targets.target_scaler)
        self.best_errors.fill_(torch.inf)
        self.epochs_waited, self._is_validated = 0, False

    def check_transitions(self, rows: TensorDictBase) -> None:
        """Compare the termination function with stored transitions ``[N]``, and warn once if they disagree."""
        self._check_terminations(self.require_built(self.world_model), rows)

    @property
    def fit_is_over(self) -> bool:
        """True if no member has improved for ``patience`` epochs."""
        return self.epochs_waited >= self.patience

    def losses(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the loss terms and the mean squared error of a batch ``[M, B]``."""
        ensemble = self.require_built(self.ensemble)
        terminated = batch.get("terminated", None)
        return ensemble.loss(batch.get("inputs"), batch.get("targets"), self.weight_decay, terminated)

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Update all members, each on its own rows."""
        self.minimise(self.compute(batch))

    def validation_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """Add up the squared errors of held-out rows ``[B]``; log evaluation episodes, which have no ``inputs``."""
        if "inputs" not in batch:
            super().validation_step(batch, batch_idx)
            return
        ensemble = self.require_built(self.ensemble)
        errors = ensemble.errors(batch.get("inputs"), batch.get("targets"))
        self._error_sums = errors if self._error_sums is None else self._error_sums + errors
        self._validation_rows += batch.batch_size[0]

    def on_validation_epoch_end(self) -> None:
        """Store the improved members, choose the elites, and count the epochs without improvement."""
        super().on_validation_epoch_end()
        sums, rows, self._error_sums, self._validation_rows = self._error_sums, self._validation_rows, None, 0
        if sums is None:
            return
        errors = sums / rows
        self.log("val/error", errors.mean(), on_step=False, on_epoch=True, batch_size=rows)
        self.store_improved(errors)

    def store_improved(self, errors: Tensor) -> None:
        """Store the weights of the members with improved held-out errors ``[M]``, and choose the elites again."""
        ensemble, model = self.require_built(self.ensemble), self.require_built(self.world_model)
        self._is_validated = True
        has_improved = model.keep_improved(ensemble, errors, self.best_errors, self.min_improvement)
        self.epochs_waited = 0 if has_improved else self.epochs_waited + 1

    def on_train_epoch_end(self) -> None:
        """Log the epoch; without held-out rows, store the weights of all members."""
        super().on_train_epoch_end()
        if not self._is_validated:
            self.require_built(self.world_model).ensemble.copy_members(self.require_built(self.ensemble))

    # -- state ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the progress of the fit and the build options of the networks."""
        super().on_save_checkpoint(checkpoint)
        targets = self.require_built(self.world_model).targets
        checkpoint[STATE] = {
            "num_members": self.require_built(self.ensemble).num_members,
            "observation_keys": [list(path_of(key)) for key in targets.observation_keys],
            "learns_reward": targets.reward is None,
            "reward": targets.reward.state if isinstance(targets.reward, QuadraticReward) else None,
            "learns_terminated": self.require_built(self.world_model).learns_terminated,
            "epochs_waited": self.epochs_waited,
            "is_judged": self._is_validated,
        }
        if isinstance(self.policy, ShootingPlanner):
            checkpoint[STATE]["planner"] = self.policy.get_extra_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the networks if necessary, and restore the fit; raise KeyError if another kind of module saved it.

        Raises:
            ValueError: The checkpoint belongs to another environment, or either the checkpoint or the module
                learns terminations, but not both. The same error is raised if the networks are not built and the model
                has a reward function other than a :class:`~torchrl_lightning.QuadraticReward`.
        """
        super().on_load_checkpoint(checkpoint)
        if STATE not in checkpoint:
            raise KeyError(f"the checkpoint has no {STATE!r}: it was not written by a DynamicsEnsemble")
        state = checkpoint[STATE]
        learns_terminated = bool(state["learns_terminated"])
        if not self.is_built:
            members, specs = state["num_members"], self._data.specs
            reward = None if state.get("reward") is None else QuadraticReward.from_state(state["reward"])
            if reward is None and not state["learns_reward"]:
                raise ValueError(
                    "the checkpoint's world model has a reward function, which checkpoints cannot contain. Use a "
                    "QuadraticReward in training, or pass the module: "
                    f"load_policy(path, module=MyModule(...).build(specs, num_members={members}, targets="
                    "DynamicsTargets(specs.observation, specs.action, reward=my_reward)))"
                )
            keys = [tuple(path) for path in state["observation_keys"]]
            options: dict[str, Any] = {"observation_keys": keys, "terminated": learns_terminated, "reward": reward}
            targets = DynamicsTargets(specs.observation, specs.action, **options)
            self.build(specs, num_members=members, targets=targets)
        if learns_terminated != self.require_built(self.world_model).learns_terminated:
            raise ValueError(
                f"the checkpoint's world model {'learns' if learns_terminated else 'does not learn'} terminations, but "
                f"this one {'does not' if learns_terminated else 'does'}. Set data.terminated and model.terminated as "
                "in the run of the checkpoint."
            )
        self.epochs_waited, self._is_validated = int(state["epochs_waited"]), bool(state["is_judged"])
        if isinstance(self.policy, ShootingPlanner):
            self.policy.set_extra_state(state["planner"])
