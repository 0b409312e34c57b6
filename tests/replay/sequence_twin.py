"""A slow buffer of plain lists that says which windows there are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict


def episodes(lengths: list[int], **entries: Any) -> TensorDict:
    """One stream of whole episodes."""
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths]).unsqueeze(-1)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    data = {"step": torch.arange(len(done)), "episode": ids, "next": {"done": done}, **entries}
    return TensorDict(data, [len(done)])


class Twin:
    """Stored steps of every environment, oldest first: (position, episode)."""

    def __init__(self, num_envs: int, length: int) -> None:
        self.length = length
        self.stored: list[list[tuple[int, int]]] = [[] for _ in range(num_envs)]
        self.next = [0] * num_envs
        self.episode = [0] * num_envs

    def rows(self, envs: list[int], dones: list[list[bool]]) -> TensorDict:
        """Return the steps ``[T, M]`` that these flags make, and remember them."""
        steps: list[list[tuple[int, int, int, bool, bool]]] = []
        for flags in dones:
            row = []
            for env, done in zip(envs, flags, strict=True):
                first = not self.stored[env] or self.stored[env][-1][1] != self.episode[env]
                row.append((env, self.next[env], self.episode[env], done, first))
                self.stored[env].append((self.next[env], self.episode[env]))
                self.stored[env] = self.stored[env][-self.length :]
                self.next[env] += 1
                self.episode[env] += done
            steps.append(row)
        env, position, episode, done, first = torch.tensor(steps).unbind(-1)
        state = (env * 1000 + position).float()[..., None, None]
        return TensorDict(
            {
                "env": env,
                "position": position,
                "episode": episode,
                "is_init": first.bool().unsqueeze(-1),
                "recurrent_state": state.masked_fill(first.bool()[..., None, None], 0.0),
                "next": {"done": done.bool().unsqueeze(-1), "recurrent_state": state + 1},
            },
            list(position.shape),
        )

    def starts(self, batch_length: int, burn_in: int, episode_ends: str) -> dict[tuple[int, int], int]:
        """Return every admissible beginning, with how many stored steps its window has."""
        found = {}
        for env, steps in enumerate(self.stored):
            for i, (position, episode) in enumerate(steps):
                window = steps[i : i + batch_length]
                if episode_ends != "across":
                    window = [step for step in window if step[1] == episode]
                if len(window) == batch_length or (episode_ends == "pad" and len(window) > burn_in):
                    found[env, position] = len(window)
        return found

    def check(self, batch: TensorDict, batch_length: int, burn_in: int, episode_ends: str) -> None:
        """Refuse a batch with a window that there is not."""
        starts = self.starts(batch_length, burn_in, episode_ends)
        assert batch["mask"].shape == batch.shape
        columns = [batch[key].tolist() for key in ("env", "position", "mask")]
        for env, position, mask in zip(*columns, strict=True):
            count = starts[env[0], position[0]]
            assert set(env) == {env[0]}
            assert all(b - a == 1 for a, b in pairwise(position[:count]))
            assert set(position[count:]) <= {position[count - 1]}
            assert mask == [burn_in <= t < count for t in range(batch_length)]
        check_states(batch, across=episode_ends == "across")


def check_states(batch: TensorDict, *, across: bool) -> None:
    """Refuse recurrent states from which a module could not unroll the windows, and their successors."""
    own = (batch["env"] * 1000 + batch["position"]).float()
    entries = batch["recurrent_state"], batch["next", "recurrent_state"], own, batch["is_init"]
    for state, successor, own, begins in zip(*(entry.flatten(1).tolist() for entry in entries), strict=True):
        _check_window(state, successor, own, begins, across=across)


def _check_window(
    state: list[float], successor: list[float], own: list[float], begins: list[bool], *, across: bool
) -> None:
    expected, expected_next = (0.0 if begins[0] else own[0]), own[0] + 1
    for t in range(len(own)):
        assert state[t] == (0.0 if begins[t] and across else expected)
        assert successor[t] == (own[t] + 1 if begins[t] and across else expected_next)
