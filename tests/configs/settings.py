"""The names of our options in TorchRL's groups, and settings that build each option."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from torchrl_lightning._hydra.schemas import TORCHRL_GROUPS, schema_data

SPEC = "{_target_: torchrl.data.Unbounded, shape: [%d]}"
OBSERVED = "{_target_: torchrl.data.Composite, observation: %s}"
PRIORITIZED = ("max_capacity=20", "alpha=1.0", "beta=0.5")
# The required settings of each option, and keys, dtypes and numbers that differ from the defaults.
SETTINGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("storage", "frame"): ("max_size=8", "frame_stack=2"),
    ("storage", "ring"): ("max_size=8",),
    ("storage", "rollout"): ("size=3", "num_envs=2"),
    ("writer", "ring"): ("num_envs=2", "done_key=[ours,key]"),
    ("writer", "rollout"): ("recurrent_keys=[[ours,key]]",),
    ("sampler", "minibatch"): ("shuffle=false", "by=environments"),
    ("sampler", "prioritized"): (*PRIORITIZED, "priority_key=[ours,key]", "dtype=float32"),
    ("sampler", "recent"): ("recent_data_ratio=0.25",),
    ("sampler", "sequence"): ("batch_length=3", "recurrent_keys=[[ours,key]]"),
    ("sampler", "uniform"): ("stratified=true",),
    ("transform", "discounted_returns"): ("gamma=0.5", "bootstrap=false"),
    ("transform", "dynamics_targets"): (f"observation_spec={OBSERVED % (SPEC % 3)}", f"action_spec={SPEC % 1}"),
    ("transform", "frame_stack"): ("frame_stack=2",),
    ("transform", "generalized_advantages"): ("gamma=0.9", "lmbda=0.8", "advantage_key=[ours,key]"),
    ("transform", "hindsight_relabel"): ("her_proportion=0.5",),
    ("transform", "intrinsic_returns"): ("gamma=0.5", "normalize=false", "reward_key=[ours,key]"),
    ("transform", "vtrace_advantages"): ("gamma=0.5", "current_log_prob_key=[ours,key]"),
    ("value", "discounted_returns"): ("gamma=0.5",),
    ("value", "generalized_advantages"): ("value_key=[ours,key]",),
    ("value", "intrinsic_returns"): ("lmbda=0.5",),
    ("value", "vtrace_advantages"): ("gamma=0.5",),
    ("replay_buffer", "episodic"): ("data_spec=null", "num_environments=2"),
    ("replay_buffer", "experience"): ("num_envs=2", "priority_key=[ours,key]"),
    ("replay_buffer", "gae"): ("size=3", "gamma=0.5", "value_key=[ours,key]"),
    ("replay_buffer", "model_based"): ("size=4", "num_envs=2"),
    ("replay_buffer", "ppo"): ("obs_dim=2", "act_dim=1", "size=4", "batch_size=3", "gamma=0.5", "lam=1.0"),
    ("replay_buffer", "ppod"): ("size=3", "gamma=0.5"),
    ("replay_buffer", "recurrent"): ("capacity=6", "state_dim=2", "action_dim=1", "hidden_dim=3"),
    ("replay_buffer", "rollout"): ("size=3", "gamma=0.5", "batch_keys=[[ours,key]]"),
    ("replay_buffer", "simple"): ("obs_dim=2", "act_dim=1", "size=6", "batch_size=2"),
    ("replay_buffer", "vanilla"): ("size=3", "gamma=0.5"),
    ("replay_buffer", "vtrace"): ("size=3", "gamma=0.5"),
}
NAMES = [(group, part["name"]) for part in schema_data().values() for group in TORCHRL_GROUPS.get(part["group"], ())]
GROUPS = {group: {name for each, name in NAMES if each == group} for group, _ in NAMES}


def node_of(group: str, name: str) -> Any:
    return ConfigStore.instance().load(f"{group}/torchrl_lightning_{name}.yaml")
