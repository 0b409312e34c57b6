"""What goes through the pipe of a copy in a process of its own comes out as it went in."""

from __future__ import annotations

from multiprocessing import Pipe

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from torchrl_lightning.environments.workers.worker_env import StepPipe

SPACES = [
    spaces.Discrete(3, start=1),
    spaces.Box(-1, 1, (2, 2), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiBinary(3),
    spaces.Dict(a=spaces.Discrete(2)),
]
RESULTS = [
    ((None, 1.5, True, False, {}), True),
    ((None, np.float32(2), np.True_, np.False_, {"final_obs": np.arange(3), "final_info": {"t": 1}}), True),
    ((None, 3, 0, 1, {}), True),
    ((None, "none", False, False, {}), True),  # the one who waits tells what is wrong with it
    (("an observation", 1.0, False, False, {}), True),
    (None, False),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_pipe_sends_steps_and_other_messages(space) -> None:
    ours, theirs = (StepPipe(end, space) for end in Pipe())
    space.seed(0)
    for action in iterate(batch_space(space, 3), batch_space(space, 3).sample()):
        ours.send(("step", action))
        kind, received = theirs.recv()
        assert kind == "step"
        assert type(received) is (np.ndarray if isinstance(space, spaces.Box) else type(action))
        np.testing.assert_equal(received, action)
        assert getattr(received, "dtype", None) == getattr(action, "dtype", None)
        for result in RESULTS:
            theirs.send(result)
            np.testing.assert_equal(ours.recv(), result)
    for message in (("reset", {"seed": 3}), ("_call", ("render", (), {})), ("close", None)):
        ours.send(message)
        assert theirs.recv() == message
        theirs.send((("observation", {}), True))
        assert ours.recv() == (("observation", {}), True)
    theirs.close()
    assert ours.poll()
    with pytest.raises(EOFError):
        ours.recv()
