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
from torchrl_lightning.demonstrations.miner import OWN
from torchrl_lightning.demonstrations.replay.collector_replay import DemonstrationReplay
from torchrl_lightning.environments import ReplayedRows
from torchrl_lightning.environments.backends.torchrl_env import PlayingTransform


class DemonstrationReplayTransform(PlayingTransform):
    """Replay demonstrations in a TorchRL environment, which :meth:`wrap` wraps.

    At the start of an episode the replay may draw a demonstration. During the replay, observation, reward and end come
    from the demonstration; the environment is not stepped and is reset afterwards. The transform writes the mask of
    replaying environments (``("demo", "mask")``), the actions (``("demo", "action")``, which
    :class:`DemonstrationActor` repeats), and the serial numbers (``("demo", "serial")``, -1 without a replay).

    Demonstrations must match the wrapped environment. Add transforms that stack frames or scale rewards above this
    one, so that they apply to both.

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
        self._nothing = TensorDict()  # the entries without a replay
        self._goes_on = False

    def wrap(self, env: EnvBase) -> TransformedEnv:
        """Wrap an environment with the transform and a layer that skips steps of replaying environments.

        Raises:
            ValueError: The number of environments differs from the replay's, or the environment lacks the replay's end
                flag or cannot skip steps of single environments.
        """
        _check(env, self.replay)
        # With both in one layer, nothing would be replayed while all environments rest.
        resting = TransformedEnv(env, ConditionalSkip(_Resting(self.replay)), auto_unwrap=False)
        return TransformedEnv(resting, self, auto_unwrap=False)

    def resume(self) -> None:
        """Continue the replays of a restored state through the resets before the next step."""
        self._goes_on = True

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Add the entries of the replay."""
        beneath = self.container.base_env
        inner = beneath.transform if isinstance(beneath, TransformedEnv) else None
        if not (isinstance(inner, ConditionalSkip) and isinstance(inner.cond, _Resting)):
            raise ValueError(
                "Environments that replay would be stepped too; lay the transform around them by its method wrap(env)."
            )
        shape, device = beneath.batch_size, observation_spec.device
        action = beneath.full_action_spec[ACTION]
        observation_spec["demo"] = Composite(
            mask=Binary(1, shape=(*shape, 1), dtype=torch.bool, device=device),
            action=Unbounded(action.shape, dtype=action.dtype, device=device),
            serial=Unbounded((*shape, 1), dtype=torch.int64, device=device),
            shape=shape,
            device=device,
        )
        return observation_spec

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self._nothing = self.container.full_observation_spec["demo"].zero()
        self._nothing["serial"].fill_(OWN)
        reset = tensordict.get("_reset", None)
        starts = np.ones(self.replay.num_envs, dtype=bool) if reset is None else _flags(reset)
        if self._goes_on:
            starts = starts & ~self.replay.playing
        self.replay.begin(starts)
        rows = self._tell(tensordict_reset)
        if rows is not None:
            for key, shown in rows.observation.items():
                _put(tensordict_reset, key, shown, rows.mask)
        return tensordict_reset

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # A resting environment repeats its input, which transforms above may have stacked.
        if self._rows is None:
            return tensordict
        shown, beneath = self._rows.observation, self.container.base_env.full_observation_spec
        return tensordict.exclude(*(key for key in shown if tensordict[key].shape != beneath[key].shape))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows, self._goes_on = self._rows, False
        if rows is None:
            self._tell(next_tensordict)
            return next_tensordict
        step = tensordict.get("_step", None)
        made = rows.mask if step is None else rows.mask & _flags(step)
        of = made[rows.mask]
        _carry(tensordict.get("next", None), next_tensordict, made)
        for key, shown in rows.next_observation.items():
            _put(next_tensordict, key, shown[of], made)
        _put(next_tensordict, "reward", rows.reward[of], made)
        ends = {"terminated": rows.terminated, "truncated": rows.truncated, "done": rows.terminated | rows.truncated}
        for name in ends.keys() & next_tensordict.keys():
            _put(next_tensordict, name, ends[name][of], made)
        self.replay.advance(made)
        self._tell(next_tensordict)
        return next_tensordict

    def _tell(self, tensordict: TensorDictBase) -> ReplayedRows | None:
        """Write the next step of the replayed demonstrations."""
        rows = self._rows = self.replay.peek()
        tensordict["demo"] = self._nothing.clone()
        if rows is not None:
            told = {REPLAYED: rows.mask[rows.mask], DEMO_ACTION: rows.action, DEMO_SERIAL: rows.serial}
            for key, values in told.items():
                _put(tensordict, key, values, rows.mask)
        return rows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.replay})"


class _Resting:
    """The condition of ``ConditionalSkip``: a mask of the replaying environments."""

    def __init__(self, replay: DemonstrationReplay) -> None:
        self.replay = replay

    def __call__(self, tensordict: TensorDictBase) -> Tensor:
        return torch.from_numpy(self.replay.playing).to(tensordict.device).view(tensordict.batch_size)


def _check(env: EnvBase, replay: DemonstrationReplay) -> None:
    number, base = env.batch_size.numel(), env
    if len(env.batch_size) > 1 or number != replay.num_envs:
        raise ValueError(
            f"The replay is for {replay.num_envs} environments, got a batch of {list(env.batch_size)}; give it "
            "their number, side by side in one dimension."
        )
    # Without the flag `truncated`, a truncation sets only `done`.
    if ("terminated" if replay.ends == "recorded" else replay.ends) not in env.done_keys:
        raise ValueError(
            f"Demonstrations end as {replay.ends!r}, the environment has the flags {env.done_keys}; choose another "
            "ends= of DemonstrationReplay."
        )
    while isinstance(base, TransformedEnv):
        base = base.base_env
    if number > 1 and not isinstance(base, BatchedEnvBase):
        raise ValueError(
            f"{type(base).__name__} steps its {number} environments at once, but those that replay must rest; put "
            "single ones side by side in a SerialEnv or a ParallelEnv."
        )


def _flags(reset_or_step: Tensor) -> NDArray[np.bool_]:
    """Return flags ``[N, 1]``, ``[N]``, or ``[]`` of a single environment, as ``[N]``."""
    return reset_or_step.cpu().numpy().reshape(-1)


def _carry(written: TensorDictBase | None, successor: TensorDictBase, where: NDArray[np.bool_]) -> None:
    """Do the work of the skipped transforms below: no episode begins, and recurrent states continue."""
    if "is_init" in successor:
        _put(successor, "is_init", np.zeros((where.sum(), 1), dtype=bool), where)
    for key, value in () if written is None else written.items(True, True):
        if key in successor.keys(True, True):
            _put(successor, key, _by_environment(value, written, where)[torch.from_numpy(where)], where)


def _put(data: TensorDictBase, key: NestedKey, values: Any, where: NDArray[np.bool_]) -> None:
    """Replace an entry by a copy with new values in some environments, because its memory may be shared."""
    entry = data.get(key)
    rows = _by_environment(entry, data, where).clone()
    rows[torch.from_numpy(where)] = torch.as_tensor(values).to(rows).reshape(-1, *rows.shape[1:])
    data.set(key, rows.reshape(entry.shape))


def _by_environment(entry: Tensor, data: TensorDictBase, where: NDArray[np.bool_]) -> Tensor:
    """Return an entry with the environment dimension, which a single environment lacks."""
    return entry.reshape(len(where), *entry.shape[data.ndim :])
