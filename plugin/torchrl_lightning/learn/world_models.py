"""World models: what an ensemble of dynamics networks predicts for observations and actions, many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.learn.ensembles import GaussianEnsemble
from torchrl_lightning.ranges import one_of

Terminated = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps observations, actions and next observations ``[R, D]``, as the columns of :class:`DynamicsTargets` show them, to
whether the episode has terminated, ``[R]`` or ``[R, 1]`` bool."""
PROPAGATION = ("step", "trajectory")


class OutsideBox:
    """Terminate where the next observation leaves a box.

    Args:
        low: The least value of each number of the observation; None has no bound.
        high: The largest values.

    Raises:
        ValueError: The two are of different lengths.

    Example:
        >>> fallen = OutsideBox([-2.4, None], [2.4, None])
        >>> fallen(torch.zeros(2, 2), torch.zeros(2, 1), torch.tensor([[2.5, 0.0], [0.0, 9.0]]))
        tensor([ True, False])
    """

    def __init__(self, low: Sequence[float | None], high: Sequence[float | None]) -> None:
        if len(low) != len(high):
            raise ValueError(f"low has {len(low)} numbers and high {len(high)}, but both bound the same observation.")
        self.low = torch.tensor([-torch.inf if bound is None else bound for bound in low])
        self.high = torch.tensor([torch.inf if bound is None else bound for bound in high])

    def __call__(self, observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
        """Return whether each row ``[R]`` has left the box."""
        low, high = self.low.to(next_observation), self.high.to(next_observation)
        return ((next_observation < low) | (next_observation > high)).any(-1)


class WorldModel(nn.Module):
    r"""Predict \(s' = s + f(s, a)\), reward and termination by one elite member of an ensemble for each row.

    Rows are dealt out evenly among the elites at random: at each step (TS1 of Chua et al., 2018), or once for a whole
    trajectory (TS-infinity).

    Args:
        ensemble: Maps standardised inputs to standardised targets.
        targets: What inputs and targets it was trained on; the rewards are those of its reward function, if it has one,
            else the last target.
        terminated: The termination function; nothing terminates if None.
        propagation: ``"step"`` or ``"trajectory"``.
        sample: Whether next observations and rewards are drawn from the member's Gaussian; else its mean is taken.
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
    ) -> None:
        super().__init__()
        self.ensemble, self.terminated, self.sample = ensemble, terminated, sample
        self.propagation = one_of(propagation, "propagation", PROPAGATION)
        self.observations = len(targets.observation_columns)
        # Not registered: the state of the transform is its owner's.
        self.__dict__["targets"] = targets
        self.register_buffer("elites", torch.arange(ensemble.num_members))
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._made_of: tuple[Any, ...] = ()

    def prepare(self) -> None:
        """Take the elites' weights as they are now; the methods below do not look whether they have changed."""
        parts = [*self.ensemble.parameters(), *self.ensemble.buffers(), self.elites]
        made_of = tuple((part.data_ptr(), part._version) for part in parts)
        if made_of == self._made_of:
            return
        ensemble, self._made_of = self.ensemble, made_of

        def of_elites(values: Tensor) -> Tensor:
            return values.detach().index_select(0, self.elites)

        self._layers = [
            (of_elites(weight), of_elites(bias)) for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True)
        ]
        if ensemble.probabilistic:
            if self.sample:
                self._bounds = of_elites(ensemble.min_log_variance), of_elites(ensemble.max_log_variance)
            else:  # nobody asks for the variances
                weight, bias = (part[..., : ensemble.outputs].contiguous() for part in self._layers[-1])
                self._layers[-1] = weight, bias
        self._input_scale = ensemble.input_std.reciprocal()

    def deal(self, rows: int) -> Tensor:
        """Return an elite's number ``[R]`` for each row, as many rows for each elite, at random."""
        return self._places(rows) // -(-rows // len(self.elites))

    def step(self, observation: Tensor, action: Tensor, members: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Predict a step of rows ``[R]``, with the elites' weights as they are now.

        Args:
            observation: Observations as columns, ``[R, O]``.
            action: Actions as columns, ``[R, A]``; discrete ones are one-hot.
            members: The number of each row's elite ``[R]``; dealt at random if None.

        Returns:
            Next observations ``[R, O]``, rewards ``[R]``, and whether the episode has terminated ``[R]``.
        """
        self.prepare()
        if members is None or len(self.elites) == 1:
            return self._step(observation, action)
        counts = members.bincount(minlength=len(self.elites))
        share, order = int(counts.max()), members.argsort()
        ranks = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[members[order]]
        places = torch.empty_like(order).index_copy_(0, order, members[order] * share + ranks)
        return self._step(observation, action, places, share)

    def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
        """Return the summed rewards ``[R]``, until the episode terminates, of action sequences.

        Args:
            observation: Where each begins, as columns ``[R, O]``.
            actions: As the environment takes them, ``[H, R, *A]``.
        """
        self.prepare()
        total = observation.new_zeros(len(observation))
        ended: Tensor | None = None
        places = self._places(len(total)) if self.propagation == "trajectory" and len(self.elites) > 1 else None
        for action in self.targets.action(actions, actions.shape[:2]):
            observation, reward, terminated = self._step(observation, action, places)
            total += reward if ended is None else reward.masked_fill(ended, 0.0)
            if self.terminated is not None:
                ended = terminated if ended is None else ended | terminated
        return total

    def _places(self, rows: int) -> Tensor:
        """Return a place ``[R]`` for each row in equal shares of the elites, which lie one after the other."""
        elites = len(self.elites)
        return torch.randperm(-(-rows // elites) * elites, device=self.elites.device)[:rows]

    def _step(
        self, observation: Tensor, action: Tensor, places: Tensor | None = None, share: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat((observation, action), -1)
        elites, rows = len(self.elites), len(x)
        x = (x - self.ensemble.input_mean).mul_(self._input_scale)
        if elites > 1:
            places = self._places(rows) if places is None else places
            x = x.new_zeros(elites * (share or -(-rows // elites)), x.shape[1]).index_copy_(0, places, x)
        x = self._predict(x.view(elites, -1, x.shape[1])).flatten(0, 1)
        if places is not None:
            x = x.index_select(0, places)
        change = torch.addcmul(self.ensemble.target_mean, x, self.ensemble.target_std)
        following = observation + change[:, : self.observations]
        given = self.targets.reward
        reward = change[:, self.observations] if given is None else given(observation, action, following).reshape(rows)
        if self.terminated is None:
            return following, reward, torch.zeros_like(reward, dtype=torch.bool)
        return following, reward, self.terminated(observation, action, following).reshape(rows)

    def _predict(self, x: Tensor) -> Tensor:
        """Map standardised inputs ``[E, R, I]`` to standardised outputs ``[E, R, O]``."""
        *hidden, (weight, bias) = self._layers
        for each, its_bias in hidden:
            x = self.ensemble.activation(torch.baddbmm(its_bias, x, each))
        x = torch.baddbmm(bias, x, weight)
        if not (self.sample and self.ensemble.probabilistic):
            return x
        low, high = self._bounds
        mean, log_variance = x.chunk(2, -1)
        log_variance = low + F.softplus(high - F.softplus(high - log_variance) - low)
        return mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
