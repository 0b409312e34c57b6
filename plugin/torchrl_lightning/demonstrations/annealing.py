"""Move probability from value demonstrations to reward demonstrations with each success of the agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning._core.validators import integer, one_of

Schedule = Literal["linear", "current"]


@dataclass(frozen=True)
class DemonstrationAnnealing(ConfigSafe):
    """The schedule that moves probability from value demonstrations (phi) to reward demonstrations (rho).

    ``linear`` is the published schedule. Each success moves ``1 / value_capacity`` of phi, and lowers the capacity of
    ``D_V`` by one. After ``k`` successes, ``rho_k = rho_0 + k phi_0 / value_capacity`` and
    ``phi_k = phi_0 (1 - k / value_capacity)``.

    ``current`` is the schedule of PyTorchRL. Each success moves ``1 / |D_V|`` of phi, with the current size of
    ``D_V``, until ``D_V`` is empty. Phi then reaches 0 earlier, and only reward demonstrations take capacity from
    ``D_V``.

    Args:
        value_capacity: The capacity of ``D_V`` before the first success.
        schedule: ``linear`` or ``current``.

    Raises:
        ValueError: ``value_capacity`` is negative, or the schedule is unknown.

    Examples:
        >>> annealing, moved = DemonstrationAnnealing(50), 0.0
        >>> for successes in (1, 2, 3):
        ...     moved = annealing.moved(moved, successes, 50 - successes)
        >>> moved, annealing.remaining_capacity(3)
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
            before: The moved share before the last success.
            successes: The number of successes, including the last one.
            num_value: The number of value demonstrations after the last success.
        """
        if self.schedule == "linear":
            return min(1.0, successes / self.value_capacity) if self.value_capacity else 1.0
        moved = before + 1 / num_value if num_value else before
        return moved if moved < 1 - 1e-9 else 1.0  # the rounded sum of n terms of 1 / n can be less than 1

    def remaining_capacity(self, successes: int) -> int:
        """Return the capacity of ``D_V`` after a number of successes."""
        return max(0, self.value_capacity - successes) if self.schedule == "linear" else self.value_capacity
