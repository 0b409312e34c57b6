"""Other names for entries of a Dict observation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from torchrl_lightning.keys import RESERVED

WITHIN = (
    "Rename it within the environment, as torchrl.envs.GymWrapper(EnvironmentRecipe(id, rename=...)()) does for one of "
    "Gymnasium's, or take that without TorchRL's wrapper."
)


class RenameObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Show entries of a Dict observation under other names.

    Args:
        env: an environment with a Dict observation.
        names: the new name of each entry that gets one.

    Raises:
        ValueError: the observation is no Dict, an entry is not there, or two would have one name.

    Example:
        >>> from gymnasium.wrappers import TimeAwareObservation
        >>> timed = TimeAwareObservation(gym.make("CartPole-v1"), flatten=False)
        >>> list(RenameObservation(timed, {"time": "clock"}).observation_space)
        ['clock', 'obs']
    """

    def __init__(self, env: gym.Env[Any, Any], names: Mapping[str, str]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"rename={dict(names)} names entries of a Dict, but the environment observes {space}.")
        self._names = new_names(space.spaces, names)
        self.observation_space = spaces.Dict({self._names[name]: entry for name, entry in space.spaces.items()})

    def observation(self, observation: Any) -> Any:
        """Return the same entries under their names."""
        return {new: observation[name] for name, new in self._names.items()}


def check_rename(rename: Any) -> dict[str, str]:
    """Return the new names of entries, if they can be such: different, and none that a run keeps for itself."""
    pairs = list(rename.items()) if isinstance(rename, Mapping) else None
    if pairs is None or not all(isinstance(each, str) and each for pair in pairs for each in pair):
        raise TypeError(f"rename={rename!r} must give entries other names, such as {{reward: last_reward}}.")
    if taken := sorted(RESERVED.intersection(new for _, new in pairs)):
        raise ValueError(
            f"rename={rename} takes {', '.join(map(repr, taken))}, which a run keeps for itself; take another."
        )
    new_names([name for name, _ in pairs], rename)
    return dict(pairs)


def new_names(shown: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the name that each entry is shown under; a ValueError if one is not there, or two have one name."""
    shown = list(shown)
    if missing := [name for name in rename if name not in shown]:
        raise ValueError(
            f"rename={dict(rename)} names {missing}, which are not there; the environment observes {sorted(shown)}."
        )
    names = {name: rename.get(name, name) for name in shown}
    if twice := sorted({new for new in names.values() if list(names.values()).count(new) > 1}):
        raise ValueError(
            f"rename={dict(rename)} gives two entries the name {', '.join(map(repr, twice))}; give each one of its own."
        )
    return names
