"""Names of all entries of a run; observations of an environment must not have these names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

NEXT = "next"
OBSERVATION = "observation"
# TorchRL's name for the mask of allowed actions, which an environment may return. No network reads it.
ACTION_MASK = "action_mask"

# Entries of a step.
ACTION, LOG_PROB, IS_INIT, RECURRENT_STATE = "action", "action_log_prob", "is_init", "recurrent_state"
FLAGS = ("done", "terminated", "truncated")
REWARD = (NEXT, "reward")
DONE, TERMINATED, TRUNCATED = ((NEXT, flag) for flag in FLAGS)
COLLECTOR = "collector"
ENV_IDS, TRAJ_IDS, VALID, POLICY_VERSION = (
    (COLLECTOR, name) for name in ("env_ids", "traj_ids", "mask", "policy_version")
)
DEMO = "demo"
# Entries of replayed steps, such as demonstrations: neither the policy nor the environment produced these steps.
REPLAYED, DEMO_ACTION, DEMO_SERIAL = ((DEMO, name) for name in ("mask", "action", "serial"))

# TorchRL's transforms write these entries next to the observations; networks must not read them as observations.
BOOKKEEPING = (IS_INIT, "step_count", RECURRENT_STATE)
# Entries that repeat the previous step, or serve only bookkeeping.
REPEATED = (COLLECTOR, *FLAGS)

# Entries that estimators add to a rollout.
VALUE, TARGET, ADVANTAGE = "state_value", "value_target", "advantage"
INTRINSIC_REWARD, NORMALIZED_REWARD = (NEXT, "intrinsic_reward"), (NEXT, "normalized_intrinsic_reward")
INTRINSIC_VALUE, INTRINSIC_TARGET = "intrinsic_state_value", "intrinsic_value_target"
INTRINSIC_ADVANTAGE, CURRENT_LOG_PROB = "intrinsic_advantage", "current_action_log_prob"
FINISHED = "finished"

# Entries that are added to a batch.
INDEX, MASK, WEIGHT, TD_ERROR, SOURCE = "index", "mask", "priority_weight", "td_error", "source"
STAMPS = ("write_position", "write_generation", "importance_weights")
FOLDED = ("steps_to_next_obs", "gamma")
RETURN, STEP_TYPE = "discounted_return", "step_type"
INPUTS, TARGETS = "inputs", "targets"

# Entries that networks and models write for each other in a TensorDict.
FEATURES, ACTION_VALUE, MEMBER, MEMORY_FEATURES = "features", "action_value", "member", "remembered"
# TorchRL's entries in the same TensorDicts.
TORCHRL = ("_reset", "episode_reward", "sample_log_prob", "chosen_action_value", "logits", "loc", "scale")

RESERVED = frozenset(
    {
        *(NEXT, ACTION, LOG_PROB, REWARD[-1], *BOOKKEEPING, *REPEATED, DEMO),
        *(VALUE, TARGET, ADVANTAGE, INTRINSIC_REWARD[-1], NORMALIZED_REWARD[-1]),
        *(INTRINSIC_VALUE, INTRINSIC_TARGET, INTRINSIC_ADVANTAGE, CURRENT_LOG_PROB, FINISHED),
        *(INDEX, MASK, WEIGHT, TD_ERROR, SOURCE, *STAMPS, *FOLDED, RETURN, STEP_TYPE, INPUTS, TARGETS),
        *(FEATURES, ACTION_VALUE, MEMBER, MEMORY_FEATURES, *TORCHRL),
    }
)
"""Names at the root of a TensorDict, or under ``"next"``, that a run reserves for its own entries."""


UNNAMEABLE = frozenset({"shape", "device", "dtype", "space", ""})
"""Names that no entry of a TorchRL ``Composite`` can have, at its root or below."""


def check_spec_names(paths: Iterable[tuple[Any, ...]]) -> None:
    """Validate the names of an observation's entries; raise ValueError if TorchRL's specs do not support a name.

    Args:
        paths: The path of each entry from the root.

    Examples:
        >>> check_spec_names([("arm", "shape")])
        Traceback (most recent call last):
        ValueError: the names of observations must be strings, not empty, and none of device, dtype, shape, space, got \
'arm.shape'. Rename them by rename={arm.shape: last_shape} of an EnvironmentRecipe (in a command, env=recipe \
data.env.rename=...), or leave them out by its drop=.
    """
    invalid = {path: name for path in paths for name in [path[-1]] if not _is_nameable(name)}
    if not invalid:
        return
    keys = [dotted_name(path) for path in invalid]
    new_names = [
        f"last_{name}" if name in UNNAMEABLE and name else f"entry_{position}"
        for position, name in enumerate(invalid.values())
    ]
    renames = ", ".join(f"{old or repr(old)}: {new}" for old, new in zip(keys, new_names, strict=True))
    raise ValueError(
        "the names of observations must be strings, not empty, and none of "
        f"{', '.join(sorted(UNNAMEABLE - {''}))}, got {', '.join(map(repr, keys))}. Rename them by "
        f"rename={{{renames}}} of an EnvironmentRecipe (in a command, env=recipe data.env.rename=...), or leave them "
        "out by its drop=."
    )


def dotted_name(path: tuple[Any, ...]) -> str:
    """Return the path of an entry in the notation of settings, such as ``arm.position``."""
    return ".".join(map(str, path))


def _is_nameable(name: Any) -> bool:
    parts = name if isinstance(name, tuple) and name else (name,)
    return all(isinstance(part, str) and part not in UNNAMEABLE for part in parts)


def check_not_reserved(names: Iterable[str], suggestions: Mapping[str, str] = MappingProxyType({})) -> None:
    """Validate the names of an observation's entries; raise ValueError if a name is reserved.

    Args:
        names: The names of the observation's entries.
        suggestions: New names to suggest for some entries.

    Examples:
        >>> check_not_reserved(["observation", "gamma"])
        Traceback (most recent call last):
        ValueError: the names of observations must not be names of other entries of a run, which would overwrite them, \
got 'gamma'. Rename them by rename={gamma: last_gamma} of an EnvironmentRecipe (in a command, env=recipe \
data.env.rename=...), or leave them out by its drop=.
    """
    if reserved := sorted(RESERVED.intersection(names)):
        renames = ", ".join(f"{name}: {suggestions.get(name, 'last_' + name.removeprefix('_'))}" for name in reserved)
        raise ValueError(
            "the names of observations must not be names of other entries of a run, which would overwrite them, got "
            f"{', '.join(map(repr, reserved))}. Rename them by rename={{{renames}}} of an EnvironmentRecipe (in a "
            "command, env=recipe data.env.rename=...), or leave them out by its drop=."
        )
