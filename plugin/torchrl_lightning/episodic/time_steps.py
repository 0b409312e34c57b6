"""Read rewards, flags and observations from the rows of an episodic buffer: our transitions or ALF's time steps.

==========================  =======================================  =========================================
item                        a row is a transition (our keys)         a row is a time step (ALF's layout)
==========================  =======================================  =========================================
an episode begins           ``is_init``                              ``step_type`` is FIRST
an episode ends             ``("next", "done")``                     ``step_type`` is LAST
a termination               ``("next", "terminated")``               ``discount`` is zero
reward of the action of t   ``("next", "reward")`` of row t          ``reward`` of row t + 1
observation after action t  ``("next", "observation")`` of row t     ``observation`` of row t + 1
rows of n actions           n                                        n + 1: the LAST row has no action
==========================  =======================================  =========================================

So a time step holds the reward of the transition *into* it, and a window of two time steps is one transition. An
episode is truncated if it ends without a termination (a LAST step with a nonzero discount).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import DONE, IS_INIT, REWARD, STEP_TYPE, TERMINATED
from torchrl_lightning._core.trust import ConfigSafe
from torchrl_lightning.replay.episode_index import reduce_flags
from torchrl_lightning.replay.positions import Flags
from torchrl_lightning.replay.ring_writer import RingWriter

FIRST, MID, LAST = 0, 1, 2


@dataclass(frozen=True)
class StepLayout(ConfigSafe):
    """Keys of the row entries; the default is a transition with our keys.

    Attributes:
        reward: key of the reward.
        done: key of the flag for the end of an episode; ``step_type`` for time steps.
        init: key of the flag for the beginning of an episode; ``step_type`` for time steps.
        terminated: key of the termination flag. Time steps use ``discount``, which is zero at a termination.
        time_steps: True if a row is a time step and holds the reward of the transition into it.
    """

    reward: NestedKey = REWARD
    done: NestedKey = DONE
    init: NestedKey = IS_INIT
    terminated: NestedKey = TERMINATED
    time_steps: bool = False

    def terminates(self, value: Tensor, done_reduce: str | None = None) -> Flags:
        """Return the termination flags ``[n]`` from the rows' entry ``terminated``; see :class:`RingWriter`."""
        return reduce_flags(value == 0 if self.time_steps else value, 1, done_reduce)[0]

    def writer(
        self,
        num_envs: int,
        track_episodes: bool | None,
        overwrite: bool = True,
        done_reduce: str | None = None,
        check_successors: bool = True,
    ) -> RingWriter:
        """Build a writer for rows with this layout."""
        writer_class = TimeStepWriter if self.time_steps else RingWriter
        return writer_class(
            num_envs, track_episodes=track_episodes, done_key=self.done, init_key=self.init, overwrite=overwrite,
            done_reduce=done_reduce, check_successors=check_successors,
        )  # fmt: skip


TRANSITIONS = StepLayout()
TIME_STEPS = StepLayout(REWARD[-1], STEP_TYPE, STEP_TYPE, "discount", time_steps=True)


class TimeStepWriter(RingWriter):
    """Writer of time steps; their ``step_type`` is both ``done_key`` and ``init_key``."""

    def done_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of the rows that end an episode, ``[steps, M]``."""
        return super().done_flags(value == LAST, steps)

    def init_flags(self, value: Tensor, steps: int) -> Flags:
        """Return a mask of the rows that begin an episode, ``[steps, M]``."""
        return super().init_flags(value == FIRST, steps)
