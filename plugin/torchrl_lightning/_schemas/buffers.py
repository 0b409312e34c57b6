"""Schemas of the buffers and their parts. Generated from the constructors by ``tests/conf/schema_source.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class VanillaOnPolicyBufferSchema:
    """Arguments of :class:`torchrl_lightning.VanillaOnPolicyBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.VanillaOnPolicyBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    device: str = "cpu"
    gamma: float | None = None
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class GAEBufferSchema:
    """Arguments of :class:`torchrl_lightning.GAEBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.GAEBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    device: str = "cpu"
    gae_lambda: float = 0.95
    gamma: float | None = None
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class VTraceBufferSchema:
    """Arguments of :class:`torchrl_lightning.VTraceBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.VTraceBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    device: str = "cpu"
    lmbda: float = 1.0
    clip_rho_thres: float = 1.0
    clip_c_thres: float = 1.0
    clip_pg_rho_thres: float | None = None
    log_prob_key: Any = "action_log_prob"
    action_key: Any = "action"
    gamma: float | None = None
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class PPODBufferSchema:
    """Arguments of :class:`torchrl_lightning.PPODBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.PPODBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    device: str = "cpu"
    rho: float = 0.1
    phi: float = 0.3
    gae_lambda: float = 0.95
    alpha: float = 10
    total_buffer_demo_capacity: int = 51
    initial_human_demos_dir: str | None = None
    initial_agent_demos_dir: str | None = None
    supplementary_demos_dir: str | None = None
    target_agent_demos_dir: str | None = None
    num_agent_demos_to_save: int = 10
    initial_reward_threshold: float | None = None
    save_demos_every: int = 10
    demo_dtypes: Any = None
    annealing: str = "linear"
    cut_after_reward: bool = True
    ends: str = "recorded"
    log_prob: str = "deterministic"
    save_value_demos: bool = False
    shared_demos: bool = False
    frame_skip: int | None = None
    gamma: float | None = None
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class PPOBufferSchema:
    """Arguments of :class:`torchrl_lightning.PPOBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.PPOBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    batch_size: int = MISSING
    gamma: float | None = None
    lam: float = 0.95
    eps: float = 0.001
    device: str = "cpu"
    gamma_intrinsic: float | None = None
    normalize_intrinsic: bool = True
    intrinsic_direction: str = "forward"
    standardize_advantages: bool = True
    recompute_values: bool = False
    bootstrap: bool = True
    value_key: Any = "state_value"
    advantage_key: Any = "advantage"
    value_target_key: Any = "value_target"
    frame_stack: int | None = None
    recurrent: bool | None = None
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])
    batch_keys: Any = None
    transform: Any = None


@dataclass
class ExperienceBufferSchema:
    """Arguments of :class:`torchrl_lightning.ExperienceBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.ExperienceBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    storage: Any = None
    writer: Any = None
    sampler: Any = None
    n_steps: int = 1
    gamma: float | None = None
    priority_key: Any = "td_error"
    sample_unit: Any = None
    pin_memory: bool = False
    prefetch: int | None = None
    transform: Any = None


@dataclass
class RecurrentReplayBufferSchema:
    """Arguments of :class:`torchrl_lightning.RecurrentReplayBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.RecurrentReplayBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    capacity: int = MISSING
    state_dim: int | None = MISSING
    action_dim: int | None = MISSING
    hidden_dim: int | None = MISSING
    device: str | None = None
    scratch_dir: str | None = None
    sampler: Any = None
    writer: Any = None
    priority_key: Any = "td_error"
    transform: Any = None
    pin_memory: bool = False
    prefetch: int | None = None


@dataclass
class SimpleReplayBufferSchema:
    """Arguments of :class:`torchrl_lightning.SimpleReplayBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.SimpleReplayBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    obs_dim: int | None = MISSING
    act_dim: int | None = MISSING
    size: int = MISSING
    batch_size: int = MISSING
    device: str = "cpu"
    scratch_dir: str | None = None
    sampler: Any = None
    writer: Any = None
    priority_key: Any = "td_error"
    transform: Any = None
    pin_memory: bool = False
    prefetch: int | None = None


@dataclass
class MBReplayBufferSchema:
    """Arguments of :class:`torchrl_lightning.MBReplayBuffer` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.MBReplayBuffer"
    _convert_: str = "all"
    _partial_: bool = True
    size: int = MISSING
    device: str = "cpu"
    reward_function: Any = None
    action_spec: Any = None
    autoreset: bool = False
    transform: Any = None


@dataclass
class RingStorageSchema:
    """Arguments of :class:`torchrl_lightning.RingStorage`."""

    _target_: str = "torchrl_lightning.RingStorage"
    _convert_: str = "all"
    max_size: int = MISSING
    device: str = "cpu"
    scratch_dir: str | None = None


@dataclass
class FrameStorageSchema:
    """Arguments of :class:`torchrl_lightning.FrameStorage`."""

    _target_: str = "torchrl_lightning.FrameStorage"
    _convert_: str = "all"
    max_size: int = MISSING
    frame_stack: int = MISSING
    keys: Any = field(default_factory=lambda: ["observation"])


@dataclass
class UniformSamplerSchema:
    """Arguments of :class:`torchrl_lightning.UniformSampler`."""

    _target_: str = "torchrl_lightning.UniformSampler"
    _convert_: str = "all"
    with_replacement: bool = True
    stratified: bool = False


@dataclass
class PrioritizedSamplerSchema:
    """Arguments of :class:`torchrl_lightning.PrioritizedSampler`."""

    _target_: str = "torchrl_lightning.PrioritizedSampler"
    _convert_: str = "all"
    max_capacity: int = MISSING
    alpha: float = MISSING
    beta: float = MISSING
    eps: float = 1e-08
    dtype: str = "float64"
    reduction: str = "max"
    max_priority_within_buffer: bool = False
    device: str | None = None
    priority_key: Any = "td_error"
    stratified: bool = True
    weight_norm: str | None = "batch"
    initial_priority: float = 1.0
    batch_length: int | None = None
    num_earliest_frames_ignored: int = 0


@dataclass
class SequenceSamplerSchema:
    """Arguments of :class:`torchrl_lightning.SequenceSampler`."""

    _target_: str = "torchrl_lightning.SequenceSampler"
    _convert_: str = "all"
    batch_length: int = MISSING
    episode_ends: str = "inside"
    burn_in: int = 0
    recurrent_keys: Any = field(default_factory=lambda: ["recurrent_state"])


@dataclass
class RecentSamplerSchema:
    """Arguments of :class:`torchrl_lightning.RecentSampler`."""

    _target_: str = "torchrl_lightning.RecentSampler"
    _convert_: str = "all"
    batch_length: int = 1
    recent_data_steps: int = 1
    recent_data_ratio: float = 0.0
    with_replacement: bool = False
    num_earliest_frames_ignored: int = 0
    prioritized: Any = None


@dataclass
class HindsightRelabelSchema:
    """Arguments of :class:`torchrl_lightning.HindsightRelabel`."""

    _target_: str = "torchrl_lightning.HindsightRelabel"
    _convert_: str = "all"
    her_proportion: float = 0.8
    achieved_goal_key: Any = "achieved_goal"
    desired_goal_key: Any = "desired_goal"
    reward_key: Any = field(default_factory=lambda: ["next", "reward"])
    goal: Any = None
    compute_reward: Any = None
    compute_terminated: Any = None


@dataclass
class BranchedReplaySchema:
    """Arguments of :class:`torchrl_lightning.BranchedReplay` that a DataModule does not fill in itself."""

    _target_: str = "torchrl_lightning.BranchedReplay"
    _convert_: str = "all"
    _partial_: bool = True
    real_ratio: float = 0.05
    frames_per_fit: int = 250
    branches_per_fit: int = 10000
    fits_kept: int = 4
    first_length: int = 1
    last_length: int = 1
    lengthened_between: list[int] = field(default_factory=lambda: [0, 0])
    validation_fraction: float = 0.2
    max_validation: int = 5000


SCHEMAS: dict[tuple[str, str], Any] = {
    ("buffer", "vanilla"): VanillaOnPolicyBufferSchema,
    ("buffer", "gae"): GAEBufferSchema,
    ("buffer", "vtrace"): VTraceBufferSchema,
    ("buffer", "ppod"): PPODBufferSchema,
    ("buffer", "ppo"): PPOBufferSchema,
    ("buffer", "experience"): ExperienceBufferSchema,
    ("buffer", "recurrent"): RecurrentReplayBufferSchema,
    ("buffer", "simple"): SimpleReplayBufferSchema,
    ("buffer", "model_based"): MBReplayBufferSchema,
    ("storage", "ring"): RingStorageSchema,
    ("storage", "frame"): FrameStorageSchema,
    ("sampler", "uniform"): UniformSamplerSchema,
    ("sampler", "prioritized"): PrioritizedSamplerSchema,
    ("sampler", "sequence"): SequenceSamplerSchema,
    ("sampler", "recent"): RecentSamplerSchema,
    ("transform", "hindsight"): HindsightRelabelSchema,
    ("source", "branched"): BranchedReplaySchema,
}
