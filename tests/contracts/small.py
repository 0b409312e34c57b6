"""What keeps numbers: trees, scalers, moments, sums of episodes, the split of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from operator import methodcaller
from typing import Any

import torch
from tensordict import TensorDict

from contracts.part import Part, Refusal, Unfiled
from kit.seeds import generator
from kit.specs import TWO_CHOICES
from kit.states import GONE
from torchrl_lightning import (
    ExperienceBuffer,
    HoldoutSplit,
    IntrinsicRewardNormalizer,
    MaxSegmentTree,
    MinSegmentTree,
    MLPNetwork,
    RandomNetworkDistillation,
    RingStorage,
    StandardScaler,
    SumSegmentTree,
)
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.datamodules._run.episode_statistics import FinishedEpisodes
from torchrl_lightning.datamodules._run.reward_scale import RewardScale


def write_leaves(tree: Any, start: int) -> None:
    tree[[1, 4]] = [float(start + 1), 3.0]
    tree[2] = float(start)


def look(tree: Any) -> Any:
    return tree.summary(), tree.leaves, getattr(tree, "nnz", None)


def put(index: Any, *values: float) -> Callable[[Any], None]:
    """Write leaves of a tree; one value for all of them."""
    return lambda tree: tree.__setitem__(index, values if len(values) > 1 else values[0])


NO_INDEX = ("a", None, ..., [0.5], [True])

LEAVES = (
    Refusal("leaf", put([0, 2], 3.0, math.nan)),
    *(
        Refusal(
            f"{index}.*9",
            put([0, index], 9.0),
            lambda tree, index=index: tree[[0, index]],
            error=IndexError,
        )
        for index in (-1, 9)
    ),
    Refusal("2 indices and 3 values", put([0, 1], 1.0, 2.0, 3.0)),
    Refusal(
        "indices",
        *(put(index, 1.0) for index in NO_INDEX),
        *(lambda tree, index=index: tree[index] for index in NO_INDEX),
        error=TypeError,
    ),
    Refusal("got 10 leaves, but the capacity is 9", lambda tree: tree.set_all(torch.ones(10))),
)


def tree(kind: type, **settings: Any) -> Part:
    return Unfiled(
        make=lambda seed: kind(9, **settings),
        fill=write_leaves,
        ask=look,
        foreign={"capacity=9, this tree has capacity=5": partial(kind, 5)},
        refuses=LEAVES,
        edited={"a leaf must be .* got nan": (("leaves",), torch.tensor([1.0, math.nan], dtype=torch.float64))},
    )


def sum_tree(**settings: Any) -> Part:
    made = tree(SumSegmentTree, **settings)
    wrong = "(SumSegmentTree|priorities): a leaf must be finite and not negative"
    return made.but(
        foreign={**made.foreign, "op='sum', this tree has op='min'": partial(MinSegmentTree, 9)},
        edited={**made.edited, "got -1": (("leaves",), torch.tensor([1.0, -1.0], dtype=torch.float64))},
        refuses=(*LEAVES, Refusal(wrong, put([0, 2], 3.0, -1.0), put([0, 2], 3.0, math.inf))),
    )


def rewards(start: int, envs: int = 2) -> torch.Tensor:
    return torch.rand(5, envs, generator=generator(start))


POISONED = rewards(1).index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(math.nan))
normalize = partial(methodcaller, "normalize")
NORMALIZER_REFUSES = (
    Refusal(r"got 1 others, the first at \[3, 1\]", normalize(POISONED)),
    Refusal(r"reward must be \[T, N, ...\]", normalize(rewards(1)[:0])),
    Refusal(r"torch\.int64", normalize(rewards(1).long()), error=TypeError),
)
OTHER_ENVIRONMENTS = Refusal(r"\(2,\) after time, got \(3,\)", normalize(rewards(1, 3)))


def intrinsic(direction: str) -> Part:
    return Unfiled(
        make=lambda seed: IntrinsicRewardNormalizer(0.9, direction),
        fill=lambda normalizer, start: normalizer.normalize(rewards(start)),
        ask=lambda normalizer: (normalizer.normalize(rewards(7)), normalizer.variance),
        usable=lambda normalizer: normalizer.variance,
        refuses=(*NORMALIZER_REFUSES, OTHER_ENVIRONMENTS)[: None if direction == "forward" else -1],
        edited={"lacks count": (("count",), GONE)},
        foreign={
            r"gamma=0\.9, this normaliser has gamma=0\.99": partial(IntrinsicRewardNormalizer, 0.99, direction),
            f"direction='{direction}', this normaliser has direction=": partial(
                IntrinsicRewardNormalizer, 0.9, "backward" if direction == "forward" else "forward"
            ),
        },
    )


def curious(seed: int) -> RandomNetworkDistillation:
    torch.manual_seed(seed)
    return RandomNetworkDistillation(MLPNetwork([8])).build(TWO_CHOICES)


def novel(start: int) -> TensorDict:
    return TensorDict({"next": {"observation": torch.randn(5, 2, 4, generator=generator(start))}}, [5, 2])


def novelty(intrinsic: RandomNetworkDistillation) -> torch.Tensor:
    rollout = novel(7)
    intrinsic.annotate(rollout)
    return rollout["next", "intrinsic_reward"]


class Running:
    """Moments are values: this holds the last ones."""

    def __init__(self) -> None:
        self.moments = Moments.empty(2)

    def state_dict(self) -> Any:
        return self.moments.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.moments = Moments.empty(2).restored(state, "moments")

    def merge(self, start: int) -> None:
        self.moments = self.moments.merged(Moments.from_samples(rewards(start).double()))


class RunningOfThree(Running):
    def load_state_dict(self, state: Any) -> None:
        Moments.empty(3).restored(state, "moments")


@cache
def ring(steps: int) -> ExperienceBuffer:
    made = ExperienceBuffer(storage=RingStorage(60), num_envs=1)
    made.extend(TensorDict({"a": torch.zeros(steps, 1)}, [steps, 1]), time_dim=0)
    return made


def add_episodes(episodes: FinishedEpisodes, start: int) -> None:
    done = torch.arange(start, start + 10).view(2, 5, 1) % 4 == 3
    episodes.add(torch.ones(2, 5, 1) * start, done, cut=True)


def end_episodes(episodes: FinishedEpisodes) -> Any:
    episodes.add(torch.ones(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.bool))
    return episodes.summary()


def note_rewards(scale: RewardScale, start: int, ids: torch.Tensor | None = None) -> None:
    done = torch.arange(start, start + 10).view(2, 5, 1) % 4 == 3
    scale.update(torch.ones(2, 5, 1) * start, done, ids, 0.99)


def reduce_rewards(scale: RewardScale) -> Any:
    scale.update(torch.ones(2, 1, 1), torch.zeros(2, 1, 1, dtype=torch.bool), None, 0.99)
    moments = scale.pop_moments()
    return moments.count, moments.mean, moments.variance


SMALL = {
    "SumSegmentTree": sum_tree(),
    "SumSegmentTree, by torch": sum_tree(backend="torch", name="priorities"),
    "MaxSegmentTree": tree(MaxSegmentTree),
    "MinSegmentTree": tree(MinSegmentTree),
    "IntrinsicRewardNormalizer": intrinsic("forward"),
    "IntrinsicRewardNormalizer, backward": intrinsic("backward"),
    "StandardScaler": Unfiled(
        make=lambda seed: StandardScaler("ab"),
        fill=lambda scaler, start: scaler.fit(rewards(start)),
        ask=lambda scaler: (scaler(rewards(7)), scaler.count),
        ours=False,  # a module of torch
    ),
    "RandomNetworkDistillation": Unfiled(
        make=curious,
        fill=lambda intrinsic, start: intrinsic.annotate(novel(start)),
        ask=lambda intrinsic: (novelty(intrinsic), intrinsic.variance_0),
        ours=False,  # a module of torch
    ),
    "Moments": Unfiled(
        make=lambda seed: Running(),
        fill=Running.merge,
        ask=lambda running: running.moments.variance,
        foreign={r"expected a tensor \[3\]": RunningOfThree},
    ),
    "HoldoutSplit": Unfiled(
        make=lambda seed: HoldoutSplit(0.3, 15, seed=seed),
        fill=lambda split, start: split.extend(ring(20 + start).writer),
        ask=lambda split: split.parts(torch.arange(20)),
        foreign={
            "The state has validation_fraction=0.3": partial(HoldoutSplit, 0.4, 15),
            "The state has max_validation=15": partial(HoldoutSplit, 0.3, 16),
        },
        edited={"split state is foreign": (("held",), torch.tensor([99]))},
    ),
    "FinishedEpisodes": Unfiled(
        make=lambda seed: FinishedEpisodes(2),
        fill=add_episodes,
        ask=end_episodes,
    ),
    "RewardScale": Unfiled(
        make=lambda seed: RewardScale(10.0),
        fill=note_rewards,
        ask=reduce_rewards,
    ),
    "RewardScale, of some environments": Unfiled(
        make=lambda seed: RewardScale(10.0),
        fill=partial(note_rewards, ids=torch.tensor([2, 0])),
        ask=reduce_rewards,
    ),
}
