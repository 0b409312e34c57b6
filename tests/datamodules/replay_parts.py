"""The names of the kit by which other rooms know it."""

from __future__ import annotations

from kit.replay import dqn, fit, replay_data  # noqa: F401
