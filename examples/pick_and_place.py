"""Scripted expert for FetchPickAndPlace: pick the block up and move it to the goal.

cd examples && torchrl-lightning-record policy=pick_and_place:act env=robotics data.env.id=FetchPickAndPlace-v4
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

GAIN = 10.0  # full speed at distances above 0.1 m
OPEN, CLOSE = 1.0, -1.0
NEAR, ABOVE = 0.01, 0.05  # m
HELD = 0.055  # m between the fingers; the block is 0.05 m wide


def act(observation: dict[str, Array]) -> Array:
    """Return the motion of the hand and of its fingers, each in [-1, 1]."""
    state, goal = observation["observation"], observation["desired_goal"]
    hand, block, fingers = state[:3], state[3:6], state[9:11].sum()
    away = block - hand
    if fingers < HELD and np.linalg.norm(away) < 2 * NEAR:
        return _action(goal - block, CLOSE)
    if np.linalg.norm(away) < NEAR:  # the block is between the fingers
        return _action(np.zeros(3), CLOSE)
    if np.linalg.norm(away[:2]) > NEAR:  # the block is not yet below the hand
        return _action(away + np.array([0.0, 0.0, ABOVE]), OPEN)
    return _action(away, OPEN)


def _action(way: Array, fingers: float) -> Array:
    return np.append(np.clip(GAIN * way, -1.0, 1.0), fingers).astype(np.float32)
