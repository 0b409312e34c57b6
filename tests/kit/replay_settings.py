"""Steps as plain objects, and replay buffers of all kinds that store them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from torchrl_lightning import (
    ExperienceBuffer,
    FrameStackTransform,
    FrameStorage,
    HindsightRelabel,
    PrioritizedSampler,
    RecentSampler,
    RingStorage,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from torchrl_lightning.episodic.episodic_return import EpisodicReturn

GAMMA, DEFAULT, STACK, NO_GOAL = 0.5, -1000.0, 3, -1.0
SAMPLERS = (
    "uniform", "distinct", "stratified", "inside", "pad", "across", "prioritized", "prioritized windows", "recent",
    "recent prioritized",
)  # fmt: skip
SEAMS = ("ids", "init", "successor")
EXTRAS = ("none", "hindsight", "stack", "frames", "returns")


@dataclass
class Step:
    """A step with its trajectory. ``cut`` is True if a cut without a flag precedes it."""

    trajectory: int
    time: int
    reward: float
    done: bool
    terminated: bool
    init: bool
    label: int
    cut: bool = False
    priority: float = 1.0
    serial: int = 0

    @property
    def value(self) -> float:
        """A number that is different for each step."""
        return 100.0 * self.trajectory + self.time


@dataclass
class Lane:
    """An environment with all its steps. Only the steps from ``oldest`` on are still stored."""

    steps: list[Step] = field(default_factory=list)
    oldest: int = 0
    pending_cut: bool = False
    reloaded: bool = False
    trajectory: int = -1
    time: int = 0
    label: int = 0

    @property
    def stored(self) -> range:
        return range(self.oldest, len(self.steps))


@dataclass(frozen=True)
class Settings:
    """The settings of a buffer."""

    seed: int
    num_envs: int
    length: int
    sampler: str
    n_steps: int
    seams: str
    extra: str

    @classmethod
    def of(cls, seed: int) -> Settings:
        """Draw settings from a seed. Extras and samplers take turns."""
        rng = random.Random(f"settings {seed}")
        extra = EXTRAS[seed % len(EXTRAS)]
        n_steps = rng.choice((1, 1, 3)) if extra != "returns" else 1
        sampler = SAMPLERS[seed // len(EXTRAS) % len(SAMPLERS)]
        return cls(seed, rng.randint(1, 3), rng.randint(3, 12), sampler, n_steps, rng.choice(SEAMS), extra)

    def build(self) -> ExperienceBuffer:
        """Build the buffer."""
        cells, window = self.num_envs * self.length, 2
        samplers: dict[str, Any] = {
            "uniform": UniformSampler,
            "distinct": lambda: UniformSampler(with_replacement=False),
            "stratified": lambda: UniformSampler(stratified=True),
            "inside": lambda: SequenceSampler(window),
            "pad": lambda: SequenceSampler(window, episode_ends="pad"),
            "across": lambda: SequenceSampler(window, episode_ends="across"),
            "prioritized": lambda: PrioritizedSampler(cells, 1.0, 1.0, 0.0),
            "prioritized windows": lambda: PrioritizedSampler(cells, 1.0, 1.0, 0.0, batch_length=window),
            "recent": lambda: RecentSampler(window, recent_data_steps=2, recent_data_ratio=0.5),
            "recent prioritized": lambda: RecentSampler(
                window,
                recent_data_steps=2,
                recent_data_ratio=0.5,
                prioritized=PrioritizedSampler(cells, 1.0, 1.0, 0.0, batch_length=window),
            ),
        }
        transforms = {
            "hindsight": lambda: HindsightRelabel(1.0, compute_reward=reward_of),
            "stack": lambda: FrameStackTransform(STACK, keys=["picture"]),
        }
        storage = FrameStorage(cells, STACK, keys=["picture"]) if self.extra == "frames" else RingStorage(cells)
        buffer = ExperienceBuffer(
            storage=storage,
            writer=RingWriter(self.num_envs, track_episodes=True),
            sampler=samplers[self.sampler](),
            n_steps=self.n_steps,
            gamma=GAMMA,
            generator=torch.Generator().manual_seed(self.seed),
            transform=transforms[self.extra]() if self.extra in transforms else None,
        )
        if self.extra == "returns":
            self.returns_of(buffer)
        return buffer

    def returns_of(self, buffer: ExperienceBuffer) -> EpisodicReturn:
        """Return the object that writes the returns of a buffer."""
        known = [each for each, _ in buffer.storage.dependents if isinstance(each, EpisodicReturn)]
        return known[0] if known else EpisodicReturn(buffer.storage, gamma=GAMMA, default_return=DEFAULT)


def reward_of(achieved: torch.Tensor, desired: torch.Tensor, info: Any) -> torch.Tensor:
    """Return 0 for a reached goal and -1 otherwise."""
    return (achieved == desired).float() - 1.0


def picture(values: torch.Tensor) -> torch.Tensor:
    """Build images ``[n, 4, 4]`` that encode numbers ``[n, 1]``."""
    bits = values.long().view(-1, 1).bitwise_right_shift(torch.arange(16)).bitwise_and(1)
    return bits.to(torch.uint8).view(-1, 4, 4)
