"""Small data sets of Minari."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np


def write(name: str, observations: Sequence[Any], actions: Sequence[Any], ends: bool = True, **made_in: Any) -> Any:
    """Write a data set with one episode for each array of actions.

    The episodes terminate, or are truncated if ``ends`` is False.
    """
    import minari
    from minari.data_collector import EpisodeBuffer

    episodes = []
    for seen, taken in zip(observations, actions, strict=True):
        last, rewards = np.arange(len(taken)) == len(taken) - 1, np.linspace(0.1, 1.0, len(taken))
        flags = {"terminations": last & ends, "truncations": last & (not ends)}
        episodes.append(EpisodeBuffer(observations=seen, actions=taken, rewards=rewards, **flags, infos={}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as the warning about a missing author
        return minari.create_dataset_from_buffers(name, episodes, data_format="hdf5", **made_in)


def write_cart_poles(ends: bool = True) -> list[Any]:
    """Write ``cartpole/small-v0`` with episodes of three and two steps; return their observations."""
    seen = [np.random.default_rng(length).random((length + 1, 4), np.float32) for length in (3, 2)]
    write("cartpole/small-v0", seen, [np.array([0, 1, 1]), np.array([1, 0])], ends, env="CartPole-v1")
    return seen
