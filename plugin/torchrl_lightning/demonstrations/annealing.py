"""How the agent's successes move probability from value demonstrations to reward demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrl_lightning.ranges import integer, one_of
from torchrl_lightning.trust import Nameable

Schedule = Literal["linear", "current"]


@dataclass(frozen=True)
class DemonstrationAnnealing(Nameable):
    """How much of phi, the probability of value demonstrations, has moved to rho, that of reward demonstrations.

    ``linear``, as published: each success moves ``1 / value_capacity`` of it, and value demonstrations lose one place:
    ``rho_k = rho_0 + k phi_0 / value_capacity``, ``phi_k = phi_0 (1 - k / value_capacity)``. ``current``, as in
    PyTorchRL: each success moves ``1 / |D_V|`` of it, of the value demonstrations that are kept at that moment, while
    there are any; phi is gone earlier, and they lose no place but those that reward demonstrations take.

    Args:
        value_capacity: The number of places of value demonstrations before the first success.
        schedule: ``linear`` or ``current``.

    Raises:
        ValueError: ``value_capacity`` is negative, or there is no such schedule.

    Examples:
        >>> annealing, moved = DemonstrationAnnealing(50), 0.0
        >>> for successes in (1, 2, 3):
        ...     moved = annealing.moved(moved, successes, 50 - successes)
        >>> moved, annealing.places(3)
        (0.06, 47)
    """

    value_capacity: int
    schedule: Schedule = "linear"

    def __post_init__(self) -> None:
        integer(self.value_capacity, "value_capacity", 0)
        one_of(self.schedule, "annealing", get_args(Schedule))

    def moved(self, before: float, successes: int, num_value: int) -> float:
        """Return the share of phi that has moved to rho, in ``[0, 1]``.

        Args:
            before: The share before the last success.
            successes: The number of successes, the last one included.
            num_value: The number of value demonstrations that are left after it.
        """
        if self.schedule == "linear":
            return min(1.0, successes / self.value_capacity) if self.value_capacity else 1.0
        moved = before + 1 / num_value if num_value else before
        return moved if moved < 1 - 1e-9 else 1.0  # a sum of n terms 1 / n may miss 1 by rounding

    def places(self, successes: int) -> int:
        """Return how many value demonstrations may be kept after so many successes."""
        return max(0, self.value_capacity - successes) if self.schedule == "linear" else self.value_capacity
