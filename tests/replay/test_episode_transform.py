"""Transforms that read their buffer's storage find it themselves."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_lightning import ExperienceBuffer, RingStorage, RingWriter
from torchrl_lightning.replay.episode_transform import EpisodeTransform


class Ends(EpisodeTransform):
    """Add the number of remaining steps of the episode."""

    def forward(self, tensordict):
        env, position = self.episodes.steps_of(self.cells_of(tensordict).numpy())
        left = self.episodes.steps_to_end(torch.from_numpy(env), torch.from_numpy(position))
        return tensordict.set("left", left.unsqueeze(-1))


def episode(length: int) -> TensorDict:
    done = torch.arange(length).unsqueeze(-1) == length - 1
    return TensorDict({"next": {"done": done, "reward": torch.zeros(length, 1)}}, [length])


def is_right(buffer: ExperienceBuffer) -> bool:
    batch = buffer.sample(20)
    return torch.equal(batch["left"].squeeze(-1), len(buffer) - 1 - batch["index"])


def built(transform) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(10), transform=transform)


WAYS = {
    "alone": built,
    "in a chain": lambda transform: built(Compose(lambda batch: batch, Compose(transform))),
    "appended": lambda transform: built(None).append_transform(transform),
    "inserted": lambda transform: built(lambda batch: batch).insert_transform(0, transform),
}


@pytest.mark.parametrize("way", WAYS)
def test_transform_is_bound_by_every_way_into_a_buffer(way):
    buffer = WAYS[way](Ends())
    buffer.extend(episode(7))
    assert is_right(buffer)


def test_copies_of_a_buffer_read_their_own_storage():
    buffer = built(Ends())
    buffer.extend(episode(3))
    for copied in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        copied.extend(episode(3)[:0])
        copied.empty()
        copied.extend(episode(6))
        assert is_right(copied)
    assert is_right(buffer)


def test_transform_reads_a_replaced_storage():
    buffer = built(Ends())
    buffer.set_storage(RingStorage(5))
    buffer.set_writer(RingWriter())
    buffer.extend(episode(4))
    assert is_right(buffer)


def test_transform_belongs_to_one_buffer():
    transform = Ends()
    first, second = built(transform), built(None)
    with pytest.raises(ValueError, match=r"Ends.*another buffer.*clone\(\)"):
        second.append_transform(Compose(Ends(), transform))
    assert not second.transforms
    second.append_transform(transform.clone())
    for buffer, length in ((first, 3), (second, 5)):
        buffer.extend(episode(length))
        assert is_right(buffer)


def test_transform_without_buffer_or_episodes_raises_an_error():
    batch = episode(2).set("index", torch.arange(2))
    with pytest.raises(ValueError, match=r"Ends.*ExperienceBuffer"):
        Ends()(batch)
    theirs = TensorDictReplayBuffer(storage=RingStorage(4), writer=RingWriter(), transform=Ends(), batch_size=2)
    theirs.extend(episode(2))
    with pytest.raises(ValueError, match="ExperienceBuffer"):
        theirs.sample()
    buffer = built(transform := Ends())
    buffer.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(ValueError, match="episode index"):
        buffer.sample(2)
    buffer = built(transform.clone())
    buffer.extend(episode(2))
    with pytest.raises(KeyError, match="'index'"):
        buffer.transform(episode(2))
