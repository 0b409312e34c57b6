"""An edited state is refused before anything changes, or it is one that the buffer can go on from."""

from __future__ import annotations

from mutations import check_mutants
from torchrl_lightning import RecurrentReplayBuffer


def test_veloras_buffer_takes_a_state_wholly_or_not_at_all() -> None:
    one, other = (RecurrentReplayBuffer(4, 2, 1, 3) for _ in range(2))
    for ours, value in ((one, 1.0), (other, 2.0)):
        for _ in range(3):
            ours.add([value, value], [value], value, [value, value], False, [value] * 3)
    check_mutants(other, one.state_dict(), lambda ours: ours.sample(2), ("storage",))
