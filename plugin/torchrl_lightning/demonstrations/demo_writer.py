"""Select the episodes to store as demonstrations, and the stored demonstrations to replace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torchrl_lightning._core.return_threshold import reaches
from torchrl_lightning._core.state import Attribute, Stateful
from torchrl_lightning._core.validators import Checked, boolean, check_defaults, finite, optional
from torchrl_lightning.demonstrations.annealing import DemonstrationAnnealing, Schedule
from torchrl_lightning.demonstrations.demo_sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.demo_storage import DemonstrationStorage
from torchrl_lightning.demonstrations.serialization import lowest_as_none, none_as_lowest
from torchrl_lightning.demonstrations.trajectory import Demonstration


def check_threshold(value: Any, name: str) -> float | None:
    """Validate a reward threshold, which is a finite number or None."""
    try:
        return optional(finite)(value, name)
    except ValueError:
        raise ValueError(f"{name} must be a finite number or None, got {value!r}.") from None


class DemonstrationWriter(Stateful):
    """Add episodes to a :class:`DemonstrationStorage`.

    An agent's episode is a success and enters ``D_R`` if its return reaches the threshold. If the return exceeds all
    returns in ``D_R`` (beyond rounding errors), the episode replaces the agent's demonstrations in ``D_R``. All other
    episodes enter ``D_V``. Each success raises the threshold to the lowest return in ``D_R``. The threshold never
    falls. Each success also moves probability from ``D_V`` to ``D_R``, see :class:`DemonstrationAnnealing`.

    Above the capacity, the demonstration with the lowest value leaves ``D_V``. If ``D_V`` is empty, the agent's
    longest demonstration leaves ``D_R``. If two demonstrations are equal, the older one leaves. Human demonstrations
    always stay.

    This class is not a TorchRL writer. TorchRL writers choose the cells of rows; this class selects episodes.

    Args:
        storage: The storage to fill.
        reward_threshold: The lowest return of a success; ``0.0`` is a valid threshold. ``None`` uses the lowest return
            of the loaded demonstrations. Without loaded demonstrations, the first episode is a success.
        cut_after_reward: Cut an episode after its last positive reward. An episode without a positive reward stays
            complete.
        annealing: ``linear`` or ``current``, see :class:`DemonstrationAnnealing`.
        value_capacity: The capacity of ``D_V`` before the first success; ``None`` is the storage's capacity minus one.
        sampler: The sampler that draws from the storage. While its phi is 0, no value demonstration is stored.

    Attributes:
        threshold: The current lowest return of a success; ``-inf`` without a threshold.

    Raises:
        ValueError: The threshold is not finite, the value capacity is negative, the annealing is unknown, or a setting
            has no effect because no value demonstration is stored.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> def episode(*rewards: float, value: float = 0.0) -> Demonstration:
        ...     steps = TensorDict({"observation": torch.zeros(len(rewards), 2), "action": torch.zeros(len(rewards))})
        ...     steps["next", "reward"] = torch.tensor(rewards)[:, None]
        ...     return Demonstration(steps, value=value)
        >>> storage = DemonstrationStorage(capacity=3)
        >>> writer = DemonstrationWriter(storage, reward_threshold=1.0)
        >>> writer.add(episode(0.0, 1.0, 0.0)), writer.add(episode(0.0, value=0.5)), writer.add(episode(0.0))
        ('reward', 'value', None)
        >>> storage.reward_demonstrations[0].length, storage.annealed
        (2, 0.5)
    """

    OWNER, VERSION = "demonstration writer", 1
    STATE = {
        "threshold": Attribute(none_as_lowest, to_saved=lowest_as_none),
        "annealing": Attribute(attribute="annealing.schedule"),
        "value_capacity": Attribute(attribute="annealing.value_capacity"),
    }

    cut_after_reward = Checked(boolean)
    threshold = Checked("_check_threshold")

    def __init__(
        self,
        storage: DemonstrationStorage,
        *,
        reward_threshold: float | None = None,
        cut_after_reward: bool = True,
        annealing: Schedule = "linear",
        value_capacity: int | None = None,
        sampler: DemonstrationSampler | None = None,
    ) -> None:
        threshold = check_threshold(reward_threshold, "reward_threshold")
        self.storage, self.threshold, self._sampler = storage, -math.inf if threshold is None else threshold, sampler
        self.cut_after_reward = cut_after_reward
        initial_capacity = storage.capacity - 1 if value_capacity is None else value_capacity
        self.annealing = DemonstrationAnnealing(initial_capacity, annealing)
        schedule = {"annealing": (annealing, "linear")}
        if sampler is not None and not sampler.phi:
            requirement = "a sampler with phi above 0"
            check_defaults(
                f"without {requirement}", f"give {requirement}", **schedule, value_capacity=(value_capacity, None)
            )
        if not initial_capacity:  # if no value demonstration is stored, the schedule "current" never moves probability
            check_defaults("with value_capacity=0", "give a larger value_capacity (storage capacity)", **schedule)

    def _check_threshold(self, value: float, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not -math.inf <= value < math.inf:
            raise ValueError(
                f"{name} must be a number below infinity, got {value!r}. With -inf, every episode is a success."
            )
        return float(value)

    def load(self, demonstrations: Sequence[Demonstration]) -> None:
        """Add demonstrations to ``D_R`` without changing them or counting a success.

        Raises:
            ValueError: The demonstrations and the stored human demonstrations exceed the capacity. Nothing was changed.
        """
        num_human = self.storage.num_human
        if num_human + len(demonstrations) > self.storage.capacity:
            raise ValueError(
                f"{len(demonstrations)} new demonstrations and {num_human} stored human ones exceed the capacity "
                f"{self.storage.capacity}. Load fewer, or raise the capacity."
            )
        reward = [*self.storage.reward_demonstrations, *(demo.copied() for demo in demonstrations)]
        reward, value = self._within_capacity(reward, [*self.storage.value_demonstrations], self.storage.successes)
        self.storage.replace(reward, value)
        self._raise_threshold()

    def add(self, episode: Demonstration) -> Literal["reward", "value"] | None:
        """Add a copy of an agent's episode to the storage if the rules admit the episode.

        Returns:
            ``"reward"`` or ``"value"`` for the set that stores the episode, or None. A success counts even if the
            capacity rule drops the episode immediately.

        Raises:
            ValueError: The episode is a human demonstration; nothing was changed.
        """
        if episode.is_human:
            raise ValueError(
                f"Demonstration {episode.name!r} is a human demonstration. Store it with load() instead of add()."
            )
        if self.cut_after_reward and len(reward_steps := (episode.rewards > 0).nonzero()):
            episode = episode.truncate(int(reward_steps[-1]) + 1)
        episode = episode.with_value(value=episode.value, serial=None)  # a stored demonstration may be added again
        storage, episode_return = self.storage, episode.total_reward
        reward, value = [*storage.reward_demonstrations], [*storage.value_demonstrations]
        is_success = reaches(episode_return, self.threshold)
        if is_success:
            best = max((demo.total_reward for demo in reward), default=-math.inf)
            if not reaches(best, episode_return):
                reward = [demo for demo in reward if demo.is_human]
            reward.append(episode)
        else:
            value.append(episode)
        is_stored = self._store(reward, value, is_success, episode)
        return None if not is_stored else "reward" if is_success else "value"

    def anneal(self) -> None:
        """Move probability and drop value demonstrations, as if the agent had one more success."""
        self._store([*self.storage.reward_demonstrations], [*self.storage.value_demonstrations], is_success=True)

    def make_room(self) -> None:
        """Apply the capacity rule again, after the storage's capacity was lowered."""
        self._store([*self.storage.reward_demonstrations], [*self.storage.value_demonstrations], is_success=False)

    def _store(
        self,
        reward: list[Demonstration],
        value: list[Demonstration],
        is_success: bool,
        episode: Demonstration | None = None,
    ) -> bool:
        """Store the demonstrations within the capacity and count a success; return True if ``episode`` is stored."""
        storage = self.storage
        successes, annealed = storage.successes + is_success, storage.annealed
        reward, value = self._within_capacity(reward, value, successes)
        if is_success:
            annealed = self.annealing.moved(annealed, successes, len(value))
        is_stored = any(demo is episode for demo in (*reward, *value))
        reward = [demo.copied() if demo is episode else demo for demo in reward]
        value = [demo.copied() if demo is episode else demo for demo in value]
        storage.replace(reward, value, successes, annealed)
        if is_success:
            self._raise_threshold()
        return is_stored

    def refresh(self, demonstration: Demonstration, value: float) -> bool:
        """Set the value of a replayed demonstration to the critic's new largest estimate.

        Returns:
            True if the demonstration is still stored. Otherwise nothing changes.

        Raises:
            ValueError: ``value`` is NaN or infinity; nothing was changed.
        """
        serial, storage = demonstration.serial, self.storage
        if serial is None or (stored := storage.find(serial)) is None:
            return False
        updated = stored.with_value(value=value, serial=serial)
        storage.replace(
            [updated if demo.serial == serial else demo for demo in storage.reward_demonstrations],
            [updated if demo.serial == serial else demo for demo in storage.value_demonstrations],
        )
        return True

    def _within_capacity(
        self, reward: list[Demonstration], value: list[Demonstration], successes: int
    ) -> tuple[list[Demonstration], list[Demonstration]]:
        """Drop demonstrations above the capacity."""
        capacity, stores_values = self.storage.capacity, self._sampler is None or self._sampler.phi > 0
        value_capacity = self.annealing.remaining_capacity(successes) if stores_values else 0
        while value and len(value) > min(value_capacity, capacity - len(reward)):
            value.remove(min(value, key=lambda demo: demo.value))
        while len(reward) > capacity:
            reward.remove(max((demo for demo in reward if not demo.is_human), key=lambda demo: demo.length))
        return reward, value

    def _raise_threshold(self) -> None:
        returns = [demo.total_reward for demo in self.storage.reward_demonstrations]
        self.threshold = max(self.threshold, min(returns, default=-math.inf))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(threshold={self.threshold}, {self.annealing})"
