"""Where demonstrations are kept: those that reached a reward, and those that the critic thinks highest of."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_lightning.checks import check_tree
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.entries import to_tensordict
from torchrl_lightning.ranges import integer, optional
from torchrl_lightning.state import check_state, flag, mapping, number, same, sequence, whole, wrong

STATE_VERSION = 1


class DemonstrationStorage:
    """Whole trajectories of any length and content: ``D_R``, the reward demonstrations, and ``D_V``, the value ones.

    It is no TorchRL storage: those are written and read by the number of a cell, while here a demonstration has no
    cell of its own, and which one gives way to another is the rule of :class:`DemonstrationWriter`, which fills it.
    :class:`DemonstrationSampler` draws from it.

    Args:
        capacity: The number of demonstrations of both kinds together.

    Attributes:
        reward_demonstrations: ``D_R``, human ones first, else in the order of their arrival.
        value_demonstrations: ``D_V``, in the order of their arrival.
        successes: The number of episodes of the agent that were admitted to ``D_R``.
        annealed: The share of the probability of ``D_V`` that has moved to ``D_R``, see
            :class:`DemonstrationAnnealing`.

    Raises:
        ValueError: ``capacity`` is not positive.

    Example:
        >>> storage = DemonstrationStorage(capacity=51)
        >>> len(storage), storage.reward_demonstrations, storage.annealed
        (0, (), 0.0)
    """

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
        """Return the demonstration with this serial number, None if it is not kept any more."""
        kept = (*self.reward_demonstrations, *self.value_demonstrations)
        return next((demonstration for demonstration in kept if demonstration.serial == serial), None)

    def replace(
        self,
        reward: Sequence[Demonstration],
        value: Sequence[Demonstration],
        successes: int | None = None,
        annealed: float | None = None,
    ) -> None:
        """Take over other contents at once; those that have no serial number get one.

        Args:
            reward: ``D_R``; human ones move to its front.
            value: ``D_V``.
            successes: The number of successes; None leaves it.
            annealed: The share that has moved; None leaves it.

        Raises:
            ValueError: There are more than ``capacity``.
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
        return demonstration.labelled(value=demonstration.value, serial=self._next_serial - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything: tensors and scalars only."""
        return {
            "schema_version": STATE_VERSION,
            "capacity": self.capacity,
            "successes": self.successes,
            "annealed": self.annealed,
            "next_serial": self._next_serial,
            "reward": [state_of(each) for each in self.reward_demonstrations],
            "value": [state_of(each) for each in self.value_demonstrations],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly, copying it.

        Raises:
            ValueError: Another version or capacity, or an entry that no state has.
        """
        reward, value = self._checked(state_dict)
        self.reward_demonstrations, self.value_demonstrations = reward, value
        self.successes, self.annealed = state_dict["successes"], float(state_dict["annealed"])
        self._next_serial = state_dict["next_serial"]

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        self._checked(state_dict)

    def _checked(self, state: Mapping[str, Any]) -> tuple[tuple[Demonstration, ...], tuple[Demonstration, ...]]:
        schema = {
            "capacity": same(self.capacity, "demonstration storage"),
            "successes": whole(),
            "annealed": number(0),
            "next_serial": whole(),
            "reward": sequence,
            "value": sequence,
        }
        check_state(state, schema, "demonstration storage", STATE_VERSION)
        if state["annealed"] > 1:
            raise ValueError(f"The demonstration storage state has annealed={state['annealed']}, expected at most 1.")
        reward, value = (tuple(map(from_state, state[name])) for name in ("reward", "value"))
        serials = [each.serial for each in (*reward, *value)]
        last = state["next_serial"]
        if len(serials) > self.capacity or len({*serials}) < len(serials) or any(each >= last for each in serials):
            raise ValueError(
                f"The demonstration storage state holds demonstrations with the serial numbers {serials}; expected at "
                f"most {self.capacity} different ones below {last}."
            )
        human = [each.is_human for each in reward]
        if human != sorted(human, reverse=True) or any(each.is_human for each in value):
            raise ValueError("The demonstration storage state is foreign: human ones come first among 'reward'.")
        return reward, value

    def __repr__(self) -> str:
        kept = f"{len(self.reward_demonstrations)} by reward, {len(self.value_demonstrations)} by value"
        return f"{type(self).__name__}(capacity={self.capacity}: {kept})"


def state_of(demonstration: Demonstration) -> dict[str, Any]:
    """Return a copy of a demonstration: tensors and scalars only."""
    last = demonstration.last_observation
    return {
        "steps": demonstration.steps.clone().to_dict(),
        "last_observation": None if last is None else last.clone().to_dict(),
        "is_human": demonstration.is_human,
        "value": demonstration.value,
        "frame_skip": demonstration.frame_skip,
        "terminated": demonstration.terminated,
        "truncated": demonstration.truncated,
        "name": demonstration.name,
        "metadata": dict(demonstration.metadata),
        "serial": demonstration.serial,
    }


def from_state(state: Any) -> Demonstration:
    """Return the demonstration of a state, copying it; a ValueError if it is none."""
    owner = "demonstration"
    schema = {
        "steps": mapping,
        "last_observation": optional(mapping),
        "is_human": flag,
        "value": _real,
        "frame_skip": whole(1),
        "terminated": optional(flag),
        "truncated": optional(flag),
        "name": _text,
        "metadata": mapping,
        "serial": whole(),
    }
    mapping(state, owner)
    state = {"terminated": None, "truncated": None, **state}  # earlier ones do not say how it ended
    check_state(state, schema, owner)
    fields = {name: state[name] for name in schema}
    fields["metadata"] = copy.deepcopy(dict(fields["metadata"]))
    for name in ("steps", "last_observation"):
        if fields[name] is not None:
            check_tree(fields[name], torch.Size([]), owner)
            fields[name] = _copied(fields[name])
    return Demonstration(**fields)


def _copied(tree: dict[str, Any]) -> TensorDictBase:
    return to_tensordict(tree, torch.Size([])).clone()


def _real(value: Any, name: str) -> None:
    if type(value) is not float or not value < float("inf"):
        raise wrong(value, name, "a number below infinity")


def _text(value: Any, name: str) -> None:
    if type(value) is not str:
        raise wrong(value, name, "a string")
