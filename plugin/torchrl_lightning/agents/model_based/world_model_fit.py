"""Build a world model from an ensemble, and fit it to stored transitions in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.settings import Boolean, PositiveInt, setting
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning.agents.analytic import FusedAdam, OptimizedParameters
from torchrl_lightning.agents.model_based.ensembles import Widths
from torchrl_lightning.agents.model_based.terminations import TerminationCheck
from torchrl_lightning.agents.model_based.world_models import WorldModel, WorldModelSettings
from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.dynamics.scaler import check_finite


class WorldModelFit(WorldModelSettings, ConfigSafe):
    """Build a world model, and fit it to transitions until its errors on validation rows stop improving.

    The loss is the loss of :class:`~torchrl_lightning.DynamicsEnsemble`, which learns over epochs of Lightning. This
    class fits the world model between two updates of an agent. Each member learns from its own rows, which are drawn
    with replacement and shuffled again in each epoch. A fit uses a new optimizer. It starts from the members that
    the previous fit kept.

    Args:
        hidden_sizes: Width of each hidden layer.
        num_members: Number of members of the ensemble.
        num_elites: Number of best members in the world model.
        batch_size: Number of rows of each member in a batch.
        max_epochs: Maximum number of epochs of a fit.
        learn_terminated: Whether the ensemble learns terminations instead of using a function ``terminated``.
        activation: As in :class:`WorldModelSettings`, like all arguments that are not listed here.

    Raises:
        ValueError: A number is out of range, ``num_elites`` exceeds ``num_members``, both ``terminated`` and
            ``learn_terminated`` are set, or a setting has no effect. ``build`` raises the same error if ``terminated``
            fails.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> WorldModelFit([16], num_members=3, num_elites=2).build(specs).elites
        tensor([0, 1])
    """

    hidden_sizes: Widths = setting(default=(200, 200, 200, 200), kw_only=False)
    num_members: PositiveInt = 7
    num_elites: PositiveInt = 5
    sample: bool = True
    batch_size: PositiveInt = 256
    max_epochs: PositiveInt = 100
    learn_terminated: Boolean = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_elites > self.num_members:
            raise ValueError(f"num_elites must be at most num_members={self.num_members}, got {self.num_elites}.")
        if self.learn_terminated and self.terminated is not None:
            raise ValueError("learn_terminated must be False if terminated is set, got True. Use one of the two.")
        self.require_effect("propagation", self.num_elites > 1, "more than one elite (num_elites)")
        for name in ("patience", "min_improvement"):
            self.require_effect(name, self.max_epochs > 1, "max_epochs above 1")
        self._check_terminations = TerminationCheck()

    def build(self, specs: Any) -> WorldModel:
        """Build the world model of an environment from its ``EnvironmentSpecs``; the ensemble learns the reward."""
        targets = DynamicsTargets(specs.observation, specs.action, terminated=self.learn_terminated)
        ensemble = self.new_ensemble(self.num_members, targets).requires_grad_(False)
        return self.new_world_model(ensemble, targets, self.num_elites)

    def fit(self, model: WorldModel, training: TensorDictBase, validation: TensorDictBase) -> tuple[Tensor, int]:
        """Fit a world model to transitions ``[N]``, validated on other transitions ``[V]``.

        Returns:
            The elites' mean squared validation errors ``[E]`` in standardised units, and the number of epochs.

        Raises:
            ValueError: No transitions are given, or a value is NaN or infinite; the message names its column.
            RuntimeError: The fit diverged.
        """
        device, targets = model.elites.device, model.targets.fit(training)
        self._check_terminations(model, training, validation)
        training, validation = (rows[targets.usable(rows)] for rows in (training, validation))
        ensemble = copy.deepcopy(model.ensemble).requires_grad_(True)
        ensemble.standardise(targets.input_scaler, targets.target_scaler)
        training, validation = targets(training), targets(validation)
        check_finite(validation["inputs"], targets.input_columns)
        check_finite(validation["targets"], targets.target_columns)
        x, y = training["inputs"].to(device), training["targets"].to(device)
        validation_x, validation_y = validation["inputs"].to(device), validation["targets"].to(device)
        terminated = training["terminated"].to(device) if model.learns_terminated else None
        member_rows = torch.randint(len(x), (self.num_members, len(x)), device=device)
        parameters = list(ensemble.parameters())
        optimizer = FusedAdam(parameters, lr=self.learning_rate)
        flat = OptimizedParameters(optimizer, [parameters])
        best_errors, epochs_waited, epoch = torch.full((self.num_members,), torch.inf, device=device), 0, 0
        while epoch < self.max_epochs and epochs_waited < self.patience:
            for index in torch.randperm(len(x), device=device).split(self.batch_size):
                rows = member_rows.index_select(1, index)
                with torch.enable_grad():
                    flags = None if terminated is None else terminated[rows]
                    terms = ensemble.loss(x[rows], y[rows], self.weight_decay, flags)
                    loss = torch.stack([value for name, value in terms.items() if name.startswith("loss_")]).sum()
                flat.clear()
                loss.backward()
                flat.gather()
                optimizer.step()
            errors = ensemble.errors(validation_x, validation_y) / len(validation_x)
            epochs_waited = (
                0 if model.keep_improved(ensemble, errors, best_errors, self.min_improvement) else epochs_waited + 1
            )
            epoch += 1
        errors = best_errors[model.elites]
        if not errors.isfinite().all():
            raise RuntimeError(
                f"the world model's fit to {len(x)} transitions diverged: the validation errors of the elites are "
                f"{errors.tolist()}. Set learning_rate below {self.learning_rate}."
            )
        return errors, epoch
