"""Store reward demonstrations, and the demonstrations with the highest estimated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, number
from torchrl_lightning._core.validators import integer
from torchrl_lightning.demonstrations.serialization import from_states, states_of
from torchrl_lightning.demonstrations.trajectory import Demonstration


class DemonstrationStorage(Stateful):
    """Store complete trajectories of any length: ``D_R``, the reward demonstrations, and ``D_V``, the value ones.

    It is not a TorchRL storage: demonstrations do not have cell numbers. :class:`DemonstrationWriter` fills it and
    decides which demonstration replaces another. :class:`DemonstrationSampler` draws from it.

    Args:
        capacity: The maximum number of demonstrations of both kinds together.

    Attributes:
        reward_demonstrations: ``D_R``, human demonstrations first, then in order of arrival.
        value_demonstrations: ``D_V``, in order of arrival.
        successes: The number of the agent's episodes that were admitted to ``D_R``.
        annealed: The share of the probability of ``D_V`` that has moved to ``D_R``, see
            :class:`DemonstrationAnnealing`.

    Raises:
        ValueError: ``capacity`` is not positive.

    Examples:
        >>> storage = DemonstrationStorage(capacity=51)
        >>> len(storage), storage.reward_demonstrations, storage.annealed
        (0, (), 0.0)
    """

    OWNER, VERSION = "demonstration storage", 1
    STATE = {
        "capacity": Attribute(),
        "successes": Attribute(bounded_integer()),
        "annealed": Attribute(number(0, 1)),
        "next_serial": Attribute(bounded_integer(), "_next_serial"),
        "reward": Attribute(from_states, "reward_demonstrations", states_of),
        "value": Attribute(from_states, "value_demonstrations", states_of),
    }

    def __init__(self, capacity: int = 51) -> None:
        self.capacity = integer(capacity, "capacity")
        self.reward_demonstrations: tuple[Demonstration, ...] = ()
        self.value_demonstrations: tuple[Demonstration, ...] = ()
        self.successes = 0
        self.annealed = 0.0
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self.reward_demonstrations) + len(self.value_demonstrations)

    @property
    def num_human(self) -> int:
        """The number of human demonstrations, which come first in ``D_R``."""
        return sum(demonstration.is_human for demonstration in self.reward_demonstrations)

    def find(self, serial: int) -> Demonstration | None:
        """Return the demonstration with this serial number; None if it was dropped."""
        kept = (*self.reward_demonstrations, *self.value_demonstrations)
        return next((demonstration for demonstration in kept if demonstration.serial == serial), None)

    def replace(
        self,
        reward: Sequence[Demonstration],
        value: Sequence[Demonstration],
        successes: int | None = None,
        annealed: float | None = None,
    ) -> None:
        """Replace the content in one step, and number the demonstrations without a serial number.

        Args:
            reward: ``D_R``; human demonstrations move to its front.
            value: ``D_V``.
            successes: The number of successes; None keeps the present number.
            annealed: The moved share of probability; None keeps the present share.

        Raises:
            ValueError: There are more demonstrations than ``capacity``.
        """
        if len(reward) + len(value) > self.capacity:
            raise ValueError(f"There are {len(reward) + len(value)} demonstrations, {self.capacity} have a place.")
        reward = [*(each for each in reward if each.is_human), *(each for each in reward if not each.is_human)]
        self.reward_demonstrations = tuple(map(self._numbered, reward))
        self.value_demonstrations = tuple(map(self._numbered, value))
        self.successes = self.successes if successes is None else successes
        self.annealed = self.annealed if annealed is None else annealed

    def _numbered(self, demonstration: Demonstration) -> Demonstration:
        if demonstration.serial is not None:
            return demonstration
        self._next_serial += 1
        return demonstration.with_value(value=demonstration.value, serial=self._next_serial - 1)

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        reward, value, last = values["reward"], values["value"], values["next_serial"]
        serials = [each.serial for each in (*reward, *value)]
        if len(serials) > self.capacity or len({*serials}) < len(serials) or any(each >= last for each in serials):
            raise ValueError(
                f"The {self.OWNER} state holds demonstrations with the serial numbers {serials}; expected at "
                f"most {self.capacity} different ones below {last}."
            )
        human = [each.is_human for each in reward]
        if human != sorted(human, reverse=True) or any(each.is_human for each in value):
            raise ValueError(f"The {self.OWNER} state is foreign: human ones come first among 'reward'.")

    def __repr__(self) -> str:
        kept = f"{len(self.reward_demonstrations)} by reward, {len(self.value_demonstrations)} by value"
        return f"{type(self).__name__}(capacity={self.capacity}: {kept})"
