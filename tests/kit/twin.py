"""All steps that were ever written to rings, as plain lists. Everything else is computed by searching them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict


def reward(env: int, position: int) -> float:
    """Return the reward of a step."""
    return 1.0 + env + position / 16


class Twin:
    """A slow buffer: one list of steps for each environment.

    Args:
        num_envs: The number of environments.
        length: The number of stored steps for each environment.
    """

    def __init__(self, num_envs: int, length: int) -> None:
        self.length = length
        self.done: list[list[bool]] = [[] for _ in range(num_envs)]
        self.begins: list[set[int]] = [{0} for _ in range(num_envs)]

    def rows(self, envs: list[int], flags: list[list[Any]]) -> TensorDict:
        """Build steps ``[T, M]`` from their flags, and store the flags.

        A flag is True if the step ends its episode. A pair adds a flag that is True if the step begins an episode.
        Without this flag, a step begins an episode if the previous step ended one.
        """
        steps = []
        for row in flags:
            for env, flag in zip(envs, row, strict=True):
                position = len(self.done[env])
                done, init = flag if isinstance(flag, tuple) else (flag, position in self.begins[env])
                self.done[env].append(done)
                self.begins[env] |= ({position} if init else set()) | ({position + 1} if done else set())
                steps.append((env, position, reward(env, position), done, init))
        env, position, paid, done, init = torch.tensor(steps, dtype=torch.float64).T.reshape(5, len(flags), len(envs))
        state = (env * 1000 + position).float()[..., None, None]
        begins = init.bool().unsqueeze(-1)
        following = {
            "position": position.long(),
            "reward": paid.float().unsqueeze(-1),
            "done": done.bool().unsqueeze(-1),
            "recurrent_state": state + 1,
        }
        columns = {"env": env.long(), "position": position.long(), "is_init": begins, "next": following}
        return TensorDict({**columns, "recurrent_state": state.masked_fill(begins.unsqueeze(-1), 0)}, list(env.shape))

    def cut(self, envs: list[int]) -> None:
        """Let the next steps begin episodes."""
        for env in envs:
            self.begins[env].add(len(self.done[env]))

    def stored(self) -> list[tuple[int, int]]:
        """Return environment and position of each step that is not overwritten yet."""
        ends = [(env, len(steps)) for env, steps in enumerate(self.done)]
        return [(env, position) for env, end in ends for position in range(max(0, end - self.length), end)]

    def begin(self, env: int, position: int) -> int:
        """Return the first position of the episode."""
        return max(begin for begin in self.begins[env] if begin <= position)

    def end(self, env: int, position: int) -> int:
        """Return the last position of the episode so far."""
        return min([begin for begin in self.begins[env] if begin > position] + [len(self.done[env])]) - 1

    def windows(self, batch_length: int, burn_in: int, episode_ends: str) -> dict[tuple[int, int], int]:
        """Return each step at which a window may begin, with the number of its stored steps."""
        found = {}
        for env, position in self.stored():
            last = len(self.done[env]) - 1 if episode_ends == "across" else self.end(env, position)
            count = min(batch_length, last - position + 1)
            if count == batch_length or (episode_ends == "pad" and count > burn_in):
                found[env, position] = count
        return found

    def check(self, batch: TensorDict, batch_length: int, burn_in: int, episode_ends: str) -> None:
        """Check that the batch contains only valid windows."""
        windows = self.windows(batch_length, burn_in, episode_ends)
        assert batch["mask"].shape == batch.shape
        columns = [batch[key].tolist() for key in ("env", "position", "mask")]
        for env, position, mask in zip(*columns, strict=True):
            count = windows[env[0], position[0]]
            assert set(env) == {env[0]}
            assert all(b - a == 1 for a, b in pairwise(position[:count]))
            assert set(position[count:]) <= {position[count - 1]}
            assert mask == [burn_in <= t < count for t in range(batch_length)]
        check_states(batch, across=episode_ends == "across")


def check_states(batch: TensorDict, *, across: bool) -> None:
    """Check that a module can unroll the windows from the recurrent states, and check the successors' states."""
    own = (batch["env"] * 1000 + batch["position"]).float()
    entries = batch["recurrent_state"], batch["next", "recurrent_state"], own, batch["is_init"]
    for state, successor, own, begins in zip(*(entry.flatten(1).tolist() for entry in entries), strict=True):
        expected, expected_next = (0.0 if begins[0] else own[0]), own[0] + 1
        for t in range(len(own)):
            restarts = begins[t] and across
            assert state[t] == (0.0 if restarts else expected)
            assert successor[t] == (own[t] + 1 if restarts else expected_next)
