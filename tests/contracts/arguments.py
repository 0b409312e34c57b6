"""Arguments that constructors take and refuse: each refusal is a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded

from contracts.families import ring, time_steps
from kit.counting import CountingEnv, vector_env
from kit.dynamics import model_data
from kit.lines import imitator
from kit.replay import replay_data
from kit.torchrl_envs import Walk
from torchrl_lightning import (
    AsynchronousCollector,
    BranchedReplay,
    BufferBase,
    Demonstration,
    DemonstrationActor,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    DemonstrationWriter,
    DynamicsTargets,
    EpisodicReplayBuffer,
    ExperienceBuffer,
    FrameStackTransform,
    FrameStorage,
    GAEBuffer,
    GeneralizedAdvantages,
    GymnasiumCollector,
    HindsightRelabel,
    HoldoutSplit,
    IntrinsicRewardNormalizer,
    MinibatchSampler,
    MixedReplay,
    OnPolicyDataModule,
    PPOBuffer,
    PPODBuffer,
    PrioritizedSampler,
    RecentSampler,
    RecurrentReplayBuffer,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    SegmentTree,
    SequenceSampler,
    SimpleReplayBuffer,
    SumSegmentTree,
    make_vector_env,
)
from torchrl_lightning.demonstrations.annealing import DemonstrationAnnealing


class Refused(NamedTuple):
    """A constructor, words of its error, and what it refuses beside its sound arguments."""

    kind: Callable[..., Any]
    says: str
    given: dict[str, Any]


class Each(tuple[Any, ...]):
    """Several values of an argument, each of which is refused."""


def refused(kind: Callable[..., Any], says: str, /, **given: Any) -> Iterator[Refused]:
    values = ([*value] if isinstance(value, Each) else [value] for value in given.values())
    for chosen in product(*values):
        yield Refused(kind, says, dict(zip(given, chosen, strict=True)))


def named(kind: Callable[..., Any], /, **given: Any) -> Iterator[Refused]:
    """Arguments that the constructor names when their value is refused."""
    for name, value in given.items():
        yield from refused(kind, rf"\b{name}\b", **{name: value})


SIZES = Each((0, -1, 2.5, True, "a", math.nan, math.inf))
NUMBERS = Each((-0.1, math.nan, math.inf))
ROW = time_steps(1)[0]
PLAYED = {"storage": DemonstrationStorage(), "sampler": DemonstrationSampler(), "num_envs": 1}


def steps(**changes: Any) -> TensorDict:
    """Steps of a demonstration with other entries; None leaves one out."""
    entries = {"observation": torch.zeros(3, 4), "action": torch.zeros(3, 1), "reward": torch.zeros(3, 1), **changes}
    made = TensorDict({name: value for name, value in entries.items() if value is not None})
    if "reward" in made:
        made["next", "reward"] = made.pop("reward")
    return made


NAN_AMID = torch.tensor([[0.0], [math.nan], [0.0]])
STEPS = steps().auto_batch_size_(1)


def experience(max_size: int = 8, **settings: Any) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(max_size), **settings)


def worked(env: str = "CartPole-v1", **settings: Any) -> GymnasiumCollector:
    return GymnasiumCollector(env, **{"num_envs": 2, "frames_per_batch": 8, **settings})


mixed, unsaid = partial(MixedReplay, ring(0), [ring(1)]), partial(BufferBase, 1, 1, 1, 1)
SOUND: dict[Callable[..., Any], dict[str, Any]] = {
    RingStorage: {"max_size": 9},
    SequenceSampler: {"batch_length": 4},
    PrioritizedSampler: {"max_capacity": 20, "alpha": 1.0, "beta": 1.0},
    HindsightRelabel: {"her_proportion": 1.0},
    FrameStackTransform: {"frame_stack": 2},
    FrameStorage: {"max_size": 8, "frame_stack": 3},
    EpisodicReplayBuffer: {"data_spec": ROW, "num_environments": 2, "max_length": 4},
    RecurrentReplayBuffer: {"capacity": 1, "state_dim": 1, "action_dim": 1, "hidden_dim": 1},
    SimpleReplayBuffer: {"obs_dim": 1, "act_dim": 1, "size": 2, "batch_size": 1},
    PPOBuffer: {"obs_dim": 1, "act_dim": 1, "size": 2, "batch_size": 1},
    GAEBuffer: {"size": 5},
    SumSegmentTree: {"capacity": 4},
    SegmentTree: {"capacity": 3, "op": "min"},
    mixed: {"ratios": [0.5, 0.5]},
    DemonstrationStorage: {"capacity": 1},
    DemonstrationWriter: {"storage": DemonstrationStorage()},
    DemonstrationAnnealing: {"value_capacity": 50},
    DemonstrationReplay: PLAYED,
    DemonstrationActor: {"policy": imitator()},
    PPODBuffer: {"size": 8},
    Demonstration: {"steps": STEPS, "name": "a.npz"},
    BranchedReplay: {"buffer": ring(0)},
    DynamicsTargets: {"observation_spec": Composite(observation=Unbounded(3)), "action_spec": Unbounded(2)},
    AsynchronousCollector: {"env": CountingEnv, "frames_per_batch": 8},
    OnPolicyDataModule: {"env": "CartPole-v1", "num_envs": 4, "frames_per_batch": 64},
    ReplayDataModule: {"env": "CartPole-v1", "buffer": ExperienceBuffer, "dataset": "a folder"},
}
"""What each takes; the others need nothing."""

VALUES = (
    *named(RingStorage, max_size=SIZES),
    *named(experience, num_envs=SIZES, n_steps=Each((0, True))),
    *refused(experience, "max_size=8.*12", max_size=10, num_envs=4),
    *refused(experience, "num_envs=3", writer=RingWriter(2), num_envs=3),
    *refused(experience, "gamma.*0.*1.*1.5", n_steps=3, gamma=1.5),
    *named(SequenceSampler, batch_length=Each((0, 2.5)), episode_ends="over", start_states="none"),
    *refused(SequenceSampler, "burn_in", burn_in=Each((4, -1))),
    *named(PrioritizedSampler, alpha=NUMBERS, beta=NUMBERS, eps=NUMBERS, initial_priority=NUMBERS),
    *named(PrioritizedSampler, weight_norm="max", reduction="sum", batch_length=0, num_earliest_frames_ignored=-1),
    *refused(PrioritizedSampler, "at least 1, got 0", max_capacity=0),
    *named(RecentSampler, recent_data_steps=0, recent_data_ratio=1.5, num_earliest_frames_ignored=-1, batch_length=0),
    *refused(
        RecentSampler,
        "batch_length.*num_earliest_frames_ignored=0",
        prioritized=Each(
            PrioritizedSampler(8, 1.0, 1.0, **settings)
            for settings in ({}, {"batch_length": 1, "num_earliest_frames_ignored": 2})
        ),
    ),
    *named(MinibatchSampler, by="frames"),
    *named(HindsightRelabel, her_proportion=1.5, strategy="past"),
    *named(FrameStackTransform, frame_stack=0),
    *named(FrameStorage, frame_stack=0),
    *refused(EpisodicReplayBuffer, "return=True", record_episodic_return=True, keep_episodic_info=False),
    *named(EpisodicReplayBuffer, num_environments=0, max_length=0, recent_data_ratio=2.0),
    *refused(EpisodicReplayBuffer, "max_length=3, got 3", max_length=3, num_earliest_frames_ignored=3),
    *refused(EpisodicReplayBuffer, "default_return.*nan", record_episodic_return=True, default_return=math.nan),
    *refused(EpisodicReplayBuffer, "reward_clip", record_episodic_return=True, reward_clip=(1, 0)),
    *refused(EpisodicReplayBuffer, r"without batch size, got \[1\]", data_spec=ROW.unsqueeze(0)),
    *refused(EpisodicReplayBuffer, "data_spec", data_spec=None, allow_multiprocess=True),
    *refused(EpisodicReplayBuffer, "scratch_dir", allow_multiprocess=True, scratch_dir=gettempdir()),
    *named(RecurrentReplayBuffer, capacity=0, state_dim=1.5, action_dim=True, hidden_dim=-1),
    *named(SimpleReplayBuffer, size=0, batch_size=1.5, obs_dim=True, act_dim=-1),
    *named(PPOBuffer, size=0, batch_size=2.5, gamma=1.5, eps=math.nan, lam=-1.0),
    *named(GeneralizedAdvantages, gamma=1.5),
    *named(HoldoutSplit, validation_fraction=Each((0.0, 1.0, -0.1, 2.0))),
    *named(IntrinsicRewardNormalizer, gamma=2.0),
    *refused(IntrinsicRewardNormalizer, "'forward', 'backward'.*'sideways'", direction="sideways"),
    *refused(SumSegmentTree, "at least 1, got 0", capacity=0),
    *refused(SumSegmentTree, "backend", backend="cuda"),
    *refused(SumSegmentTree, "SumSegmentTree.*leaf", initial=Each((-1.0, math.nan, math.inf))),
    *refused(SegmentTree, r"\('sum', 'min', 'max'\).*torch.add", op=Each((torch.mul, sum, None, "mean"))),
    *refused(mixed, "ratios must sum to 1, got .* 0.9", ratios=[0.5, 0.4]),
    *refused(mixed, "ratios must be 2 positive numbers", ratios=Each(([1.0], [1.2, -0.2]))),
    *named(DemonstrationStorage, capacity=0),
    *named(DemonstrationWriter, reward_threshold=Each((math.nan, math.inf))),
    *(
        row
        for kind in (DemonstrationSampler, PPODBuffer)
        for row in (
            *refused(kind, r"rho=0\.8.*phi=0\.3", rho=0.8, phi=0.3),
            *named(kind, rho=Each((-0.1, math.nan)), phi=1.5, alpha=-1.0),
        )
    ),
    *refused(DemonstrationAnnealing, "annealing.*'linear', 'current'.*'cosine'", schedule="cosine"),
    *named(DemonstrationAnnealing, value_capacity=-1),
    *named(DemonstrationReplay, num_envs=0, ends="done", log_prob=0.0, frame_stack=0),
    *named(DemonstrationActor, log_prob="none"),
    *named(PPODBuffer, total_buffer_demo_capacity=0, save_demos_every=0, num_agent_demos_to_save=-1),
    *named(PPODBuffer, log_prob="none", ends="never", annealing="sudden"),
    *refused(PPODBuffer, "reward_threshold", initial_reward_threshold=math.nan),
    *refused(PPODBuffer, "demo_dtypes.*'Weights': 'uint8'", demo_dtypes={"Weights": "uint8"}),
    *refused(PPODBuffer, "demo_dtypes.*'Action': 'number'", demo_dtypes={"Action": "number"}),
    *refused(
        Demonstration,
        "'action'",
        steps=Each((steps(action=None), steps(action=torch.full((3, 1), math.nan)), steps(action=torch.tensor(1)))),
    ),
    *refused(
        Demonstration,
        "'reward'",
        steps=Each(steps(reward=each) for each in (None, torch.zeros(3), torch.zeros(3, 1).double(), NAN_AMID)),
    ),
    *refused(
        Demonstration,
        "observation",
        steps=Each(steps(observation=each) for each in (None, torch.full((3, 4), math.inf), torch.zeros(2, 4))),
    ),
    *refused(Demonstration, "'a.npz'", steps=STEPS[:0]),
    *named(Demonstration, frame_skip=0, value=Each((math.nan, math.inf))),
    *refused(Demonstration, "metadata", metadata={"a": [1]}),
    *refused(Demonstration, "terminated=True.*truncated=None", terminated=True),
    *refused(
        Demonstration,
        "last_observation",
        last_observation=Each(
            (
                TensorDict(other=torch.zeros(4)),
                TensorDict(observation=torch.zeros(3)),
                TensorDict(observation=torch.full((4,), math.nan)),
            )
        ),
    ),
    *refused(worked, "frames_per_batch must .*11.*12", frames_per_batch=11, num_envs=4),
    *named(worked, total_frames=0, num_envs=0),
    *refused(worked, "seed", seed=-1),
    *named(replay_data, frames_per_update=0.0, warmup_frames=-1, batch_size=0, updates_per_epoch=0),
    *named(replay_data, checkpoint_buffer="somewhere"),
    *refused(replay_data, "frames_per_batch must .*num_envs=2.*3.*4", frames_per_batch=3),
    *refused(replay_data, "frames_per_batch=2.*num_envs=2.*e.g. frames_per_batch=32", reset_at_each_batch=True),
    *named(model_data, batch_size=0, num_members=0, frames_per_fit=0),
    *named(model_data, warmup_frames=0, max_epochs_per_fit=0, max_validation=0),
    *named(BranchedReplay, real_ratio=Each((0.0, 1.0))),
    *named(BranchedReplay, frames_per_fit=0, branches_per_fit=0, fits_kept=0, first_length=0, validation_fraction=0.0),
    *refused(BranchedReplay, r"lengthened_between must .*\[5, 2\]", lengthened_between=(5, 2)),
    *refused(BranchedReplay, "n_steps .* must be 1.*3", buffer=ExperienceBuffer(n_steps=3)),
    *named(AsynchronousCollector, num_workers=0),
    *refused(AsynchronousCollector, "num_envs=2.*1", replay=DemonstrationReplay(**PLAYED), num_envs=2),
    *refused(OnPolicyDataModule, "frames_per_batch must .*num_envs=4.*63.*64", frames_per_batch=63),
    *refused(
        OnPolicyDataModule,
        "reset_at_each_batch must be False with frames_per_batch=4",
        reset_at_each_batch=True,
        frames_per_batch=4,
    ),
    *refused(OnPolicyDataModule, "mini_batch_size must .*frames_per_batch=64.*128", mini_batch_size=128),
    *refused(OnPolicyDataModule, "num_mini_batch=65", num_mini_batch=65),
    *refused(OnPolicyDataModule, "need 96", mini_batch_size=32, num_mini_batch=3),
    *named(OnPolicyDataModule, num_epochs=0, num_envs=0, mini_batch_size=0),
    *refused(OnPolicyDataModule, "eval_env=", env=Each((make_vector_env("CartPole-v1", 4), Walk([4])))),
    *refused(ReplayDataModule, "warmup_frames=10.*dataset=.*frames_per_update=0", warmup_frames=10),
    *refused(ReplayDataModule, r"total_frames=100.*\(max_epochs, max_steps", total_frames=100),
    *refused(ReplayDataModule, "collector=.*dataset=", collector=print),
    *refused(ReplayDataModule, r"frames_per_update.*0.*-1\.0", frames_per_update=-1.0),
    *refused(ReplayDataModule, r"must be above 0, got 0\.0", dataset=None, frames_per_update=0.0),
    *named(ReplayDataModule, updates_per_step=0),
    *refused(ReplayDataModule, r"dataset_share must .*0.*1.*1\.0", dataset_share=1.0),
    *refused(ReplayDataModule, "dataset=.*source=", dataset_share=0.5, dataset=None),
    *refused(ReplayDataModule, "dataset=.*source=", dataset_share=0.5, source=print),
    *refused(ReplayDataModule, r"must be above 0, got 0\.0", dataset_share=0.5, frames_per_update=0.0),
)

TYPES = (
    *refused(PrioritizedSampler, r"torch\.int64", dtype=torch.int64),
    *refused(EpisodicReplayBuffer, "TensorDict", data_spec=3),
    *refused(unsaid, "must define sample"),
    *refused(GAEBuffer, "string", value_key=3),
    *refused(SumSegmentTree, r"must be an integer, got 2\.0", capacity=2.0),
    *refused(SumSegmentTree, r"torch\.int64", dtype=torch.int64),
    *refused(DemonstrationActor, "get_dist.*TensorDictModule.*log_prob='deterministic'", log_prob="current"),
    *refused(Demonstration, "terminated.*'no'", terminated="no", truncated=True),
    *refused(Demonstration, "TensorDict", steps={"action": torch.zeros(3)}),
    *refused(DynamicsTargets, "observation_spec.*UnboundedContinuous", observation_spec=Unbounded(3)),
    *refused(AsynchronousCollector, "SyncVectorEnv", env=vector_env()),
)

KEYS = (
    *refused(EpisodicReplayBuffer, "'reward'", data_spec=ROW.exclude("reward"), record_episodic_return=True),
    *refused(DynamicsTargets, r"\['observation'\].*\['pixels'\]", observation_keys=["pixels"]),
)
