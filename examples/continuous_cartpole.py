"""CartPole-v1 with a continuous force as action, for planners and continuous actors.

Run, in the folder that contains `examples`: torchrl-lightning-train experiment=pets_cartpole_continuous
With another agent: torchrl-lightning-train '~experiment' data=uniform model=sac
    data.env=examples.continuous_cartpole:ContinuousCartPole-v0 data.total_frames=10000
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MOST_POSITION, MOST_ANGLE = 2.4, math.radians(12)


class ContinuousCartPole(gymnasium.Env):
    """Balance a pole on a cart. An action in [-1, 1] pushes the cart with -10 to 10 newtons.

    Observation, reward and termination are the same as in CartPole-v1. The observation is position, velocity, angle
    and angular velocity, and the reward is 1 per step. The episode terminates when the cart is more than 2.4 from the
    middle or the pole is more than 12 degrees from upright.
    """

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        high = np.array([2 * MOST_POSITION, np.inf, 2 * MOST_ANGLE, np.inf], np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high, dtype=np.float32)
        self.state = (0.0, 0.0, 0.0, 0.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.state = tuple(self.np_random.uniform(-0.05, 0.05, 4).tolist())
        return np.array(self.state, np.float32), {}

    def step(self, action: np.ndarray):
        x, speed, angle, turning = self.state
        force = FORCE * min(1.0, max(-1.0, float(action[0])))
        cosine, sine, mass = math.cos(angle), math.sin(angle), CART + POLE
        push = (force + POLE * HALF_LENGTH * turning**2 * sine) / mass
        turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
        pull = push - POLE * HALF_LENGTH * turn * cosine / mass
        x, speed = x + SECONDS * speed, speed + SECONDS * pull
        angle, turning = angle + SECONDS * turning, turning + SECONDS * turn
        self.state = (x, speed, angle, turning)
        fallen = abs(x) > MOST_POSITION or abs(angle) > MOST_ANGLE
        return np.array(self.state, np.float32), 1.0, fallen, False, {}


gymnasium.register("ContinuousCartPole-v0", ContinuousCartPole, max_episode_steps=500)
