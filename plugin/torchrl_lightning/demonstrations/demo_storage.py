"""Store reward demonstrations, and the demonstrations with the highest estimated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, number
from torchrl_lightning._core.validators import integer
from torchrl_lightning.demonstrations.serialization import from_states, to_states
from torchrl_lightning.demonstrations.trajectory import Demonstration


class DemonstrationStorage(Stateful):
    """Store complete trajectories of any length as reward demonstrations ``D_R`` and value demonstrations ``D_V``.

    This class is not a TorchRL storage, because demonstrations do not have cell numbers. :class:`DemonstrationWriter`
    fills it and selects the demonstrations to replace. :class:`DemonstrationSampler` draws from it.

    Args:
        capacity: The maximum number of demonstrations of both kinds together.

    Attributes:
        reward_demonstrations: ``D_R``: first the human demonstrations, then all others in order of arrival.
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
        "reward": Attribute(from_states, "reward_demonstrations", to_states),
        "value": Attribute(from_states, "value_demonstrations", to_states),
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
        return sum(demo.is_human for demo in self.reward_demonstrations)

    def find(self, serial: int) -> Demonstration | None:
        """Return the demonstration with this serial number, or None if it was dropped."""
        demos = (*self.reward_demonstrations, *self.value_demonstrations)
        return next((demo for demo in demos if demo.serial == serial), None)

    def replace(
        self,
        reward: Sequence[Demonstration],
        value: Sequence[Demonstration],
        successes: int | None = None,
        annealed: float | None = None,
    ) -> None:
        """Replace the content in one step, and assign missing serial numbers.

        Args:
            reward: The new ``D_R``. Human demonstrations move to its front.
            value: The new ``D_V``.
            successes: The number of successes. None keeps the current number.
            annealed: The new value of ``annealed``. None keeps the current value.

        Raises:
            ValueError: There are more demonstrations than ``capacity``.
        """
        if len(reward) + len(value) > self.capacity:
            raise ValueError(
                f"The number of demonstrations must be at most the capacity {self.capacity}, got "
                f"{len(reward) + len(value)}. Store fewer, or raise the capacity."
            )
        reward = [*(demo for demo in reward if demo.is_human), *(demo for demo in reward if not demo.is_human)]
        self.reward_demonstrations = tuple(map(self._with_serial, reward))
        self.value_demonstrations = tuple(map(self._with_serial, value))
        self.successes = self.successes if successes is None else successes
        self.annealed = self.annealed if annealed is None else annealed

    def _with_serial(self, demonstration: Demonstration) -> Demonstration:
        if demonstration.serial is not None:
            return demonstration
        self._next_serial += 1
        return demonstration.with_value(value=demonstration.value, serial=self._next_serial - 1)

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        reward, value, next_serial = values["reward"], values["value"], values["next_serial"]
        serials = [demo.serial for demo in (*reward, *value)]
        if (
            len(serials) > self.capacity
            or len({*serials}) < len(serials)
            or any(serial >= next_serial for serial in serials)
        ):
            raise ValueError(
                f"The {self.OWNER} state must have at most {self.capacity} different serial numbers below "
                f"{next_serial}, got {serials}."
            )
        is_human = [demo.is_human for demo in reward]
        if is_human != sorted(is_human, reverse=True) or any(demo.is_human for demo in value):
            raise ValueError(
                f"The {self.OWNER} state is damaged: human demonstrations must come first in 'reward', and cannot be "
                "in 'value'."
            )

    def __repr__(self) -> str:
        sizes = f"{len(self.reward_demonstrations)} by reward, {len(self.value_demonstrations)} by value"
        return f"{type(self).__name__}(capacity={self.capacity}: {sizes})"
