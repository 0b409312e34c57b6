"""Demonstrations that stand in for episodes of environments, a step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @property
    def playing(self) -> Array:
        """Where steps of a demonstration are left, ``[num_envs]`` bool."""
        return self._mask([*self._running])

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Draw what is replayed where an episode begins (``starts``, ``[num_envs]`` bool), and return the next step.

        Raises:
            ValueError: ``starts`` is of another number of environments.
        """
        if len(starts) != self.num_envs:
            raise ValueError(f"This replay is for {self.num_envs} environments, asked for the steps of {len(starts)}.")
        for env in np.flatnonzero(starts).tolist():
            self._running.pop(env, None)
            if (drawn := self.sampler.draw(self.storage)) is not None:
                self._running[env] = _Player(drawn)
        if not self._running:
            return None
        envs = sorted(self._running)
        rows = self._rows([self._running[env] for env in envs], self._mask(envs))
        for env in [env for env in envs if not self._running[env].left]:
            del self._running[env]
        return rows

    def _mask(self, envs: Sequence[int]) -> Array:
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[envs] = True
        return mask

    def _rows(self, players: Sequence[_Player], mask: Array) -> ReplayedRows:
        steps = [(player, player.step()) for player in players]
        over, never = np.array([not player.left for player in players]), np.zeros(len(players), dtype=bool)
        keys = players[0].observations
        return ReplayedRows(
            mask=mask,
            observation={key: np.array([player.observations[key][t] for player, t in steps]) for key in keys},
            action=np.array([player.actions[t] for player, t in steps]),
            next_observation={key: np.array([player.after(key, t) for player, t in steps]) for key in keys},
            reward=np.array([player.rewards[t] for player, t in steps]),
            terminated=over if self.ends == "terminated" else never,
            truncated=over if self.ends == "truncated" else never,
            serial=np.array([player.demonstration.serial for player in players]),
            log_prob=0.0 if self.log_prob == "deterministic" else None,
        )

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
        self._running = running

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
        self.rewards: Array = demonstration.rewards.numpy()
        self._length = demonstration.length

    @property
    def left(self) -> int:
        """How many steps are left."""
        return self._length - self.position

    def step(self) -> int:
        """Go on by one step; return its number."""
        self.position += 1
        return self.position - 1

    def after(self, key: NestedKey, t: int) -> Array:
        """Return the observation after step ``t``."""
        following: Array = self.observations[key][t + 1] if t + 1 < self._length else self._last[key]
        return following
