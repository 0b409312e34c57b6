"""Schemas of the LightningModules and networks. Generated from the constructors by ``tests/conf/schema_source.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class A2CSchema:
    """Arguments of :class:`torchrl_lightning.A2CModule`."""

    _target_: str = "torchrl_lightning.A2CModule"
    _convert_: str = "all"
    network: Any = None
    entropy_coeff: float = 0.0
    entropy_schedule: Any = "constant"
    critic_coeff: float = 0.5
    loss_critic_type: str = "l2"
    clip_value: float | None = None
    normalize_advantage: bool | None = False
    extrinsic_coeff: float = 1.0
    intrinsic_coeff: float = 1.0
    distribution: str = "auto"
    initial_std: float = 1.0
    critics: list[str] | None = None
    separate_critics: bool = False
    intrinsic: Any = None
    critic_optimizer: Any = None
    max_grad_norm: float | None = 0.5
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    schedule: Any = "constant"


@dataclass
class DQNSchema:
    """Arguments of :class:`torchrl_lightning.DQNModule`."""

    _target_: str = "torchrl_lightning.DQNModule"
    _convert_: str = "all"
    network: Any = None
    double: bool = True
    dueling: bool = False
    loss_function: str = "smooth_l1"
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_frames: int = 10000
    learning_rate: float = 0.001
    max_grad_norm: float | None = 10.0
    gamma: float = 0.99
    critic_optimizer: Any = None
    tau: float = 0.005
    target_interval: int = 1
    refresh_states: bool = False
    compile: bool = False
    optimizer: Any = None
    schedule: Any = "constant"


@dataclass
class LossModuleAgentSchema:
    """Arguments of :class:`torchrl_lightning.LossModuleAgent`."""

    _target_: str = "torchrl_lightning.LossModuleAgent"
    _convert_: str = "all"
    loss: Any = MISSING
    policy: Any = None
    target_updater: Any = None
    learning_rate: float = 0.0003
    optimizer: Any = None
    max_grad_norm: float | None = None
    schedule: Any = "constant"


@dataclass
class MBPOSchema:
    """Arguments of :class:`torchrl_lightning.MBPOModule`."""

    _target_: str = "torchrl_lightning.MBPOModule"
    _convert_: str = "all"
    network: Any = None
    dynamics: Any = None
    num_critics: int = 2
    alpha: float = 1.0
    learn_alpha: bool = True
    target_entropy: float | None = None
    alpha_optimizer: Any = None
    loss_function: str = "l2"
    gamma: float = 0.99
    critic_optimizer: Any = None
    tau: float = 0.005
    target_interval: int = 1
    refresh_states: bool = False
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    max_grad_norm: float | None = None
    schedule: Any = "constant"


@dataclass
class DynamicsEnsembleSchema:
    """Arguments of :class:`torchrl_lightning.DynamicsEnsemble`."""

    _target_: str = "torchrl_lightning.DynamicsEnsemble"
    _convert_: str = "all"
    hidden_sizes: list[int] = field(default_factory=lambda: [200, 200, 200])
    num_elites: int | None = None
    planner: Any = None
    activation: str = "silu"
    probabilistic: bool = True
    propagation: str = "step"
    sample: bool = False
    terminated: Any = None
    learning_rate: float = 0.001
    weight_decay: float = 2.5e-05
    patience: int = 5
    min_improvement: float = 0.01
    compile: bool = False
    optimizer: Any = None
    max_grad_norm: float | None = None
    schedule: Any = "constant"


@dataclass
class PPOSchema:
    """Arguments of :class:`torchrl_lightning.PPOModule`."""

    _target_: str = "torchrl_lightning.PPOModule"
    _convert_: str = "all"
    network: Any = None
    clip_epsilon: float = 0.2
    clip_schedule: Any = "constant"
    normalize_advantage: bool | None = None
    target_kl: float | None = None
    entropy_coeff: float = 0.0
    entropy_schedule: Any = "constant"
    critic_coeff: float = 0.5
    loss_critic_type: str = "l2"
    clip_value: float | None = None
    extrinsic_coeff: float = 1.0
    intrinsic_coeff: float = 1.0
    distribution: str = "auto"
    initial_std: float = 1.0
    critics: list[str] | None = None
    separate_critics: bool = False
    intrinsic: Any = None
    critic_optimizer: Any = None
    max_grad_norm: float | None = 0.5
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    schedule: Any = "constant"


@dataclass
class ReinforceSchema:
    """Arguments of :class:`torchrl_lightning.ReinforceModule`."""

    _target_: str = "torchrl_lightning.ReinforceModule"
    _convert_: str = "all"
    network: Any = None
    critic_coeff: float = 1.0
    loss_critic_type: str = "l2"
    clip_value: float | None = None
    normalize_advantage: bool | None = False
    extrinsic_coeff: float = 1.0
    intrinsic_coeff: float = 1.0
    distribution: str = "auto"
    initial_std: float = 1.0
    critics: list[str] | None = None
    separate_critics: bool = False
    intrinsic: Any = None
    critic_optimizer: Any = None
    max_grad_norm: float | None = 0.5
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    schedule: Any = "constant"


@dataclass
class SACSchema:
    """Arguments of :class:`torchrl_lightning.SACModule`."""

    _target_: str = "torchrl_lightning.SACModule"
    _convert_: str = "all"
    network: Any = None
    num_critics: int = 2
    alpha: float = 1.0
    learn_alpha: bool = True
    target_entropy: float | None = None
    alpha_optimizer: Any = None
    loss_function: str = "l2"
    gamma: float = 0.99
    critic_optimizer: Any = None
    tau: float = 0.005
    target_interval: int = 1
    refresh_states: bool = False
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    max_grad_norm: float | None = None
    schedule: Any = "constant"


@dataclass
class TD3Schema:
    """Arguments of :class:`torchrl_lightning.TD3Module`."""

    _target_: str = "torchrl_lightning.TD3Module"
    _convert_: str = "all"
    network: Any = None
    num_critics: int = 2
    noise: float = 0.1
    noise_end: float | None = None
    noise_frames: int = 1
    policy_noise: float = 0.2
    noise_clip: float = 0.5
    loss_function: str = "l2"
    target_interval: int = 2
    gamma: float = 0.99
    critic_optimizer: Any = None
    tau: float = 0.005
    refresh_states: bool = False
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    max_grad_norm: float | None = None
    schedule: Any = "constant"


@dataclass
class VTraceSchema:
    """Arguments of :class:`torchrl_lightning.VTraceModule`."""

    _target_: str = "torchrl_lightning.VTraceModule"
    _convert_: str = "all"
    network: Any = None
    entropy_coeff: float = 0.0
    entropy_schedule: Any = "constant"
    critic_coeff: float = 0.5
    loss_critic_type: str = "l2"
    clip_value: float | None = None
    normalize_advantage: bool | None = False
    extrinsic_coeff: float = 1.0
    intrinsic_coeff: float = 1.0
    distribution: str = "auto"
    initial_std: float = 1.0
    critics: list[str] | None = None
    separate_critics: bool = False
    intrinsic: Any = None
    critic_optimizer: Any = None
    max_grad_norm: float | None = 0.5
    compile: bool = False
    learning_rate: float = 0.0003
    optimizer: Any = None
    schedule: Any = "constant"


@dataclass
class MLPNetworkSchema:
    """Arguments of :class:`torchrl_lightning.MLPNetwork`."""

    _target_: str = "torchrl_lightning.MLPNetwork"
    _convert_: str = "all"
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    activation: str = "tanh"
    shared: bool = False
    head_sizes: list[int] = field(default_factory=list)
    initialization: str = "orthogonal"


@dataclass
class CNNNetworkSchema:
    """Arguments of :class:`torchrl_lightning.CNNNetwork`."""

    _target_: str = "torchrl_lightning.CNNNetwork"
    _convert_: str = "all"
    channels: list[int] = field(default_factory=lambda: [32, 64, 64])
    kernels: list[int] = field(default_factory=lambda: [8, 4, 3])
    strides: list[int] = field(default_factory=lambda: [4, 2, 1])
    hidden_sizes: list[int] = field(default_factory=lambda: [512])
    activation: str = "relu"
    shared: bool = True
    head_sizes: list[int] = field(default_factory=list)


@dataclass
class RecurrentNetworkSchema:
    """Arguments of :class:`torchrl_lightning.RecurrentNetwork`."""

    _target_: str = "torchrl_lightning.RecurrentNetwork"
    _convert_: str = "all"
    cell: str = "gru"
    hidden_size: int = 64
    num_layers: int = 1
    encoder_network: Any = None
    head_sizes: list[int] = field(default_factory=lambda: [64])
    activation: str = "tanh"


@dataclass
class RandomNetworkDistillationSchema:
    """Arguments of :class:`torchrl_lightning.RandomNetworkDistillation`."""

    _target_: str = "torchrl_lightning.RandomNetworkDistillation"
    _convert_: str = "all"
    network: Any = None
    embedding_size: int = 64
    clip: float = 5.0
    update_fraction: float = 1.0


@dataclass
class WorldModelFitSchema:
    """Arguments of :class:`torchrl_lightning.WorldModelFit`."""

    _target_: str = "torchrl_lightning.WorldModelFit"
    _convert_: str = "all"
    hidden_sizes: list[int] = field(default_factory=lambda: [200, 200, 200, 200])
    num_members: int = 7
    num_elites: int = 5
    sample: bool = True
    batch_size: int = 256
    max_epochs: int = 100
    activation: str = "silu"
    probabilistic: bool = True
    propagation: str = "step"
    terminated: Any = None
    learning_rate: float = 0.001
    weight_decay: float = 2.5e-05
    patience: int = 5
    min_improvement: float = 0.01


@dataclass
class CrossEntropyPlannerSchema:
    """Arguments of :class:`torchrl_lightning.CrossEntropyPlanner` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.CrossEntropyPlanner"
    _convert_: str = "all"
    _partial_: bool = True
    candidates: int = 150
    elites: int = 15
    iterations: int = 4
    initial_std: float = 1.0
    warm_start: bool = False
    noise: float = 0.0
    horizon: int = 15
    particles: int = 1


@dataclass
class RandomShootingPlannerSchema:
    """Arguments of :class:`torchrl_lightning.RandomShootingPlanner` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.RandomShootingPlanner"
    _convert_: str = "all"
    _partial_: bool = True
    horizon: int = 15
    candidates: int = 500
    particles: int = 1


SCHEMAS: dict[tuple[str, str], Any] = {
    ("model", "a2c"): A2CSchema,
    ("model", "dqn"): DQNSchema,
    ("model", "loss_module"): LossModuleAgentSchema,
    ("model", "mbpo"): MBPOSchema,
    ("model", "pets"): DynamicsEnsembleSchema,
    ("model", "ppo"): PPOSchema,
    ("model", "reinforce"): ReinforceSchema,
    ("model", "sac"): SACSchema,
    ("model", "td3"): TD3Schema,
    ("model", "vtrace"): VTraceSchema,
    ("network", "mlp"): MLPNetworkSchema,
    ("network", "cnn"): CNNNetworkSchema,
    ("network", "recurrent"): RecurrentNetworkSchema,
    ("intrinsic", "rnd"): RandomNetworkDistillationSchema,
    ("dynamics", "world_model"): WorldModelFitSchema,
    ("planner", "cem"): CrossEntropyPlannerSchema,
    ("planner", "random_shooting"): RandomShootingPlannerSchema,
}
