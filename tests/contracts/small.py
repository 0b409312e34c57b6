"""What keeps numbers: trees, scalers, moments, sums of episodes, the split of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from tensordict import TensorDict

from contracts.part import OBJECTS, Part
from kit.seeds import generator
from kit.states import GONE
from torchrl_lightning import (
    ExperienceBuffer,
    HoldoutSplit,
    IntrinsicRewardNormalizer,
    MaxSegmentTree,
    MinSegmentTree,
    RingStorage,
    StandardScaler,
    SumSegmentTree,
)
from torchrl_lightning.datamodules.episodes import FinishedEpisodes
from torchrl_lightning.datamodules.reward_scale import RewardScale
from torchrl_lightning.moments import Moments


def write_leaves(tree: Any, start: int) -> None:
    tree[[1, 4]] = [float(start + 1), 3.0]
    tree[2] = float(start)


def look(tree: Any) -> Any:
    return tree.summary(), tree.leaves, getattr(tree, "nnz", None)


def tree(kind: type) -> Part:
    return Part(
        make=lambda seed: kind(9),
        fill=write_leaves,
        ask=look,
        ways=OBJECTS,
        foreign={"capacity=9, this tree has capacity=5": partial(kind, 5)},
        edited={"a leaf must be .* got nan": (("leaves",), torch.tensor([1.0, math.nan], dtype=torch.float64))},
    )


def rewards(start: int, envs: int = 2) -> torch.Tensor:
    return torch.rand(5, envs, generator=generator(start))


def intrinsic(direction: str) -> Part:
    return Part(
        make=lambda seed: IntrinsicRewardNormalizer(0.9, direction),
        fill=lambda normalizer, start: normalizer.normalize(rewards(start)),
        ask=lambda normalizer: (normalizer.normalize(rewards(7)), normalizer.variance),
        ways=OBJECTS,
        usable=lambda normalizer: normalizer.variance,
        edited={"lacks count": (("count",), GONE)},
        foreign={
            r"gamma=0\.9, this normaliser has gamma=0\.99": partial(IntrinsicRewardNormalizer, 0.99, direction),
            f"direction='{direction}', this normaliser has direction=": partial(
                IntrinsicRewardNormalizer, 0.9, "backward" if direction == "forward" else "forward"
            ),
        },
    )


class Running:
    """Moments are values: this holds the last ones."""

    def __init__(self) -> None:
        self.moments = Moments.none(2)

    def state_dict(self) -> Any:
        return self.moments.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.moments = Moments.none(2).restored(state, "moments")

    def merge(self, start: int) -> None:
        self.moments = self.moments.merged(Moments.of(rewards(start).double()))


class RunningOfThree(Running):
    def load_state_dict(self, state: Any) -> None:
        Moments.none(3).restored(state, "moments")


@cache
def ring(steps: int) -> ExperienceBuffer:
    made = ExperienceBuffer(storage=RingStorage(60), num_envs=1)
    made.extend(TensorDict({"a": torch.zeros(steps, 1)}, [steps, 1]), time_dim=0)
    return made


def add_episodes(episodes: FinishedEpisodes, start: int) -> None:
    done = torch.arange(start, start + 10).view(2, 5, 1) % 4 == 3
    episodes.add(torch.ones(2, 5, 1) * start, done)
    episodes.summary()


def end_episodes(episodes: FinishedEpisodes) -> Any:
    episodes.add(torch.ones(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.bool))
    return episodes.summary()


def note_rewards(scale: RewardScale, start: int) -> None:
    done = torch.arange(start, start + 10).view(2, 5, 1) % 4 == 3
    scale.note(torch.ones(2, 5, 1) * start, done, None)


def reduce_rewards(scale: RewardScale) -> Any:
    scale.note(torch.ones(2, 1, 1), torch.zeros(2, 1, 1, dtype=torch.bool), None)
    moments = scale.reduced()
    return moments.count, moments.mean, moments.variance


SMALL = {
    **{kind.__name__: tree(kind) for kind in (SumSegmentTree, MaxSegmentTree, MinSegmentTree)},
    "IntrinsicRewardNormalizer": intrinsic("forward"),
    "IntrinsicRewardNormalizer, backward": intrinsic("backward"),
    "StandardScaler": Part(
        make=lambda seed: StandardScaler("ab"),
        fill=lambda scaler, start: scaler.fit(rewards(start)),
        ask=lambda scaler: (scaler(rewards(7)), scaler.count),
        ways=OBJECTS,
        ours=False,  # a module of torch
    ),
    "Moments": Part(
        make=lambda seed: Running(),
        fill=Running.merge,
        ask=lambda running: running.moments.variance,
        ways=OBJECTS,
        foreign={r"expected a tensor \[3\]": RunningOfThree},
    ),
    "HoldoutSplit": Part(
        make=lambda seed: HoldoutSplit(0.3, 15, seed=seed),
        fill=lambda split, start: split.extend(ring(20 + start).writer),
        ask=lambda split: split.parts(torch.arange(20)),
        ways=OBJECTS,
        foreign={
            "The state has validation_fraction=0.3": partial(HoldoutSplit, 0.4, 15),
            "The state has max_validation=15": partial(HoldoutSplit, 0.3, 16),
        },
        edited={"split state is foreign": (("held",), torch.tensor([99]))},
    ),
    "FinishedEpisodes": Part(
        make=lambda seed: FinishedEpisodes(2),
        fill=add_episodes,
        ask=end_episodes,
        ways=OBJECTS,
    ),
    "RewardScale": Part(
        make=lambda seed: RewardScale(10.0),
        fill=note_rewards,
        ask=reduce_rewards,
        ways=OBJECTS,
    ),
}

SUM = SMALL["SumSegmentTree"]
SMALL["SumSegmentTree"] = replace(
    SUM,
    foreign={**SUM.foreign, "op='sum', this tree has op='min'": partial(MinSegmentTree, 9)},
    edited={**SUM.edited, "got -1": (("leaves",), torch.tensor([1.0, -1.0], dtype=torch.float64))},
)
