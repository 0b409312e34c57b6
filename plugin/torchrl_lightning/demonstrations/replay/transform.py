"""Replay demonstrations in place of a TorchRL environment's episodes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Binary, Composite, TensorSpec, Unbounded
from torchrl.envs import ConditionalSkip, EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_lightning._core.keys import ACTION, DEMO_ACTION, DEMO_SERIAL, REPLAYED
from torchrl_lightning.demonstrations.miner import NOT_REPLAYED
from torchrl_lightning.demonstrations.replay.collector_replay import DemonstrationReplay
from torchrl_lightning.environments import ReplayedRows
from torchrl_lightning.environments.backends.torchrl_env import ReplayTransform


class DemonstrationReplayTransform(ReplayTransform):
    """Replay demonstrations in a TorchRL environment; :meth:`wrap` adds the transform to the environment.

    At the start of an episode the replay may draw a demonstration. During the replay, observation, reward and end come
    from the demonstration. The environment is not stepped, and is reset after the replay.

    The transform writes the mask of replaying environments ``("demo", "mask")``, the actions ``("demo", "action")``,
    and the serial numbers ``("demo", "serial")``. The serial number is -1 without a replay.
    :class:`DemonstrationActor` repeats the actions.

    Demonstrations must match the wrapped environment. Append transforms that stack frames or scale rewards after this
    transform, so that they also apply to replayed steps.

    Args:
        replay: The replay, for the same number of environments.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.envs import GymEnv
        >>> from torchrl_lightning import Demonstration, DemonstrationSampler, DemonstrationStorage
        >>> steps = TensorDict({"observation": torch.zeros(3, 4), "action": torch.tensor([0, 1, 1])}, [3])
        >>> steps["next", "reward"] = torch.tensor([[0.0], [0.0], [1.0]])
        >>> storage = DemonstrationStorage()
        >>> storage.replace([Demonstration(steps)], [])
        >>> replay = DemonstrationReplay(storage, DemonstrationSampler(rho=1.0, phi=0.0), num_envs=1)
        >>> env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        >>> rollout = DemonstrationReplayTransform(replay).wrap(env).rollout(9)
        >>> rollout["demo", "action"].tolist(), rollout["next", "reward"].flatten().tolist()
        ([0, 1, 1], [0.0, 0.0, 1.0])
    """

    CONFIG_NAME: ClassVar[str | None] = None

    def __init__(self, replay: DemonstrationReplay) -> None:
        super().__init__(in_keys=[], out_keys=[REPLAYED, DEMO_ACTION, DEMO_SERIAL])
        self.replay = replay
        self._rows: ReplayedRows | None = None
        self._no_replay = TensorDict()  # the values of the "demo" entries without a replay
        self._continues = False

    def wrap(self, env: EnvBase) -> TransformedEnv:
        """Wrap an environment with the transform and a layer that skips steps of replaying environments.

        Raises:
            ValueError: The environment and the replay have different numbers of environments. Or the environment lacks
                the end flag of the replay, or cannot skip steps of single environments.
        """
        _check_env(env, self.replay)
        # In one layer, ConditionalSkip would also skip this transform when all environments replay.
        skipping_env = TransformedEnv(env, ConditionalSkip(_IsReplaying(self.replay)), auto_unwrap=False)
        return TransformedEnv(skipping_env, self, auto_unwrap=False)

    def resume(self) -> None:
        """Continue the replays of a restored state, even if the environments are reset before the next step."""
        self._continues = True

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the entries of the replay."""
        base_env = self.container.base_env
        skip = base_env.transform if isinstance(base_env, TransformedEnv) else None
        if not (isinstance(skip, ConditionalSkip) and isinstance(skip.cond, _IsReplaying)):
            raise ValueError(
                "The transform must wrap the environment with its method wrap(env), so that replaying environments "
                "are not stepped."
            )
        shape, device = base_env.batch_size, observation_spec.device
        action = base_env.full_action_spec[ACTION]
        observation_spec["demo"] = Composite(
            mask=Binary(1, shape=(*shape, 1), dtype=torch.bool, device=device),
            action=Unbounded(action.shape, dtype=action.dtype, device=device),
            serial=Unbounded((*shape, 1), dtype=torch.int64, device=device),
            shape=shape,
            device=device,
        )
        return observation_spec

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self._no_replay = self.container.full_observation_spec["demo"].zero()
        self._no_replay["serial"].fill_(NOT_REPLAYED)
        reset = tensordict.get("_reset", None)
        starts = np.ones(self.replay.num_envs, dtype=bool) if reset is None else _as_mask(reset)
        if self._continues:
            starts = starts & ~self.replay.playing
        self.replay.begin(starts)
        rows = self._write_next(tensordict_reset)
        if rows is not None:
            for key, values in rows.observation.items():
                _set_rows(tensordict_reset, key, values, rows.mask)
        return tensordict_reset

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # A skipped environment returns its input as output. Exclude observations that outer transforms have stacked.
        if self._rows is None:
            return tensordict
        observation, base_spec = self._rows.observation, self.container.base_env.full_observation_spec
        return tensordict.exclude(*(key for key in observation if tensordict[key].shape != base_spec[key].shape))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows, self._continues = self._rows, False
        if rows is None:
            self._write_next(next_tensordict)
            return next_tensordict
        step = tensordict.get("_step", None)
        stepped = rows.mask if step is None else rows.mask & _as_mask(step)
        selected = stepped[rows.mask]
        _copy_skipped(tensordict.get("next", None), next_tensordict, stepped)
        for key, values in rows.next_observation.items():
            _set_rows(next_tensordict, key, values[selected], stepped)
        _set_rows(next_tensordict, "reward", rows.reward[selected], stepped)
        ends = {"terminated": rows.terminated, "truncated": rows.truncated, "done": rows.terminated | rows.truncated}
        for name in ends.keys() & next_tensordict.keys():
            _set_rows(next_tensordict, name, ends[name][selected], stepped)
        self.replay.advance(stepped)
        self._write_next(next_tensordict)
        return next_tensordict

    def _write_next(self, tensordict: TensorDictBase) -> ReplayedRows | None:
        """Write the next step of the replayed demonstrations."""
        rows = self._rows = self.replay.peek()
        tensordict["demo"] = self._no_replay.clone()
        if rows is not None:
            entries = {REPLAYED: rows.mask[rows.mask], DEMO_ACTION: rows.action, DEMO_SERIAL: rows.serial}
            for key, values in entries.items():
                _set_rows(tensordict, key, values, rows.mask)
        return rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.replay})"


class _IsReplaying:
    """The condition of ``ConditionalSkip``: a mask of the replaying environments."""

    def __init__(self, replay: DemonstrationReplay) -> None:
        self.replay = replay

    def __call__(self, tensordict: TensorDictBase) -> Tensor:
        return torch.from_numpy(self.replay.playing).to(tensordict.device).view(tensordict.batch_size)


def _check_env(env: EnvBase, replay: DemonstrationReplay) -> None:
    num_envs, innermost = env.batch_size.numel(), env
    if len(env.batch_size) > 1 or num_envs != replay.num_envs:
        raise ValueError(
            f"The environment must have the batch size [{replay.num_envs}], like the replay, got "
            f"{list(env.batch_size)}. Set num_envs of DemonstrationReplay."
        )
    # Without the flag `truncated`, a truncation sets only `done`.
    if ("terminated" if replay.ends == "recorded" else replay.ends) not in env.done_keys:
        raise ValueError(
            f"ends must be one of the environment's flags {env.done_keys}, got {replay.ends!r}. Set another ends of "
            "DemonstrationReplay."
        )
    while isinstance(innermost, TransformedEnv):
        innermost = innermost.base_env
    if num_envs > 1 and not isinstance(innermost, BatchedEnvBase):
        raise ValueError(
            f"{type(innermost).__name__} steps its {num_envs} environments together, but the replay must skip single "
            "ones. Use a SerialEnv or a ParallelEnv of single environments."
        )


def _as_mask(reset_or_step: Tensor) -> NDArray[np.bool_]:
    """Reshape flags to ``[N]``. Their shape is ``[N, 1]``, ``[N]``, or ``[]`` for a single environment."""
    return reset_or_step.cpu().numpy().reshape(-1)


def _copy_skipped(carried: TensorDictBase | None, next_tensordict: TensorDictBase, mask: NDArray[np.bool_]) -> None:
    """Write the entries of the skipped inner transforms: ``is_init`` is False, and recurrent states stay unchanged."""
    if "is_init" in next_tensordict:
        _set_rows(next_tensordict, "is_init", np.zeros((mask.sum(), 1), dtype=bool), mask)
    for key, value in () if carried is None else carried.items(True, True):
        if key in next_tensordict.keys(True, True):
            _set_rows(next_tensordict, key, _per_env(value, carried, mask)[torch.from_numpy(mask)], mask)


def _set_rows(data: TensorDictBase, key: NestedKey, values: Any, mask: NDArray[np.bool_]) -> None:
    """Set an entry's values in some environments. Write into a copy, because the entry's memory may be shared."""
    entry = data.get(key)
    rows = _per_env(entry, data, mask).clone()
    rows[torch.from_numpy(mask)] = torch.as_tensor(values).to(rows).reshape(-1, *rows.shape[1:])
    data.set(key, rows.reshape(entry.shape))


def _per_env(entry: Tensor, data: TensorDictBase, mask: NDArray[np.bool_]) -> Tensor:
    """Add the environment dimension to an entry of a single environment if the dimension is missing."""
    return entry.reshape(len(mask), *entry.shape[data.ndim :])
