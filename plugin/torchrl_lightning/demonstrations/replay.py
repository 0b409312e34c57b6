"""Demonstrations that stand in for episodes of environments, a step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tensordict.utils import NestedKey

from torchrl_lightning.collectors import ReplayedRows
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.storage import DemonstrationStorage, from_state, state_of
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.ranges import integer, one_of
from torchrl_lightning.state import check_state, mapping, same, sequence, whole

STATE_VERSION = 1

End = Literal["terminated", "truncated"]
LogProb = Literal["deterministic", "current"]
Array = NDArray[Any]


class DemonstrationReplay:
    """Replay demonstrations in a :class:`~torchrl_lightning.collectors.GymnasiumCollector`, as its ``replay``.

    Where an episode begins, the sampler draws whether a demonstration is played in its place, and which. One that gives
    way to another meanwhile is played to its end. Demonstrations must fit the environment, see
    :meth:`Demonstration.fits`.

    Args:
        storage: Where demonstrations are kept.
        sampler: What draws them.
        num_envs: The number of environments.
        ends: How a demonstration ends: ``terminated``, or ``truncated``, so that the value of what follows counts.
        log_prob: What is stored as the log-probability of its actions: ``deterministic`` is 0, as if whoever showed
            them had no choice; ``current`` is that of the policy.

    Raises:
        ValueError: ``num_envs`` is not positive, or an option has no such value.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import GymnasiumCollector
        >>> steps = TensorDict({"observation": torch.zeros(3, 4), "action": torch.tensor([0, 1, 1])}, [3])
        >>> steps["next", "reward"] = torch.tensor([[0.0], [0.0], [1.0]])
        >>> storage = DemonstrationStorage()
        >>> storage.replace([Demonstration(steps)], [])
        >>> replay = DemonstrationReplay(storage, DemonstrationSampler(rho=1.0, phi=0.0), num_envs=1)
        >>> rollout = GymnasiumCollector("CartPole-v1", frames_per_batch=6, replay=replay).rollout()
        >>> rollout["action"].tolist(), rollout["next", "reward"].flatten().tolist()
        ([[0, 1, 1, 0, 1, 1]], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    """

    def __init__(
        self,
        storage: DemonstrationStorage,
        sampler: DemonstrationSampler,
        num_envs: int,
        *,
        ends: End = "terminated",
        log_prob: LogProb = "deterministic",
    ) -> None:
        self.storage, self.sampler = storage, sampler
        self.num_envs = integer(num_envs, "num_envs")
        self.ends: End = one_of(ends, "ends", get_args(End))
        self.log_prob: LogProb = one_of(log_prob, "log_prob", get_args(LogProb))
        self._running: dict[int, _Player] = {}
        self._cast: _Cast | None = None

    @property
    def playing(self) -> Array:
        """Where steps of a demonstration are left, ``[num_envs]`` bool."""
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[[*self._running]] = True
        return mask

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Draw what is replayed where an episode begins (``starts``, ``[num_envs]`` bool), and return the next step.

        Raises:
            ValueError: ``starts`` is of another number of environments.
        """
        if len(starts) != self.num_envs:
            raise ValueError(f"This replay is for {self.num_envs} environments, asked for the steps of {len(starts)}.")
        if starts.any():
            for env in np.flatnonzero(starts).tolist():
                self._running.pop(env, None)
                if (drawn := self.sampler.draw(self.storage)) is not None:
                    self._running[env] = _Player(drawn)
            self._cast = None
        if not self._running:
            return None
        if self._cast is None:
            self._cast = _Cast(self._running, self.playing)
        rows = self._cast.next_rows(self.ends == "terminated", 0.0 if self.log_prob == "deterministic" else None)
        if not self._cast.left:
            self._running = {env: player for env, player in self._running.items() if player.left}
            self._cast = None
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return what is being played and where, and the sampler's state: tensors and scalars only.

        The storage has a state of its own; what is being played may not be kept there any more.
        """
        playing = [
            {"env": env, "position": player.position, "demonstration": state_of(player.demonstration)}
            for env, player in sorted(self._running.items())
        ]
        return {
            "schema_version": STATE_VERSION,
            "num_envs": self.num_envs,
            "playing": playing,
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore exactly: the next call returns the steps that would have come next.

        Raises:
            ValueError: Another version or number of environments, no state of the sampler, or a position that is not
                within its demonstration; nothing was changed.
        """
        running = self._checked(state_dict)
        self.sampler.load_state_dict(state_dict["sampler"])
        self._running, self._cast = running, None

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        self._checked(state_dict)

    def _checked(self, state: Mapping[str, Any]) -> dict[int, _Player]:
        owner = "demonstration replay"
        schema = {"num_envs": same(self.num_envs, owner), "playing": sequence, "sampler": mapping}
        check_state(state, schema, owner, STATE_VERSION)
        self.sampler.check_state(state["sampler"])
        running: dict[int, _Player] = {}
        for entry in state["playing"]:
            of_one = {"env": whole(0, self.num_envs - 1), "position": whole(), "demonstration": mapping}
            check_state(entry, of_one, owner)
            player = _Player(from_state(entry["demonstration"]), entry["position"])
            if player.left < 1:
                raise ValueError(
                    f"The {owner} state is at position {player.position} of demonstration "
                    f"{player.demonstration.name!r}, which has {player.demonstration.length} steps."
                )
            running[entry["env"]] = player
        return running

    def __repr__(self) -> str:
        options = f"ends={self.ends!r}, log_prob={self.log_prob!r}"
        return f"{type(self).__name__}({len(self._running)} of {self.num_envs} environments replay, {options})"


class _Player:
    """A demonstration and the next step of it, over its own tensors."""

    def __init__(self, demonstration: Demonstration, position: int = 0) -> None:
        self.demonstration, self.position = demonstration, position
        steps, last = demonstration.steps, demonstration.last_observation
        self.observations: dict[NestedKey, Array] = {
            key: steps.get(key).numpy() for key in demonstration.observation_keys
        }
        # Nobody knows what followed some demonstrations; what was seen last is nearest to it.
        self._last: dict[NestedKey, Array] = {
            key: seen[-1] if last is None else last.get(key).numpy() for key, seen in self.observations.items()
        }
        self.actions: Array = steps.get("action").numpy()
        self.rewards: list[float] = demonstration.rewards.tolist()
        self._length = demonstration.length

    @property
    def left(self) -> int:
        """How many steps are left."""
        return self._length - self.position

    def shown(self, key: NestedKey, t: int) -> Array:
        """Return the observation before step ``t``, or after the last one."""
        rows = self.observations[key]
        seen: Array = rows[t] if t < self._length else self._last[key]
        return seen


class _Cast:
    """The demonstrations that play at the same time, until one begins or ends: what they share is told once."""

    def __init__(self, running: Mapping[int, _Player], mask: Array) -> None:
        self._players = [running[env] for env in sorted(running)]
        self._mask, self.left = mask, min(player.left for player in self._players)
        self._serials = np.array([player.demonstration.serial for player in self._players])
        self._never = np.zeros(len(self._players), dtype=bool)
        self._shown = self._observations()

    def _observations(self) -> dict[NestedKey, Array]:
        players = self._players
        return {
            key: np.array([player.shown(key, player.position) for player in players]) for key in players[0].observations
        }

    def next_rows(self, terminates: bool, log_prob: float | None) -> ReplayedRows:
        """Go on by one step."""
        players = self._players
        action = np.array([player.actions[player.position] for player in players])
        reward = np.array([player.rewards[player.position] for player in players], dtype=np.float32)
        for player in players:
            player.position += 1
        self.left -= 1
        over = self._never if self.left else np.array([not player.left for player in players])
        # What follows this step is what comes before the next one.
        before, self._shown = self._shown, self._observations()
        return ReplayedRows(
            mask=self._mask,
            observation=before,
            action=action,
            next_observation=self._shown,
            reward=reward,
            terminated=over if terminates else self._never,
            truncated=self._never if terminates else over,
            serial=self._serials,
            log_prob=log_prob,
        )
