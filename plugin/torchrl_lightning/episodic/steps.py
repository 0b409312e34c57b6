"""How the rows of an episodic buffer are read: the one place where ALF's time steps meet our transitions.

==========================  =======================================  =========================================
what                        a row is a transition (our keys)         a row is a time step (ALF's layout)
==========================  =======================================  =========================================
an episode begins           ``is_init``                              ``step_type`` is FIRST
an episode ends             ``("next", "done")``                     ``step_type`` is LAST
nothing comes after         ``("next", "terminated")``               ``discount`` is zero
reward of the action of t   ``("next", "reward")`` of row t          ``reward`` of row t + 1
its successor               ``("next", "observation")`` of row t     ``observation`` of row t + 1
rows of n actions           n                                        n + 1: the LAST one has no action
==========================  =======================================  =========================================

So a time step carries the reward of the transition *into* it, and a window of two time steps is one transition. An
episode that ends without being terminated (a LAST step whose discount is not zero) was truncated.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.keys import DONE, IS_INIT, REWARD, STEP_TYPE, TERMINATED
from torchrl_lightning.replay.episode_index import flag_of
from torchrl_lightning.replay.steps import Flags
from torchrl_lightning.replay.writer import RingWriter
from torchrl_lightning.trust import Nameable

FIRST, MID, LAST = 0, 1, 2


@dataclass(frozen=True)
class StepLayout(Nameable):
    """Under which keys rows say what; by default a row is a transition with our keys.

    Attributes:
        reward: the reward.
        done: the flag of the end of an episode; of time steps, the ``step_type``.
        init: the flag of its beginning; of time steps, the ``step_type``.
        terminated: the flag that nothing comes after; of time steps, the ``discount``, which is zero there.
        time_steps: whether a row is a time step, with the reward of the transition into it.
    """

    reward: NestedKey = REWARD
    done: NestedKey = DONE
    init: NestedKey = IS_INIT
    terminated: NestedKey = TERMINATED
    time_steps: bool = False

    def terminates(self, value: Tensor, done_reduce: str | None = None) -> Flags:
        """Return from the entry ``terminated`` of rows which of them are, ``[n]``; see :class:`RingWriter`."""
        return flag_of(value == 0 if self.time_steps else value, 1, done_reduce)[0]

    def writer(
        self,
        num_envs: int,
        track_episodes: bool | None,
        overwrite: bool = True,
        done_reduce: str | None = None,
        check_successors: bool = True,
    ) -> RingWriter:
        """Build the writer whose index follows such rows."""
        kind = TimeStepWriter if self.time_steps else RingWriter
        return kind(
            num_envs, track_episodes=track_episodes, done_key=self.done, init_key=self.init, overwrite=overwrite,
            done_reduce=done_reduce, check_successors=check_successors,
        )  # fmt: skip


TRANSITIONS = StepLayout()
TIME_STEPS = StepLayout(REWARD[-1], STEP_TYPE, STEP_TYPE, "discount", time_steps=True)


class TimeStepWriter(RingWriter):
    """Writer of time steps, whose ``step_type`` (both ``done_key`` and ``init_key``) begins and ends episodes."""

    def done_flags(self, value: Tensor, steps: int) -> Flags:
        """Return which rows end an episode, ``[steps, M]``."""
        return super().done_flags(value == LAST, steps)

    def init_flags(self, value: Tensor, steps: int) -> Flags:
        """Return which rows begin an episode, ``[steps, M]``."""
        return super().init_flags(value == FIRST, steps)
