"""Configs of the transforms that write advantages and value targets, for TorchRL's groups `transform` and `value`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl.trainers.algorithms.configs.transforms import TransformConfig

_TARGETS = "torchrl_lightning.configs.targets"


@dataclass
class AdvantageTransformConfig(TransformConfig):
    """What the configs of all advantage transforms share; every key may be a string or a list of strings."""

    _convert_: str = "all"
    _partial_: bool = False
    gamma: float = 0.99
    critic: Any = None
    time_dim: int | None = None
    reward_key: Any = field(default_factory=lambda: ["next", "reward"])
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    recompute_values: bool = False
    standardize_advantages: bool = False
    on_write: bool = False


@dataclass
class DiscountedReturnsConfig(AdvantageTransformConfig):
    """Config of :class:`torchrl_lightning.DiscountedReturns`."""

    _target_: str = f"{_TARGETS}.DiscountedReturns"
    bootstrap: bool = True


@dataclass
class GeneralizedAdvantagesConfig(AdvantageTransformConfig):
    """Config of :class:`torchrl_lightning.GeneralizedAdvantages`."""

    _target_: str = f"{_TARGETS}.GeneralizedAdvantages"
    lmbda: float = 0.95


@dataclass
class VTraceAdvantagesConfig(AdvantageTransformConfig):
    """Config of :class:`torchrl_lightning.VTraceAdvantages`."""

    _target_: str = f"{_TARGETS}.VTraceAdvantages"
    lmbda: float = 1.0
    actor: Any = None
    rho_clip: float = 1.0
    c_clip: float = 1.0
    pg_rho_clip: float | None = None
    log_prob_key: Any = "action_log_prob"
    current_log_prob_key: Any = "current_action_log_prob"
    action_key: Any = "action"


@dataclass
class IntrinsicReturnsConfig(AdvantageTransformConfig):
    """Config of :class:`torchrl_lightning.IntrinsicReturns`."""

    _target_: str = f"{_TARGETS}.IntrinsicReturns"
    lmbda: float = 0.95
    normalize: bool = True
    direction: str = "forward"
    log_prob_keys: Any = None
    reward_key: Any = field(default_factory=lambda: ["next", "intrinsic_reward"])
    value_key: Any = "intrinsic_state_value"
    advantage_key: Any = "intrinsic_advantage"
    value_target_key: Any = "intrinsic_value_target"
