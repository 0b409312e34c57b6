"""Build TorchRL environments for training, batch unbatched ones, and reject environments with unusable data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import (
    EnvBase,
    FrameSkipTransform,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
    VecGymEnvTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_lightning._core.torchrl_compat import serial_envs
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.validators import integer
from torchrl_lightning.environments.actions import ActionFormat, first_action, network_spec
from torchrl_lightning.environments.backends.vector_env import (
    NoGymnasiumEnvironmentError,
    make_vector_env,
    vectorization_of,
)
from torchrl_lightning.environments.copies import FreshActions
from torchrl_lightning.environments.env_errors import position
from torchrl_lightning.environments.policy_calls import expand_mask, is_float64, recurrent_primers
from torchrl_lightning.environments.specs import flatten_transform, unwrap_transforms
from torchrl_lightning.environments.workers.threads import close_environment, record_num_threads
from torchrl_lightning.environments.wrappers.rename import RENAME_REMEDY

# Transforms that spoil the data, with the reason and the remedy.
_UNSUPPORTED_TRANSFORMS: dict[type[Transform], str] = {
    VecNorm: "keeps its own statistics in each environment. Set normalize_observation=True in the DataModule",
    VecNormV2: "keeps its own statistics in each environment. Set normalize_observation=True in the DataModule",
    FrameSkipTransform: "continues after the end of an episode. Give frame_skip= to GymEnv",
    VecGymEnvTransform: (
        "(Gymnasium's vector environment) adds a bogus transition after each episode. Remove num_envs from GymEnv, "
        "and set num_envs with a factory of one environment"
    ),
}


def make_environment(
    env: str | Callable[..., Any] | VectorEnv[Any, Any, Any] | EnvBase,
    num_envs: int | None = 1,
    *,
    vectorization: str | None = None,
    own_number: bool = False,
) -> VectorEnv[Any, Any, Any] | EnvBase:
    """Build a vector or batched environment from an id, a factory of Gymnasium or TorchRL, or a ready environment.

    Args:
        env: the argument ``env`` of :func:`make_vector_env`, a ready TorchRL environment, or a factory of a TorchRL
            environment. Unbatched environments of a factory are stepped one after another in a ``SerialEnv``, or each
            in its own process in a ``ParallelEnv``. A batched environment is used unchanged.
        num_envs: number of environments; None means one, or the number of a batched or ready environment.
        vectorization: as in :func:`make_vector_env`.
        own_number: accept a batched environment with a number of environments other than ``num_envs``.

    Raises:
        ValueError: the number of environments, keys or shapes do not fit, or a transform spoils the data.
        TypeError: ``env`` is not an id, an environment or a factory of an environment.

    Examples:
        >>> from torchrl.envs import GymEnv
        >>> env = make_environment(lambda: GymEnv("Pendulum-v1"), 3)
        >>> env.batch_size
        torch.Size([3])
        >>> close_environment(env)
    """
    if isinstance(env, EnvBase):
        return _check_env(env, num_envs, own_number)
    try:
        return make_vector_env(env, num_envs, vectorization=vectorization)
    except NoGymnasiumEnvironmentError as error:
        if not isinstance(error.env, EnvBase) or not callable(env):
            raise
        sample_env = error.env
    number = 1 if num_envs is None else integer(num_envs, "num_envs")
    try:
        _check_env(sample_env, num_envs if sample_env.batch_size else None, own_number)
    except BaseException:
        close_environment(sample_env)
        raise
    if sample_env.batch_size:
        return sample_env
    close_environment(sample_env)
    if (vectorization or vectorization_of(env)) == "async":
        # Without num_threads, the environment would reduce the number of threads of this process.
        return ParallelEnv(number, env, mp_start_method="spawn", num_threads=torch.get_num_threads())
    return SerialEnv(number, env)


def with_bookkeeping(env: EnvBase, policy: object, clip_actions: bool = False) -> EnvBase:
    """Wrap an environment in the missing transforms for episode starts, recurrent states and action conversion.

    The environment itself is not changed. With ``clip_actions``, the environment receives actions that are clipped to
    their bounds.
    """
    existing = set(env.observation_spec.keys(True, True)) | set(env.full_state_spec.keys(True, True))
    added: list[Transform] = [] if "is_init" in existing else [InitTracker()]
    added += [
        primer for primer in recurrent_primers(policy) if not existing.issuperset(primer.primers.keys(True, True))
    ]
    form = replace(ActionFormat.from_spec(env.action_spec_unbatched), clip=clip_actions)
    if not form.is_network_format or is_float64(policy):  # apply_policy sets actions of other formats to their bounds
        added.append(ActionConversion(form))
    for transform in added:
        env = TransformedEnv(env, transform, auto_unwrap=False)
    return env


def copy_calls(env: EnvBase, index: int | None = None) -> None:
    """Let an environment and its base environment copy all inputs and outputs.

    An environment may reuse, change or keep these tensors. TorchRL's collectors keep the tensors of every step until
    the rollout is complete, and TorchRL's transforms keep some tensors until the next step. Environments in processes
    that already run are not changed.

    Each call also sets :data:`position` to the environment's number ``index``, for error messages.
    """
    base = env
    while isinstance(base, TransformedEnv):
        base = base.base_env
    if isinstance(base, BatchedEnvBase):  # a BatchedEnvBase copies the outputs of its environments
        base.create_env_fn = [
            make if isinstance(make, _CopyingFactory) else _CopyingFactory(make, number)
            for number, make in enumerate(base.create_env_fn)
        ]
        for number, inner in enumerate(serial_envs(base) if isinstance(base, SerialEnv) and not base.is_closed else ()):
            copy_calls(inner, number)
    else:
        _wrap_calls(base, index)
        if isinstance(base, GymWrapper) and base.wrapper_frame_skip > 1 and not isinstance(base._env, FreshActions):
            base._env = FreshActions(base._env)  # each skipped frame gets the same action array
    if env is not base:
        _wrap_calls(env, index)


def _wrap_calls(env: Any, index: int | None) -> None:
    if not (isinstance(env._step, partial) and env._step.func is _call_with_copies):
        env._step = partial(_call_with_copies, env._step, index)
        env._reset = partial(_call_with_copies, env._reset, index)


def _call_with_copies(
    call: Callable[..., Any], index: int | None, tensordict: TensorDictBase | None = None, **kwargs: Any
) -> Any:
    position.environment = index
    inputs = None if tensordict is None else tensordict.clone()
    returned = call(inputs, **kwargs)
    return returned.clone() if isinstance(returned, TensorDictBase) else returned


class _CopyingFactory:
    """Make an environment that copies its inputs and outputs; a class, so that it can be pickled."""

    def __init__(self, make: Any, index: int) -> None:
        self._make, self._index = make, index

    def __call__(self, **kwargs: Any) -> EnvBase:
        env: EnvBase = self._make if isinstance(self._make, EnvBase) else self._make(**kwargs)
        copy_calls(env, self._index)
        return env


class ActionConversion(Transform):
    """Convert the policy's actions to the environment's action spec; the rollout keeps the policy's actions.

    Args:
        form: The format of the environment's actions.
    """

    def __init__(self, form: ActionFormat) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self.form = form

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        return self.form.to_environment(action)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Return the input specs with the action spec of networks."""
        actions = input_spec["full_action_spec"]
        actions["action"] = network_spec(actions["action"])
        return input_spec


class ReplayTransform(Transform):
    """A transform that replaces the environment's steps by recorded steps from the source ``replay``.

    After :meth:`resume`, a restored source continues its episodes through the resets before the next step.
    """

    replay: Any

    def resume(self) -> None:
        """Continue the replayed episodes through the next reset."""
        raise NotImplementedError


def replay_transforms(env: EnvBase) -> Iterator[ReplayTransform]:
    """Yield an environment's transforms that replay recorded steps."""
    while isinstance(env, TransformedEnv):
        yield from (
            transform for transform in flatten_transform(env.transform) if isinstance(transform, ReplayTransform)
        )
        env = env.base_env


class ContinueEpisodes(Transform):
    """After :meth:`resume`, let episodes of some environments continue through the next reset."""

    def __init__(self) -> None:
        super().__init__()
        self._mask: Tensor | None = None
        self._states: Mapping[NestedKey, Tensor] = {}

    def resume(self, mask: Tensor, states: Mapping[NestedKey, Tensor]) -> None:
        """Continue the episodes in ``mask``, ``[N]``, through the next reset; recurrent states are ``[N, *state]``."""
        self._mask, self._states = mask, states

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        mask, self._mask = self._mask, None
        if mask is not None:
            for key, value in {"is_init": torch.zeros(len(mask), 1, dtype=torch.bool), **self._states}.items():
                reset = tensordict_reset[key]
                continued = value.where(expand_mask(mask, value), reset.cpu().reshape(value.shape))
                tensordict_reset[key] = continued.reshape(reset.shape).to(reset.device)
        return tensordict_reset


@contextmanager
def preserved_replay_state(env: EnvBase) -> Iterator[None]:
    """Restore the replay sources of an environment at the end of the block, because resets may draw from them."""
    saved = [(transform.replay, transform.replay.state_dict()) for transform in replay_transforms(env)]
    try:
        yield
    finally:
        for replay, state in saved:
            replay.load_state_dict(state)


def _check_env(env: EnvBase, num_envs: int | None, own_number: bool) -> EnvBase:
    """Validate and return the environment; raise ValueError for keys, shapes or transforms that do not fit."""
    record_num_threads(env)
    if any("" in path_of(key) for key in env.observation_spec.keys(True)):
        raise ValueError(f"TorchRL's specs cannot index an observation without a name, ''. {RENAME_REMEDY}")
    with unwrap_transforms(env) as (base, transforms):
        if isinstance(base, GymWrapper) and first_action(base.action_space):
            raise ValueError(
                f"actions of a GymEnv must count from 0, got {base.action_space}. Pass the Gymnasium environment "
                "itself, by its id or a factory."
            )
        for transform in transforms:
            for cls, reason in _UNSUPPORTED_TRANSFORMS.items():
                if isinstance(transform, cls):
                    raise ValueError(f"{type(transform).__name__} {reason}.")
    for name, keys, expected in (("action", env.action_keys, "action"), ("reward", env.reward_keys, "reward")):
        if keys != [expected]:
            raise ValueError(
                f"the environment's {name} keys must be [{expected!r}], got {keys}. Rename or combine them by a "
                "transform, such as torchrl.envs.RenameTransform."
            )
    if "done" not in env.done_keys or "terminated" not in env.done_keys:
        raise ValueError(f"the environment's done keys must contain 'done' and 'terminated', got {env.done_keys}.")
    reward = env.reward_spec_unbatched.shape
    if reward != (1,):
        raise ValueError(f"the environment's rewards must have shape [1], got {list(reward)}.")
    if len(env.batch_size) > 1:
        raise ValueError(
            f"the environment's batch size must have one dimension, got {list(env.batch_size)}. Flatten it by "
            "torchrl.envs.BatchSizeTransform."
        )
    number = env.batch_size.numel()
    if not own_number and num_envs not in (None, number):
        raise ValueError(f"num_envs must be {number}, the environment's batch size, got {num_envs}.")
    return env
