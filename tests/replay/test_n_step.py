"""N-step returns computed on read equal plain lists and TorchRL's transform, also on TorchRL's sampling paths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import RandomSampler, SliceSampler
from torchrl.envs import MultiStepTransform, RewardScaling

from kit.rings import ring
from kit.seeds import generator
from kit.twin import Twin, reward
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from torchrl_lightning.replay.n_step import NStepReturns

GAMMA = 0.5


def rollout(envs: int, steps: int, dtype: torch.dtype = torch.float32) -> TensorDict:
    seeded = generator(envs * 100 + steps)
    number = torch.arange(envs).unsqueeze(1) * 100.0 + torch.arange(steps)
    terminated = torch.rand(envs, steps, 1, generator=seeded) < 0.2
    truncated = (torch.rand(envs, steps, 1, generator=seeded) < 0.15) & ~terminated
    following = {
        "observation": number.unsqueeze(-1) + 0.5,
        "deep": {"state": number.unsqueeze(-1).expand(-1, -1, 3) + 0.25},
        "reward": torch.rand(envs, steps, 1, generator=seeded).to(dtype),
        "done": terminated | truncated,
        "terminated": terminated,
        "truncated": truncated,
    }
    return TensorDict({"number": number, "next": following}, [envs, steps], names=[None, "time"])


def buffer(envs: int, n: int = 3, length: int = 40, sampler=None, **kwargs) -> ExperienceBuffer:
    return ring(length, envs, sampler or UniformSampler(), n_steps=n, gamma=GAMMA, **{"batch_size": 16, **kwargs})


def check(batch: TensorDict, data: TensorDict, n: int = 3) -> None:
    """Compare rows or windows with returns that are summed step by step over the whole rollout."""
    _, length = data.shape
    flat = batch.reshape(-1)
    assert len(flat)
    for row in range(len(flat)):
        env, step = divmod(int(flat["number"][row]), 100)
        total, k = 0.0, 0
        while True:
            total += GAMMA**k * float(data["next", "reward"][env, step + k])
            k += 1
            if k == n or data["next", "done"][env, step + k - 1] or step + k == length:
                break
        last = data["next"][env, step + k - 1]
        assert float(flat["next", "reward"][row]) == pytest.approx(total, rel=1e-3)
        assert int(flat["steps_to_next_obs"][row]) == k
        assert float(flat["gamma"][row]) == GAMMA**k
        for key in ("observation", ("deep", "state"), "done", "terminated", "truncated"):
            assert torch.equal(flat["next"][row][key], last[key])


def fold(twin: Twin, env: int, position: int, n: int) -> tuple[float, int]:
    """Return the n-step return of a step and the number of its steps."""
    count = min(n, twin.end(env, position) - position + 1)
    return sum(GAMMA**k * reward(env, position + k) for k in range(count)), count


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_returns_match_a_plain_sum(data: st.DataObject) -> None:
    """Compare every stored cell with a sum over plain lists, for both implementations of the fold.

    The random data contain uneven rings, ends, cuts without an end flag, overwritten first steps and wrapped rings.
    """
    envs, length, n = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7)), data.draw(st.integers(1, 5))
    ours, twin = buffer(envs, max(2, n), length), Twin(envs, length)
    returns = NStepReturns(ours.n_steps, ours.gamma)
    for _ in range(data.draw(st.integers(1, 6))):
        who = data.draw(st.permutations(range(envs)))[: data.draw(st.integers(1, envs))]
        pair = st.tuples(st.sampled_from([False] * 4 + [True]), st.sampled_from([False] * 5 + [True]))
        flags = data.draw(st.lists(st.lists(pair, min_size=len(who), max_size=len(who)), min_size=1, max_size=9))
        ids = torch.tensor(who)
        ours.extend(twin.rows(who, flags), env_ids=ids, time_dim=0)
        if data.draw(st.booleans()):
            twin.cut(who)
            ours.writer.cut(ids)
    cells = ours.writer.rings.filled_cells()
    storage, index = ours.storage, ours.writer.index
    read = returns.gather(storage.cells, index, cells, None, ())
    stored = storage.tree["next"]["reward"]
    for fast, slow in zip(returns.fold(index, stored, cells), returns.fold_by_steps(index, stored, cells), strict=True):
        assert torch.allclose(fast, slow)
    for row, (env, position) in enumerate(zip(read["env"].tolist(), read["position"].tolist(), strict=True)):
        total, k = fold(twin, env, position, returns.n_steps)
        assert float(read["next"]["reward"][row]) == pytest.approx(total)
        assert (int(read["steps_to_next_obs"][row]), float(read["gamma"][row])) == (k, GAMMA**k)
        assert int(read["next"]["position"][row]) == position + k - 1


@pytest.mark.parametrize("n", [2, 4])
def test_returns_match_torchrl_on_complete_episodes(n: int) -> None:
    """MultiStepTransform withholds the last steps until their successors arrive, so only the others are compared."""
    data, ours = rollout(3, 30), buffer(3, n, batch_size=500)
    data["next", "done"][:, -1] = data["next", "truncated"][:, -1] = True
    data["next", "terminated"][:, -1] = False
    ours.extend(data)
    theirs = MultiStepTransform(n, GAMMA, done_keys=["done", "truncated"]).inv(data.copy())
    batch = ours.sample()
    env, step = torch.tensor([divmod(int(number), 100) for number in batch["number"]]).unbind(-1)
    known = step < theirs.shape[1]
    expected = theirs[env[known], step[known]]
    assert batch["steps_to_next_obs"].dtype == expected["steps_to_next_obs"].dtype
    for key in (("next", "reward"), ("next", "observation"), ("next", "terminated"), "steps_to_next_obs", "gamma"):
        assert torch.allclose(batch[key][known].float(), expected[key].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    "sampler",
    [
        UniformSampler,
        RandomSampler,
        lambda: PrioritizedSampler(120, 0.7, 0.5),
        lambda: SequenceSampler(4),
        lambda: SequenceSampler(5, episode_ends="across"),
        lambda: SequenceSampler(5, episode_ends="pad", burn_in=1),
    ],
)
def test_returns_work_with_all_samplers(sampler, dtype: torch.dtype) -> None:
    data, ours = rollout(3, 30, dtype), buffer(3, sampler=sampler())
    ours.extend(data)
    batch = ours.sample()
    assert batch["next", "reward"].dtype == dtype
    check(batch, data)


def test_returns_work_on_torchrls_sampling_path() -> None:
    """Sample through a transform, with a prefetching thread, and with a slice sampler, which truncates its slices."""
    data = rollout(1, 30)
    ours = buffer(1, prefetch=2, transform=RewardScaling(0.0, 1.0, in_keys=[("next", "reward")]), data=data)
    check(ours.sample(), data)
    check(ours.sample(return_info=True)[0], data)
    torch.manual_seed(0)  # Seeded, because not every draw of four slices contains the end of an episode.
    sliced = buffer(1, sampler=SliceSampler(num_slices=4, end_key=("next", "done"), strict_length=False), data=data)
    batch = sliced.sample()
    assert batch["next", "terminated"].any()
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    for row in batch:
        step, k = int(row["number"]), int(row["steps_to_next_obs"])
        assert row["next", "terminated"] == data["next", "terminated"][0, step + k - 1]


def test_storage_has_only_single_steps() -> None:
    data, ours = rollout(2, 12), buffer(2)
    ours.extend(data)
    ours.sample()
    stored = ours[:].reshape(-1, 2).transpose(0, 1)
    assert torch.equal(stored["next", "reward"], data["next", "reward"])
    assert "gamma" not in stored
    ours.empty()
    ours.extend(data[:, :2])
    check(ours.sample(), data[:, :2])


def test_returns_of_newest_steps_grow_with_new_steps() -> None:
    """A return covers the steps stored so far, so a later read covers more steps. The priority does not change."""
    data = rollout(1, 4)
    data["next", "done"][:] = data["next", "terminated"][:] = data["next", "truncated"][:] = False
    ours = buffer(1, sampler=PrioritizedSampler(40, 0.7, 0.5))
    for step, most in pairwise((0, 1, 2, 3, 4)):
        ours.extend(data[0, step:most])
        check(ours.sample(), data[:, :most])


def test_write_back_writes_entries_of_the_first_step() -> None:
    data, ours = rollout(1, 12), buffer(1)
    ours.extend(data)
    batch = ours.sample()
    batch["number"] += 1
    assert len(ours.write_back(batch, ["number"]))


def test_recurrent_states_are_read_from_first_and_last_step() -> None:
    data = rollout(1, 12)
    data["next", "done"][:] = data["next", "terminated"][:] = data["next", "truncated"][:] = False
    data["recurrent_state"] = data["number"].unsqueeze(-1)
    data["next", "recurrent_state"] = data["number"].unsqueeze(-1) + 1
    ours = buffer(1, sampler=SequenceSampler(3), data=data)
    for batch in (ours.sample(), ours.sample(return_info=True)[0]):
        assert (batch["recurrent_state"][..., 0] == batch["number"][:, :1]).all()
        ahead = batch["number"] + batch["steps_to_next_obs"]
        assert torch.equal(batch["next", "recurrent_state"][..., 0], ahead)


def test_data_without_flags_or_rewards_raise_an_error() -> None:
    ours, data = buffer(1), rollout(1, 3)[0]
    with pytest.raises(KeyError, match="needs the entry"):
        ours.extend(data.exclude(("next", "done")))
    assert not len(ours)
    ours.extend(data.exclude(("next", "reward")))
    with pytest.raises(KeyError, match=r"n_steps=3.*\('next', 'reward'\)"):
        ours.sample()
    blind = buffer(1, writer=RingWriter(track_episodes=False), data=data)
    with pytest.raises(ValueError, match="n_steps=3"):
        blind.sample()


def test_multi_step_transform_is_applied_on_write() -> None:
    data = rollout(2, 12)
    ours = ExperienceBuffer(storage=RingStorage(40), num_envs=2, batch_size=8)
    ours.append_transform(MultiStepTransform(n_steps=3, gamma=GAMMA))
    assert not len(ours.extend(data[:, :2]))
    assert len(ours.extend(data[:, 2:])) == 2 * 9
    theirs = MultiStepTransform(n_steps=3, gamma=GAMMA).inv(data.copy())
    stored = ours[:].reshape(-1, 2).transpose(0, 1)
    for key in ("number", ("next", "reward"), ("next", "observation"), "gamma"):
        assert np.allclose(stored[key], theirs[key])
