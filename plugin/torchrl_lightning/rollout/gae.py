"""The on-policy buffer with generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.estimators import gae
from torchrl_lightning.parts import passed_on
from torchrl_lightning.ranges import Check, fraction
from torchrl_lightning.rollout.advantages import AdvantageTransform, GeneralizedAdvantages
from torchrl_lightning.rollout.values import RECURRENT_KEYS
from torchrl_lightning.rollout.vanilla import VanillaOnPolicyBuffer


class GAEBuffer(VanillaOnPolicyBuffer):
    """On-policy buffer with GAE (Schulman et al. 2016, arXiv:1506.02438).

    ``δ[t] = r[t] + γ (1 - term[t]) V'[t] - V[t]``; ``A[t] = δ[t] + γ λ (1 - done[t]) A[t+1]``; the target is ``A + V``.

    Args:
        size: as in :class:`VanillaOnPolicyBuffer`, here and in the next four.
        gae_lambda: λ.
        gamma: as in :class:`VanillaOnPolicyBuffer`, here and below.

    Example:
        >>> buffer = GAEBuffer(128, gae_lambda=0.9)
        >>> buffer.used_capacity, buffer.gae_lambda
        (0, 0.9)
    """

    parameters: ClassVar[Mapping[str, Check]] = {**VanillaOnPolicyBuffer.parameters, "gae_lambda": fraction}

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        envs: Any = None,
        gae_lambda: float = 0.95,
        *,
        gamma: float | None = None,
        critic: TensorDictModuleBase | None = None,
        intrinsic_critic: TensorDictModuleBase | None = None,
        gamma_intrinsic: float | None = None,
        normalize_intrinsic: bool = True,
        intrinsic_direction: Literal["forward", "backward"] = "forward",
        standardize_advantages: bool = True,
        recompute_values: bool = False,
        bootstrap: bool = True,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        frame_stack: int | None = None,
        num_envs: int | None = None,
        time_dim: int | None = None,
        recurrent: bool | None = None,
        recurrent_keys: tuple[NestedKey, ...] = RECURRENT_KEYS,
        batch_keys: Collection[NestedKey] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        transform: Any = None,
    ) -> None:
        super().__init__(**passed_on(VanillaOnPolicyBuffer, locals()))
        self.gae_lambda = fraction(gae_lambda, "gae_lambda")

    @classmethod
    def create_factory(cls, size: int, gae_lambda: float = 0.95, **options: Any) -> Callable[..., Self]:
        """Return ``f(device, actor, algorithm, envs)`` that builds a buffer of this class, of these options."""
        return super().create_factory(size, gae_lambda=gae_lambda, **options)

    @property
    def used_capacity(self) -> int:
        """Number of filled steps; 0 if the buffer is empty."""
        return self.step

    def estimator(self) -> AdvantageTransform:
        """Return GAE of the extrinsic stream."""
        return GeneralizedAdvantages(self.gamma, self.gae_lambda, **self._estimator_options())

    def _returns(self, rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
        return gae(rewards, values[:-1], values[1:], terminated, done, gamma, self.gae_lambda)[1]
