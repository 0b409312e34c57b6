"""Build demonstrations from the agent's own episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ACTION, DEMO_SERIAL, REWARD, TRAJ_IDS
from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, check_state, mapping, sequence
from torchrl_lightning._core.tree import nested_key, path_of, to_tensordict
from torchrl_lightning._core.tree_checks import check_tree
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.demonstrations.demo_writer import DemonstrationWriter
from torchrl_lightning.demonstrations.serialization import lowest_as_none, none_as_lowest
from torchrl_lightning.demonstrations.trajectory import Demonstration, end_flags, newest_frames
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.env_ids import id_changes
from torchrl_lightning.rollout.rollout_writer import time_major

NOT_REPLAYED = -1  # the serial number of steps without a replay


@dataclass(frozen=True)
class FinishedEpisode:
    """A finished episode of the agent, or a finished replay of a demonstration, and its largest state value.

    Attributes:
        serial: The serial number of the replayed demonstration.
        value: The current largest value of the episode's states.
        demonstration: The agent's episode; None for a replay.
    """

    serial: int
    value: float
    demonstration: Demonstration | None = None

    def copied(self) -> FinishedEpisode:
        """Copy the tensors that are views of the rollout's memory."""
        return replace(self, demonstration=self.demonstration and self.demonstration.copied())


@dataclass(frozen=True)
class _Episode:
    """A running episode: the agent's own steps, or a replay of the demonstration ``serial``."""

    serial: int
    value: float = -math.inf
    parts: tuple[TensorDictBase, ...] = ()

    @property
    def is_replay(self) -> bool:
        return self.serial != NOT_REPLAYED

    @property
    def steps(self) -> TensorDictBase:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def with_steps(self, steps: TensorDictBase, value: float) -> _Episode:
        parts = self.parts if self.is_replay else (*self.parts, steps)
        return _Episode(self.serial, max(self.value, value), parts)

    def with_copied_tail(self) -> _Episode:
        """Return the episode with copied steps of the last rollout, because the rollout's memory may be reused."""
        return replace(self, parts=(*self.parts[:-1], *(part.clone() for part in self.parts[-1:])))

    def to_state(self) -> dict[str, Any]:
        """Return the entries for a miner's state, without copying."""
        steps = self.steps.to_dict() if self.parts else None
        return {"serial": self.serial, "value": lowest_as_none(self.value), "steps": steps}


def _episode_states(running: list[_Episode | None]) -> list[dict[str, Any] | None]:
    return [None if episode is None else episode.to_state() for episode in running]


class DemonstrationMiner(Stateful):
    """Track the episodes of all environments over rollouts, and add the finished ones to a writer.

    Episodes are added in the order of their ends, with the critic's largest value of their states. Replayed steps do
    not belong to the agent. A completely replayed demonstration gets the largest of the critic's current values of its
    states. An episode is skipped if it began before the first rollout, or if a reset cut it. ``is_init`` and changed
    ``("collector", "traj_ids")`` mark resets.

    Args:
        writer: The writer that selects the demonstrations to store.
        num_envs: The number of environments.
        specs: The environment's specs, without a frame stack, for the keys of the observation. Only the newest image of
            a frame stack is used. None uses the entry ``observation`` unchanged.
        value_key: The key of the state values. If a rollout lacks this entry, episodes have the value ``-inf``.
        frame_skip: The number of environment frames in one step.
        metadata: The metadata of all demonstrations.

    Raises:
        ValueError: A number is not positive.

    Examples:
        >>> from torchrl_lightning import DemonstrationStorage, GymnasiumCollector
        >>> miner = DemonstrationMiner(DemonstrationWriter(DemonstrationStorage()), num_envs=2)
        >>> collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=200, total_frames=400, seed=0)
        >>> for rollout in collector:
        ...     miner.mine(rollout)
        >>> len(miner.writer.storage) > 0
        True
    """

    OWNER, VERSION = "demonstration miner", 1
    STATE = {
        "num_envs": Attribute(),
        "count": Attribute(bounded_integer(), "_count"),
        "running": Attribute(
            check_for=lambda miner: miner._read_running, attribute="_running", to_saved=_episode_states
        ),
    }

    def __init__(
        self,
        writer: DemonstrationWriter,
        num_envs: int,
        *,
        specs: EnvironmentSpecs | None = None,
        value_key: NestedKey = "state_value",
        frame_skip: int = 1,
        metadata: Mapping[str, str | int | float] | None = None,
    ) -> None:
        self.writer, self.num_envs = writer, integer(num_envs, "num_envs")
        self.specs, self.value_key = specs, nested_key(value_key)
        self.frame_skip = integer(frame_skip, "frame_skip")
        self.metadata = dict(metadata or {})
        self._running: list[_Episode | None] = [None] * num_envs
        self._count = 0  # number of the agent's finished episodes
        self._last_ids: Tensor | None = None  # last trajectory id of each environment

    def mine(self, rollout: TensorDictBase) -> None:
        """Read a rollout, ``[N, T]`` or ``[T, N]`` with a dimension named ``"time"``, and copy the stored steps.

        If the rollout lacks ``is_init``, an episode begins in each environment that does not have a running episode. If
        the rollout lacks next observations, demonstrations do not have a last observation.

        Raises:
            KeyError: The rollout lacks an entry.
            ValueError: The rollout has another number of environments or unnamed dimensions, or a value is not finite.
                Nothing was changed.
        """
        for finished in self.finished(rollout):
            self.add(finished)

    def add(self, finished: FinishedEpisode) -> None:
        """Add an agent's episode to the writer, or update the value of a replayed demonstration."""
        if finished.demonstration is not None:
            self.writer.add(finished.demonstration)
        elif (stored := self.writer.storage.find(finished.serial)) is not None:
            self.writer.refresh(stored, finished.value)

    def finished(self, rollout: TensorDictBase) -> list[FinishedEpisode]:
        """Read a rollout like :meth:`mine`, but return the episodes that end in the rollout instead of adding them.

        The result has the order of the episodes' ends, and shares the rollout's memory. Replays with unknown values are
        left out.
        """
        rows = time_major(rollout, None)
        if rows.ndim != 2 or rows.shape[1] != self.num_envs:
            raise ValueError(
                f"rollout must have the dimensions time and {self.num_envs} environments, got "
                f"{list(rollout.batch_size)} with the names {list(rollout.names)}."
            )
        done, starts = rows["next", "done"].flatten(1), rows.get("is_init", None)
        if starts is None:  # an episode begins if none is running
            starts = torch.cat([torch.tensor([[episode is None for episode in self._running]]), done[:-1]])
        starts, last_ids = starts.flatten(1), self._last_ids
        if (changes := id_changes(rows, 0, last_ids)) is not None:
            starts = starts | changes.to(starts.device)
            last_ids = rows[TRAJ_IDS][-1].reshape(self.num_envs, -1)[:, 0].clone()
        values, serials = self._state_values(rows, done.shape), rows.get(DEMO_SERIAL, None)
        serials = torch.full(done.shape, NOT_REPLAYED) if serials is None else serials.flatten(1)
        steps, next_rows = self._select_observations(rows).update(rows.select(ACTION, REWARD)), rows.get("next")
        next_observations = self._select_observations(next_rows) if self._keys[0] in next_rows.keys(True) else None
        running: list[_Episode | None] = [*self._running]
        ended: list[tuple[int, int, _Episode]] = []
        for env in range(self.num_envs):
            bounds = [*sorted({0, *starts[:, env].nonzero().flatten().tolist()}), len(rows)]
            for begin, end in pairwise(bounds):
                episode = running[env]
                if starts[begin, env]:
                    episode = _Episode(int(serials[begin, env]))
                if episode is None:
                    continue
                episode = episode.with_steps(steps[begin:end, env], values[begin:end, env].max().item())
                running[env] = episode
                if done[end - 1, env]:
                    running[env] = None
                    ended.append((end, env, episode))
        # The sort keys are unique, because an environment ends at most one episode in a step.
        ended.sort(key=lambda item: item[:2])
        count, finished = self._count, []
        for end, env, episode in ended:
            demonstration = None
            if not episode.is_replay:
                count += 1
                demonstration = Demonstration(
                    episode.steps,
                    None if next_observations is None else next_observations[end - 1, env],
                    value=episode.value,
                    frame_skip=self.frame_skip,
                    name=f"episode {count}",
                    metadata=self.metadata,
                    **end_flags(next_rows, end - 1, env),
                )
            if demonstration is not None or episode.value > -math.inf:
                finished.append(FinishedEpisode(episode.serial, episode.value, demonstration))
        self._last_ids = last_ids
        self._running, self._count = [episode and episode.with_copied_tail() for episode in running], count
        return finished

    @property
    def _keys(self) -> Sequence[NestedKey]:
        return ["observation"] if self.specs is None else self.specs.keys

    def _select_observations(self, rows: TensorDictBase) -> TensorDictBase:
        return rows.select("observation") if self.specs is None else newest_frames(rows, self.specs)

    def _state_values(self, rows: TensorDictBase, shape: torch.Size) -> Tensor:
        values = rows.get(self.value_key, None)
        if values is None:
            return torch.full(shape, -math.inf, dtype=torch.float32)
        highest: Tensor = values.flatten(2).amax(-1)
        if not highest.isfinite().all():
            raise ValueError(f"{self.value_key!r} of the rollout must be finite. Check the critic.")
        return highest

    def _post_load(self) -> None:
        self._last_ids = None  # a new collector may count trajectories from 0 again

    def _read_running(self, value: Any, name: str) -> list[_Episode | None]:
        if len(sequence(value, name)) != self.num_envs:
            raise ValueError(f"The {self.OWNER} state must have {self.num_envs} environments, got {len(value)}.")
        return [episode if episode is None else self._read_episode(episode) for episode in value]

    def _read_episode(self, state: Any) -> _Episode:
        schema = {"serial": bounded_integer(NOT_REPLAYED), "value": none_as_lowest, "steps": optional(mapping)}
        serial, value, steps = check_state(state, schema, self.OWNER).values()
        if serial != NOT_REPLAYED or steps is None:
            return _Episode(serial, value)
        check_tree(steps, torch.Size([]), self.OWNER)
        unfinished = Demonstration(to_tensordict(steps, torch.Size([])), name="of a running episode")
        if {path_of(key) for key in unfinished.observation_keys} != {path_of(key) for key in self._keys}:
            raise ValueError(
                f"The {self.OWNER} state must have the observation entries {self._keys}, got "
                f"{unfinished.observation_keys}."
            )
        return _Episode(NOT_REPLAYED, value, (unfinished.steps.clone(),))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_envs={self.num_envs}, {self._count} episodes, {self.writer})"
