from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tensordict import TensorDict
from torchrl.modules import GRUModule, set_recurrent_mode

from kit.rings import ring, starts_of
from kit.rows import episodes
from kit.seeds import generator
from kit.twin import Twin
from torchrl_lightning import ExperienceBuffer, SequenceSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes"),
    pytest.mark.filterwarnings("ignore:Loading the storage on an uninitialized TensorDict"),
]
ENDS = ("inside", "across", "pad")


def make_buffer(
    num_envs: int, length: int, batch_size: int = 8, data: TensorDict | None = None, **options: Any
) -> ExperienceBuffer:
    return ring(length, num_envs, SequenceSampler(**options), data=data, batch_size=batch_size)


writes = st.lists(
    st.tuples(st.sets(st.integers(0, 2), min_size=1), st.integers(1, 9), st.integers(0, 2**30), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(
    writes,
    st.integers(1, 6),
    st.sampled_from(ENDS),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_windows_match_the_reference(
    writes: list[Any], batch_length: int, episode_ends: str, burn_in: int, rate: float
) -> None:
    burn_in = min(burn_in, batch_length - 1)
    rule = {"batch_length": batch_length, "episode_ends": episode_ends, "burn_in": burn_in}
    twin, buffer = Twin(3, 7), make_buffer(3, 7, **rule)
    for envs, steps, seed, restore in writes:
        ids = sorted(envs)
        dones = torch.rand(steps, len(ids), generator=generator(seed)) < rate
        buffer.extend(twin.rows(ids, dones.tolist()), env_ids=torch.tensor(ids), time_dim=0)
        if not twin.windows(**rule):
            with pytest.raises(ValueError, match="batch_length"):
                buffer.sample()
            continue
        twin.check(buffer.sample(), **rule)
        if restore:
            old, buffer = buffer, make_buffer(3, 7, **rule)
            buffer.load_state_dict(old.state_dict())
            assert (buffer.sample() == old.sample()).all()
    if starts := twin.windows(**rule):
        batch = buffer.sample(60 * len(starts))
        drawn = set(starts_of(batch))
        assert drawn == set(starts)


def uneven(**options: Any) -> tuple[Twin, ExperienceBuffer]:
    """Return a twin and a buffer with three rings that are wrapped, unaligned and unevenly filled."""
    twin, buffer = Twin(3, 20), make_buffer(3, 20, **options)
    seeded = generator(1)
    for ids, steps in (([0, 1, 2], 9), ([0, 2], 17), ([1], 3), ([0], 4)):
        dones = (torch.rand(steps, len(ids), generator=seeded) < 0.2).tolist()
        buffer.extend(twin.rows(ids, dones), env_ids=torch.tensor(ids), time_dim=0)
    return twin, buffer


@pytest.mark.parametrize("episode_ends", ENDS)
@pytest.mark.parametrize("aligned", [True, False])
def test_starts_are_equally_likely(episode_ends: str, aligned: bool) -> None:
    options = {"batch_length": 3, "episode_ends": episode_ends, "burn_in": 1}
    twin, buffer = uneven(**options)
    if aligned:
        twin, buffer = Twin(3, 20), make_buffer(3, 20, **options)
        dones = torch.rand(33, 3, generator=generator(2)) < 0.2
        buffer.extend(twin.rows([0, 1, 2], dones.tolist()), time_dim=0)
    batch = buffer.sample(20_000)
    counts = Counter(starts_of(batch))
    assert set(counts) == set(twin.windows(**options))
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_rare_starts_are_found_with_few_rejections() -> None:
    buffer = make_buffer(1, 100_000, batch_length=64, data=episodes([10] * 5000 + [70] + [10] * 4000))
    batch = buffer.sample(700)
    starts = batch["step"][:, 0].unique(return_counts=True)
    assert starts[0].tolist() == list(range(50_000, 50_007))
    assert chisquare(starts[1].tolist()).pvalue > 1e-3
    other = make_buffer(1, 100_000, batch_length=64)
    other.load_state_dict(buffer.state_dict())
    assert (other.sample() == buffer.sample()).all()
    buffer.extend(episodes([64]))
    assert set(buffer.sample(200)["step"][:, 0].tolist()) == {0, *range(50_000, 50_007)}


@pytest.mark.parametrize("episode_ends", ENDS)
def test_windows_may_change_their_length_between_samples(episode_ends: str) -> None:
    buffer = make_buffer(1, 100, batch_length=2, episode_ends=episode_ends)
    buffer.extend(episodes([3] * 20))  # few starts fit a longer window, so the sampler lists the starts
    with pytest.raises(ValueError, match="No window fits") if episode_ends == "inside" else nullcontext():
        buffer.sampler.sample(buffer.storage, 50, 4)
    for length in (3, 2, 3):
        other = make_buffer(1, 100, batch_length=length, episode_ends=episode_ends)
        other.load_state_dict(buffer.state_dict())
        for _ in range(3):
            drawn = buffer.sampler.sample(buffer.storage, 50, length)[0]
            assert drawn.equal(other.sample(50)["index"])


def test_batches_are_windows_with_dimension_names() -> None:
    buffer = make_buffer(2, 10, batch_length=4, batch_size=5)
    buffer.extend(Twin(2, 10).rows([0, 1], [[False, False]] * 8), time_dim=0)
    batch = buffer.sample()
    assert batch.shape == (5, 4)
    assert batch.names == batch["next"].names == [None, "time"]
    assert batch["index"].dtype == torch.int64
    assert batch["index"].tolist() == (batch["position"] * 2 + batch["env"]).tolist()
    assert (buffer.storage.get(batch["index"])["position"] == batch["position"]).all()
    assert buffer.sample(3).shape == (3, 4)


def test_gru_over_a_window_repeats_its_single_steps() -> None:
    gru = GRUModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "recurrent_state"],
        out_keys=["out", ("next", "recurrent_state")],
    )
    done = (torch.arange(30) % 7 == 6).unsqueeze(-1)
    init = torch.cat([torch.ones(1, 1, dtype=torch.bool), done[:-1]])
    state, rows = torch.zeros(1, 1, 4), []
    with torch.no_grad():
        for t in range(30):
            row = TensorDict(
                {"observation": torch.randn(1, 3), "recurrent_state": state, "is_init": init[t : t + 1]}, [1]
            )
            row = gru(row)
            row["recurrent_state"] = state
            row["next", "done"] = done[t : t + 1]
            state = row["next", "recurrent_state"]
            rows.append(row)
    buffer = make_buffer(1, 40, batch_length=9, episode_ends="across", batch_size=16)
    buffer.extend(torch.cat(rows))
    batch = buffer.sample()
    assert batch["is_init"][:, 1:].any()
    with torch.no_grad(), set_recurrent_mode(True):
        again = gru(batch.select("observation", "recurrent_state", "is_init"))
    torch.testing.assert_close(again["out"], batch["out"])


def test_nested_states_under_other_keys() -> None:
    buffer = make_buffer(1, 10, batch_length=3, recurrent_keys=[("agent", "memory")])
    memory = {"h": torch.arange(6.0).view(6, 1), "c": torch.arange(6.0, 12.0).view(6, 1)}
    buffer.extend(episodes([6], agent={"memory": memory}))
    batch = buffer.sample()
    first = batch["step"][:, :1].expand(8, 3).float()
    assert (batch["agent", "memory", "h"].squeeze(-1) == first).all()
    assert (batch["agent", "memory", "c"].squeeze(-1) == first + 6).all()
    assert batch["agent"].names == [None, "time"]


@pytest.mark.parametrize("episode_ends", ["inside", "across", "pad"])
def test_windows_can_begin_with_zero_states(episode_ends: str) -> None:
    data = episodes([6, 4], recurrent_state=torch.ones(10, 2), is_init=torch.arange(10).view(10, 1) % 6 == 0)
    data["next", "recurrent_state"] = torch.full((10, 2), 2.0)
    buffer = make_buffer(1, 20, batch_length=3, episode_ends=episode_ends, start_states="zero", data=data)
    batch = buffer.sample(50)
    assert batch["recurrent_state"].shape == batch["next", "recurrent_state"].shape == (50, 3, 2)
    assert not batch["recurrent_state"].any()
    assert not batch["next", "recurrent_state"].any()
    assert (buffer[:]["recurrent_state"] == 1).all()  # the stored states do not change


def test_emptied_buffer_samples_new_windows() -> None:
    buffer = make_buffer(1, 10, batch_length=4, data=episodes([9]))
    buffer.sample()
    buffer.empty()
    with pytest.raises(RuntimeError, match="0 steps are stored"):
        buffer.sample()
    buffer.extend(episodes([5]))
    assert set(buffer.sample(50)["step"][:, 0].tolist()) == {0, 1}


def test_windows_longer_than_all_episodes_raise_an_error() -> None:
    buffer = make_buffer(1, 20, batch_length=8, data=episodes([5, 7, 3]))
    with pytest.raises(ValueError, match=r"episode has 7 steps.* 8 \(batch_length"):
        buffer.sample()
    buffer = make_buffer(1, 20, batch_length=30, episode_ends="across", data=episodes([5, 7, 3]))
    with pytest.raises(ValueError, match=r"has 15 steps.* 30 \(batch_length"):
        buffer.sample()
    buffer = make_buffer(1, 20, batch_length=30, episode_ends="pad", data=episodes([5, 7, 3]))
    assert buffer.sample()["mask"].sum(1).max() <= 7


def test_unknown_episode_ends_raise_an_error() -> None:
    buffer = make_buffer(1, 10, batch_length=2, data=episodes([6]).exclude(("next", "done")))
    with pytest.raises(ValueError, match="episode_ends"):
        buffer.sample()
    buffer = make_buffer(1, 10, batch_length=2, episode_ends="across", data=episodes([6]).exclude(("next", "done")))
    assert buffer.sample().shape == (8, 2)


@pytest.mark.parametrize("episode_ends", ENDS)
def test_window_states_come_from_first_steps_and_are_zero_at_episode_begins(episode_ends: str) -> None:
    states = torch.arange(1.0, 61.0).view(10, 2, 3)
    begins = torch.arange(10).view(10, 1) % 6 == 0
    data = episodes([6, 4], recurrent_state=states, is_init=begins)
    buffer = make_buffer(1, 20, batch_length=3, episode_ends=episode_ends, data=data)
    batch = buffer.sample(50)
    first = batch["step"][:, 0]
    expected = states[first].masked_fill(begins[first].unsqueeze(-1), 0.0)
    assert begins[first].any()
    assert (~begins[first]).any()
    assert torch.equal(batch["recurrent_state"][:, 0], expected)
