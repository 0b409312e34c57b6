"""Planners: policies that evaluate action sequences in a world model and take the first action of a good sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self
from zlib import crc32

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_lightning._core.mixins import GeneratorMixin
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.settings import (
    Boolean,
    FinitePositive,
    NonNegative,
    PositiveInt,
    Settings,
    computed,
    setting,
)
from torchrl_lightning._core.state import check_state
from torchrl_lightning._core.state import generator as generator_state
from torchrl_lightning.agents.model_based.world_env import WorldModelEnvironment
from torchrl_lightning.agents.model_based.world_models import WorldModel
from torchrl_lightning.agents.networks.action_heads import action_bounds, action_name
from torchrl_lightning.agents.networks.exploration import DETERMINISTIC
from torchrl_lightning.agents.networks.squashed import action_range
from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.environments.seeds import IsolatedRng, numbered_seed


class ShootingPlanner(Settings, GeneratorMixin, TensorDictModuleBase):
    """Base class of planners; a planner writes ``action`` for observations ``[]`` or ``[N]``.

    A planner draws random candidates. While exploring, each plan takes its seed from :attr:`generator`. The planner's
    state contains the generator's state. Under deterministic exploration the seed is computed from the observations and
    the generator's initial seed. Equal observations then give equal actions. Different steps still draw different
    random numbers. With equal numbers, sampling errors would add up over an episode. Torch's global generator
    is unchanged.

    The world model is a submodule, so the parameters, the device moves and the state dict of the planner include it.

    Args:
        env: The world model as an environment.
        horizon: Number of steps to plan ahead, H.
        candidates: Number of action sequences per iteration, K.
        particles: Number of rollouts per sequence; the planner averages their returns.
    """

    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("env",)
    cannot_be_exported: ClassVar[str] = (
        "it samples action sequences and evaluates them in a world model at each step; keep the checkpoint, and use "
        "load_policy"
    )

    env: WorldModelEnvironment = setting(kw_only=False)
    horizon: PositiveInt = 15
    candidates: PositiveInt = 500
    particles: PositiveInt = 1
    model: WorldModel = computed()
    targets: DynamicsTargets = computed()
    device_tensor: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        env = self.env
        del self.env  # only its world model is part of the planner
        self.model = env.world_model
        # Do not register the targets, because the owner of their transform saves its state.
        set_unregistered(self, targets=env.targets)
        is_stochastic = self.model.sample or len(self.model.elites) > 1
        self.require_effect("particles", is_stochastic, "a world model with several elites or sample=True")
        self.action_spec: TensorSpec = env.action_spec
        self.in_keys: list[NestedKey] = list(env.targets.observation_keys)
        self.out_keys: list[NestedKey] = ["action"]
        # Collectors read a policy's device from its tensors.
        self.register_buffer("device_tensor", torch.zeros((), dtype=torch.float32, device=env.device), persistent=False)

    @abstractmethod
    def plan(self, observation: Tensor, starts: Tensor | None) -> Tensor:
        """Return the action ``[N, *A]`` of observations ``[N, O]``; ``starts`` marks episode starts (``[N]`` bool)."""

    @torch.no_grad()
    def compute_step(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return the action of a step by key without writing it."""
        observation, starts = self.targets.observation(step), step.get("is_init", None)
        rows = observation.reshape(-1, observation.shape[-1])
        with IsolatedRng(self._next_seed(rows), self.device_tensor.device):
            action = self.plan(rows, None if starts is None else starts.flatten())
        return {"action": action.reshape(*observation.shape[:-1], *action.shape[1:])}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        return tensordict.set("action", self.compute_step(tensordict)["action"])

    def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
        """Return the mean returns ``[N, K]`` of action sequences ``[N, K, H, *A]`` from observations ``[N, O]``."""
        shape = (*actions.shape[:2], self.particles)
        rows = observation[:, None, None].expand(*shape, -1).flatten(0, 2)
        actions = actions.movedim(2, 0).unsqueeze(3).expand(self.horizon, *shape, *actions.shape[3:]).flatten(1, 3)
        returns = self.model.returns(rows, actions).view(shape).mean(-1)
        # If the model diverges, the sequence is bad, but sorting would treat infinity or NaN as the largest return.
        return returns.where(returns.isfinite(), -torch.inf)

    def _next_seed(self, observation: Tensor) -> int:
        """Return the seed of the next plan."""
        if interaction_type() in DETERMINISTIC:
            data = observation.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            return numbered_seed(self.generator.initial_seed(), crc32(data))
        return int(torch.randint(2**62, (), generator=self.generator))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.action_spec = self.action_spec.to(self.device_tensor.device)
        return self

    def inherit_generator(self, previous: object, seed: int | None) -> None:
        """Take the generator of a previous planner. Otherwise seed the generator, unless ``seed`` is None."""
        if isinstance(previous, ShootingPlanner):
            self.generator = previous.generator
        elif seed is not None:
            self.generator.manual_seed(seed)

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the generator's state."""
        return {"generator": self.generator.get_state()}

    def set_extra_state(self, state: Any) -> None:
        """Restore the generator's state; raise a ValueError if the state is invalid."""
        check_state(state, {"generator": generator_state(self.generator.device)}, "planner")
        self.generator.set_state(state["generator"].cpu())


class RandomShootingPlanner(ShootingPlanner):
    """Take the first action of the best of ``candidates`` random sequences from the action spec.

    Args:
        env: As in :class:`ShootingPlanner`, like the other arguments.

    Raises:
        ValueError: A number is out of range or has no effect.
        TypeError: The actions have no finite bounds.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("horizon", "particles"):
            self.require_effect(name, self.candidates > 1, "candidates above 1, among which the best is taken")
        spec = self.action_spec
        if spec.dtype.is_floating_point and not bool(torch.stack(action_bounds(spec)).isfinite().all()):
            raise TypeError(
                f"the actions of RandomShootingPlanner must have finite bounds, got {action_name(spec)}. Bound them by "
                "gymnasium.wrappers.TransformAction."
            )

    def plan(self, observation: Tensor, starts: Tensor | None) -> Tensor:
        """Return the action ``[N, *A]``."""
        shape = (len(observation), self.candidates, self.horizon)
        actions = self.action_spec.expand(*shape, *self.action_spec.shape).rand()
        best = self.returns(observation, actions).argmax(1)
        return actions[torch.arange(len(best), device=best.device), best, 0]


class CrossEntropyPlanner(ShootingPlanner):
    r"""Fit a Gaussian over action sequences to its best samples, in several iterations.

    Samples \(a^k \sim \mathcal N(\mu, \sigma^2)\) are clipped to the bounds. \(\mu, \sigma\) become the mean and the
    standard deviation of the ``elites`` sequences with the largest returns. The action is the final \(\mu_0\) (Botev et
    al., 2013). For actions in [-1, 1] the result equals the result of TorchRL's ``CEMPlanner`` in the same environment.
    ``CEMPlanner`` takes several times as long, because it builds a TensorDict for each step of each rollout.

    Args:
        candidates: Number of sequences per iteration.
        elites: Number of best sequences for the fit of the Gaussian.
        iterations: Number of iterations.
        initial_std: Initial standard deviation, in units of half the action range.
        warm_start: Start from the mean of the previous step, shifted by one step, instead of the middle of the range.
        noise: Standard deviation of the exploration noise on the action, in units of half the action range.
        env: As in :class:`ShootingPlanner`, like all arguments that are not listed here.

    Raises:
        ValueError: A number is out of range or has no effect, or ``elites`` is below two or above ``candidates``.
        TypeError: The actions are not bounded floating-point vectors.
    """

    CONFIG_NAME: ClassVar[str | None] = "cem"

    candidates: PositiveInt = 150
    elites: int = 15
    iterations: PositiveInt = 4
    initial_std: FinitePositive = 1.0
    warm_start: Boolean = False
    noise: NonNegative = 0.0
    center: Tensor = computed()
    half_range: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.elites <= self.candidates:
            raise ValueError(f"elites must be at least 2 and at most candidates={self.candidates}, got {self.elites}.")
        self.require_effect("warm_start", self.horizon > 1, "a horizon above 1")
        try:
            center, half_range = action_range(self.action_spec, allow_constants=True)
        except TypeError:
            raise TypeError(
                "the action space of CrossEntropyPlanner must be a one-dimensional floating-point Box with finite "
                f"bounds, got {action_name(self.action_spec)}. Use RandomShootingPlanner for other bounded actions."
            ) from None
        self.register_buffer("center", center, persistent=False)
        self.register_buffer("half_range", half_range, persistent=False)
        # Keep separate plans for exploration and for evaluation, so that evaluation does not change exploration.
        self._plans: dict[bool, Tensor] = {}

    def plan(self, observation: Tensor, starts: Tensor | None) -> Tensor:
        """Return the action ``[N, A]``."""
        is_exploring = interaction_type() not in DETERMINISTIC
        low, high = self.center - self.half_range, self.center + self.half_range
        mean = self._initial_mean(len(observation), starts, is_exploring)
        std = (self.half_range * self.initial_std).expand_as(mean)
        shape = (len(observation), self.candidates, *mean.shape[2:])
        for _ in range(self.iterations):
            noise = torch.randn(shape, device=mean.device, dtype=mean.dtype)
            actions = torch.addcmul(mean, std, noise).clamp_(low, high)
            best = self.returns(observation, actions).topk(self.elites, dim=1).indices
            elites = actions.gather(1, best[..., None, None].expand(-1, -1, *shape[2:]))
            mean, std = elites.mean(1, keepdim=True), elites.std(1, keepdim=True)
        if self.warm_start:
            self._plans[is_exploring] = mean
        action = mean[:, 0, 0]
        if is_exploring and self.noise:
            action = action + self.noise * self.half_range * torch.randn_like(action)
        return action.clamp(low, high)

    def _initial_mean(self, rows: int, starts: Tensor | None, is_exploring: bool) -> Tensor:
        """Return the initial means ``[N, 1, H, A]``: the middle of the range, or the shifted previous plan."""
        middle = self.center.expand(rows, 1, self.horizon, -1)
        plan = self._plans.get(is_exploring)
        plan = None if plan is None else plan.to(middle.device)
        if not self.warm_start or starts is None or plan is None or len(plan) != rows:
            return middle
        shifted = torch.cat((plan[:, :, 1:], middle[:, :, :1]), 2)
        return torch.where(starts.view(-1, 1, 1, 1), middle, shifted)
