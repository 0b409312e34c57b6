"""World models: predictions of an ensemble of dynamics networks for observations and actions, many rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.settings import (
    FinitePositive,
    Fraction,
    NonNegative,
    PositiveInt,
    Settings,
    choices,
    setting,
)
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import check_defaults, integer
from torchrl_lightning.agents.model_based.ensembles import GaussianEnsemble, Widths, soft_clamp
from torchrl_lightning.dynamics import DynamicsTargets

Terminated = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of observations, actions and next observations ``[R, D]`` that returns termination flags, ``[R]`` or
``[R, 1]`` bool. :class:`DynamicsTargets` defines the columns. Observations are float64 if any real observation is
float64 or an integer."""
check_propagation = choices("step", "trajectory")
Propagation = Annotated[str, check_propagation]


class OutsideBox(ConfigSafe):
    """Terminate when the next observation leaves a box.

    Args:
        low: The smallest value of each element of the observation; None for no bound.
        high: The largest value of each element; None for no bound.

    Raises:
        ValueError: The lengths differ, no bound is given, or a lower bound is above its upper bound. A call raises the
            same error if an observation has another number of columns.

    Examples:
        >>> fallen = OutsideBox([-2.4, None], [2.4, None])
        >>> fallen(torch.zeros(2, 2), torch.zeros(2, 1), torch.tensor([[2.5, 0.0], [0.0, 9.0]]))
        tensor([ True, False])
    """

    def __init__(self, low: Sequence[float | None], high: Sequence[float | None]) -> None:
        if len(low) != len(high):
            raise ValueError(f"low and high must have equal lengths, got {len(low)} and {len(high)} numbers.")
        self.low = torch.tensor([-torch.inf if bound is None else bound for bound in low], dtype=torch.float64)
        self.high = torch.tensor([torch.inf if bound is None else bound for bound in high], dtype=torch.float64)
        for lower, upper in zip(self.low.tolist(), self.high.tolist(), strict=True):
            if not lower <= upper:
                raise ValueError(f"low must be at most high, got {lower} and {upper}.")
        if not (self.low.isfinite() | self.high.isfinite()).any():
            raise ValueError(
                f"low and high must contain at least one finite bound, got {list(low)} and {list(high)}. Set one, or "
                "leave terminated out."
            )

    def __call__(self, observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
        """Return whether each row ``[R]`` has left the box."""
        if next_observation.shape[-1] != len(self.low):
            raise ValueError(
                "low and high of OutsideBox must have a bound for each element of an observation with "
                f"{next_observation.shape[-1]} numbers, got {len(self.low)} bounds. Use None for no bound."
            )
        low, high = self.low.to(next_observation), self.high.to(next_observation)
        return ((next_observation < low) | (next_observation > high)).any(-1)


class WorldModelSettings(Settings):
    """Settings of a world model and of its fit.

    Args:
        hidden_sizes: Width of each hidden layer.
        activation: Name of the activation.
        probabilistic: Whether members predict variances; otherwise they minimise squared errors.
        propagation: ``"step"`` draws a row's member at each step, and ``"trajectory"`` draws it once for a trajectory.
        sample: Whether the world model samples from a member's Gaussian instead of taking its mean.
        terminated: A function that maps observations, actions and next observations to termination flags, for example
            :class:`~torchrl_lightning.OutsideBox`. A warning is logged if it disagrees with the stored transitions. If
            None, the ensemble learns terminations from its data. Without terminations in the data, no row terminates.
        learning_rate: Learning rate of Adam.
        weight_decay: Factor of the squared weights in the loss.
        patience: Number of epochs without improvement that ends a fit.
        min_improvement: Minimum relative decrease of a member's smallest error that counts as an improvement.
    """

    hidden_sizes: Widths = setting(default=(200, 200, 200), kw_only=False)
    activation: str = "silu"
    probabilistic: bool = True
    propagation: Propagation = "step"
    sample: bool = False
    terminated: Terminated | None = None
    learning_rate: FinitePositive = 1e-3
    weight_decay: NonNegative = 2.5e-5
    patience: PositiveInt = 5
    min_improvement: Fraction = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        # The default of `sample` differs between subclasses. sample=False is also valid without variances.
        self.require_effect("sample", self.probabilistic or not self.sample, "probabilistic=True")
        self.require_effect("activation", self.hidden_sizes, "hidden_sizes")

    def new_ensemble(self, num_members: int, targets: DynamicsTargets) -> GaussianEnsemble:
        """Build an ensemble with this number of members for these inputs and targets."""
        sizes = num_members, len(targets.input_columns), len(targets.target_columns)
        learns_terminated = targets.has_terminated and self.terminated is None
        ends_by = len(targets.observation_columns) if learns_terminated else 0
        return GaussianEnsemble(*sizes, self.hidden_sizes, self.activation, self.probabilistic, ends_by)

    def new_world_model(self, ensemble: GaussianEnsemble, targets: DynamicsTargets, num_elites: int) -> WorldModel:
        """Build a world model from an ensemble; its first members are the initial elites."""
        if self.terminated is not None:
            targets.check_function(self.terminated, "terminated")
        sample = self.sample and self.probabilistic
        options: dict[str, Any] = {"propagation": self.propagation, "sample": sample}
        return WorldModel(ensemble, targets, terminated=self.terminated, num_elites=num_elites, **options)


class WorldModel(nn.Module):
    r"""Predict \(s' = s + f(s, a)\), reward and termination with one elite member of an ensemble for each row.

    Each elite receives an equal number of random rows, at each step (TS1 of Chua et al., 2018) or once for a whole
    trajectory (TS-infinity).

    Args:
        ensemble: The ensemble, which maps standardised inputs to standardised targets.
        targets: Inputs and targets of the ensemble's training. Their reward function, if any, computes the
            reward. Otherwise the last target is the reward.
        terminated: The termination function. If None, a row terminates if its member predicts a termination with
            probability above one half at the predicted next observation. Without learnt terminations no row terminates.
        propagation: ``"step"`` or ``"trajectory"``.
        sample: Whether to sample next observations and rewards from the member's Gaussian instead of taking its mean.
        num_elites: Number of members that predict; None uses all. Before a fit, these are the first members.

    Raises:
        ValueError: A setting is out of range or has no effect on this ensemble.
    """

    elites: Tensor
    targets: DynamicsTargets

    def __init__(
        self,
        ensemble: GaussianEnsemble,
        targets: DynamicsTargets,
        *,
        terminated: Terminated | None = None,
        propagation: str = "step",
        sample: bool = False,
        num_elites: int | None = None,
    ) -> None:
        super().__init__()
        self.propagation = check_propagation(propagation, "propagation")
        num_elites = ensemble.num_members if num_elites is None else integer(num_elites, "num_elites")
        if num_elites > ensemble.num_members:
            raise ValueError(f"num_elites must be at most num_members={ensemble.num_members}, got {num_elites}.")
        if not ensemble.probabilistic:
            check_defaults("with probabilistic=False", "set probabilistic=True in the ensemble", sample=(sample, False))
        if num_elites == 1:
            check_defaults("with one elite", "use several elites", propagation=(propagation, "step"))
        self.ensemble, self.terminated, self.sample = ensemble, terminated, sample
        self.learns_terminated = ensemble.ends is not None and terminated is None
        self.observations = len(targets.observation_columns)
        # Do not register the targets, because the owner of their transform saves its state.
        set_unregistered(self, targets=targets)
        self.register_buffer("elites", torch.arange(num_elites))
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._termination_layers: list[tuple[Tensor, Tensor]] = []
        self._num_elites = 0
        self._weight_versions: tuple[Any, ...] = ()

    @torch.no_grad()
    def keep_improved(
        self, ensemble: GaussianEnsemble, errors: Tensor, best_errors: Tensor, min_improvement: float
    ) -> bool:
        """Copy the improved members of an ensemble into this model and select the elites by their best errors.

        Args:
            ensemble: The ensemble that is being fitted.
            errors: Validation errors of the ensemble's members, ``[M]``.
            best_errors: The members' smallest errors so far ``[M]``; this method overwrites the improved errors.
            min_improvement: Minimum relative decrease of a member's error that counts as an improvement.

        Returns:
            Whether any member has improved.
        """
        improved = errors < best_errors * (1.0 - min_improvement)
        if not improved.any():
            return False
        best_errors.copy_(torch.where(improved, errors, best_errors))
        self.ensemble.copy_members(ensemble, improved)
        self.elites.copy_(best_errors.argsort()[: len(self.elites)])
        return True

    def prepare(self) -> None:
        """Copy the elites' current weights if they have changed; ``predict`` does not check this."""
        tensors = [*self.ensemble.parameters(), *self.ensemble.buffers(), self.elites]
        weight_versions = tuple((id(tensor), tensor._version) for tensor in tensors)
        if weight_versions == self._weight_versions:
            return
        ensemble, self._weight_versions = self.ensemble, weight_versions
        # Use plain attributes, because looking up a submodule takes as long as a small operation.
        self._num_elites, self._activation = len(self.elites), ensemble.activation.forward

        def select_elites(values: Tensor) -> Tensor:
            return values.detach().index_select(0, self.elites)

        def layers_of(network: GaussianEnsemble) -> list[tuple[Tensor, Tensor]]:
            layers = zip(network.weights, network.biases, strict=True)
            return [(select_elites(weight), select_elites(bias)) for weight, bias in layers]

        def scale_inputs(layers: list[tuple[Tensor, Tensor]]) -> None:
            weight, bias = layers[0]
            layers[0] = weight / ensemble.input_std[: weight.shape[1], None], bias

        self._layers = layers_of(ensemble)
        if ensemble.probabilistic and self.sample:
            self._bounds = select_elites(ensemble.min_log_variance), select_elites(ensemble.max_log_variance)
        elif ensemble.probabilistic:  # means need no variance outputs
            weight, bias = self._layers[-1]
            self._layers[-1] = weight[..., : ensemble.outputs], bias[..., : ensemble.outputs]
        # The scales of inputs and targets are folded into the first and the last layer. The input mean is not folded.
        # With a large mean in the bias, the layer would subtract two large products and leave mostly rounding errors.
        self._input_mean, self._actions = ensemble.input_mean, ensemble.inputs - self.observations
        self._dtype = self._layers[0][0].dtype
        scale_inputs(self._layers)
        weight, bias = self._layers[-1]
        mean, std = torch.zeros_like(bias[0, 0]), torch.ones_like(bias[0, 0])
        mean[: ensemble.outputs], std[: ensemble.outputs] = ensemble.target_mean, ensemble.target_std
        self._layers[-1] = weight * std, bias * std + mean
        if self.learns_terminated and ensemble.ends is not None:
            self._termination_layers = layers_of(ensemble.ends)
            scale_inputs(self._termination_layers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._weight_versions = ()  # moved weights are the same objects, so prepare() would not detect them
        return super()._apply(fn, recurse)

    def assign_members(self, rows: int) -> Tensor:
        """Return the number of a random elite for each row ``[R]``; all elites receive equal parts of the rows."""
        return self._random_slots(rows) // -(-rows // len(self.elites))

    def step(self, observation: Tensor, action: Tensor, members: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Predict a step of rows ``[R]`` with the elites' current weights.

        Args:
            observation: Observations as columns, ``[R, O]``.
            action: Actions as columns, ``[R, A]``; discrete actions are one-hot.
            members: The number of each row's elite ``[R]``; random if None.

        Returns:
            Next observations ``[R, O]``, rewards ``[R]``, and whether the episode has terminated ``[R]``.
        """
        self.prepare()
        x = (torch.cat((observation, action), -1) - self._input_mean).to(self._dtype)
        elites, rows = self._num_elites, len(action)
        if elites > 1:
            if members is None:
                slots, block_size = self._random_slots(rows), -(-rows // elites)
            else:
                counts, order = members.bincount(minlength=elites), members.argsort()
                block_size, sorted_members = int(counts.max()), members[order]
                ranks = torch.arange(rows, device=order.device) - (counts.cumsum(0) - counts)[sorted_members]
                slots = torch.empty_like(order).index_copy_(0, order, sorted_members * block_size + ranks)
            x = x.new_zeros(elites * block_size, x.shape[1]).index_copy_(0, slots, x)
        change = self.predict(x.view(elites, -1, x.shape[1])).flatten(0, 1)
        if elites > 1:
            change = change.index_select(0, slots)
        next_observation = observation + change[:, : self.observations]
        if self.targets.reward is None:
            reward = change[:, self.observations]
        else:
            reward = self.targets.reward(observation, action, next_observation).reshape(rows).to(change.dtype)
        if self.learns_terminated:
            return next_observation, reward, change[:, -1] > 0.0
        if self.terminated is None:
            return next_observation, reward, torch.zeros_like(reward, dtype=torch.bool)
        return next_observation, reward, self.terminated(observation, action, next_observation).reshape(rows)

    def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
        """Return the rewards ``[R]`` of action sequences, summed until the episode terminates.

        Args:
            observation: First observation of each sequence, as columns ``[R, O]``.
            actions: Actions in the environment's format, ``[H, R, *A]``.
        """
        self.prepare()
        actions = self.targets.action(actions, actions.shape[:2])
        columns = (actions - self._input_mean[self.observations :]).to(self._dtype)
        if self.targets.reward is not None or self.terminated is not None:
            columns = torch.cat((columns, actions), -1)
        # The state is the observation minus its mean, followed by a column with the sum of rewards. Rows are ordered by
        # elite, so that one shuffle assigns new elites. Moving each row to its elite and back would take longer.
        mean = self._input_mean[: self.observations]
        state = F.pad((observation - mean).to(self._dtype), (0, 1))
        mean, elites, rows = mean.to(observation.dtype), self._num_elites, len(observation)
        order: Tensor | None = None
        ended: Tensor | None = None
        if rows % elites:
            repeated = torch.arange(-(-rows // elites) * elites, device=state.device) % rows
            state, columns = state.index_select(0, repeated), columns.index_select(1, repeated)
        for action in columns:
            if elites > 1 and (order is None or self.propagation == "step"):
                permutation = torch.randperm(len(state), device=state.device)
                order = permutation if order is None else order.index_select(0, permutation)
                state = state.index_select(0, permutation)
                ended = None if ended is None else ended.index_select(0, permutation)
            if order is not None:
                action = action.index_select(0, order)
            state, ended = self._advance(state, action, ended, mean)
        total = state[:, -1]
        return total if order is None else torch.empty_like(total).index_copy_(0, order, total)[:rows]

    def _advance(
        self, state: Tensor, action: Tensor, ended: Tensor | None, mean: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next state ``[R, O + 1]`` and the mask of terminated episodes.

        Args:
            state: Observations minus their mean; the last column is the sum of rewards.
            action: Actions minus their mean, followed by the unchanged actions if a function needs them.
            ended: Mask of episodes that have already terminated.
            mean: The mean of observations ``[O]``, in the dtype of the functions' inputs.
        """
        observation, width = state[:, :-1], self._actions
        action, raw_action = action[:, :width], action[:, width:]
        x = torch.cat((observation, action), 1)
        change, terminated = self.predict(x.view(self._num_elites, -1, x.shape[1])).view(len(x), -1), None
        if self.learns_terminated:
            change, terminated = change[:, :-1], change[:, -1] > 0.0
        if self.targets.reward is not None:
            reward = self.targets.reward(observation + mean, raw_action, observation + change + mean)
            change = torch.cat((change, reward.view(-1, 1).to(change.dtype)), 1)
        if ended is not None:
            change[:, -1].masked_fill_(ended, 0.0)
        state = state + change
        if self.terminated is not None:
            terminated = self.terminated(observation + mean, raw_action, state[:, :-1] + mean).view(-1)
        return state, terminated if terminated is None or ended is None else ended | terminated

    def _random_slots(self, rows: int) -> Tensor:
        """Return a random slot ``[R]`` for each row; each elite has an equal block of consecutive slots."""
        elites = len(self.elites)
        return torch.randperm(-(-rows // elites) * elites, device=self.elites.device)[:rows]

    def predict(self, x: Tensor) -> Tensor:
        """Map each elite's inputs minus their mean, ``[E, R, I]``, to targets ``[E, R, O]`` in original units.

        If terminations are learnt, the last column is the logit of the termination.
        """
        inputs, (*hidden, (weight, bias)) = x, self._layers
        for hidden_weight, hidden_bias in hidden:
            x = self._activation(torch.baddbmm(hidden_bias, x, hidden_weight))
        x = torch.baddbmm(bias, x, weight)
        if self.sample and self.ensemble.probabilistic:
            (low, high), std = self._bounds, self.ensemble.target_std
            mean, log_variance = x.chunk(2, -1)
            x = mean + (0.5 * soft_clamp(log_variance, low, high)).exp() * std * torch.randn_like(mean)
        if not self.learns_terminated:
            return x
        logit = inputs[..., : self.observations] + x[..., : self.observations]
        *hidden, (weight, bias) = self._termination_layers
        for hidden_weight, hidden_bias in hidden:
            logit = self._activation(torch.baddbmm(hidden_bias, logit, hidden_weight))
        return torch.cat((x, torch.baddbmm(bias, logit, weight)), -1)
