"""Arguments that constructors refuse: a new one enters the contract by its row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from tempfile import gettempdir
from typing import Any

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


@dataclass(frozen=True)
class Refused:
    """A constructor, arguments that it takes, and others that it refuses: the words, and what is wrong.

    Several of one kind stand in a list.
    """

    kind: Callable[..., Any]
    sound: dict[str, Any]
    wrong: dict[str, Any]
    error: type[Exception] = ValueError

    def cases(self) -> list[tuple[str, dict[str, Any]]]:
        """Words, and arguments."""
        lists = {says: given if isinstance(given, list) else [given] for says, given in self.wrong.items()}
        return [(says, {**self.sound, **each}) for says, given in lists.items() for each in given]


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def named(**values: Any) -> dict[str, Any]:
    """Arguments, each with a value that it must not have, or a list of such."""
    return {
        f"{name} must be": each(name, *(value if isinstance(value, list) else [value]))
        for name, value in values.items()
    }


SIZES = [0, -1, 2.5, True, "a", math.nan, math.inf]
NUMBERS = [-0.1, math.nan, math.inf]
SHARES = {
    r"rho \+ phi must be at most 1, got rho=0.8 and phi=0.3": {"rho": 0.8, "phi": 0.3},
    **named(rho=[-0.1, math.nan], phi=1.5, alpha=-1.0),
}
PRIORITIES = {"max_capacity": 20, "alpha": 1.0, "beta": 1.0}
ROW = time_steps(1)[0]
EPISODES = {"data_spec": ROW, "num_environments": 2, "max_length": 4}
PLAYED = {"storage": DemonstrationStorage(), "sampler": DemonstrationSampler(), "num_envs": 1}
STEPS = TensorDict({"observation": torch.zeros(3, 4), "action": torch.zeros(3, 1)}, [3])
STEPS["next", "reward"] = torch.zeros(3, 1)


def replaced(**entries: Any) -> dict[str, Any]:
    """Steps of a demonstration with other entries; None leaves one out."""
    paths = {name: ("next", name) if name == "reward" else name for name in ("observation", "action", "reward")}
    found: dict[Any, Any] = {path: entries.get(name, STEPS[path]) for name, path in paths.items()}
    steps = TensorDict({}, [])
    for path, value in found.items():
        if value is not None:
            steps[path] = value
    return {"steps": steps}


NOTHING = replaced(**{name: torch.zeros(0, 1) for name in ("observation", "action", "reward")})


def last(**entries: torch.Tensor) -> dict[str, Any]:
    return {"last_observation": TensorDict(entries)}


def worked(env: str = "CartPole-v1", **settings: Any) -> GymnasiumCollector:
    return GymnasiumCollector(env, **{"num_envs": 2, "frames_per_batch": 8, **settings})


ARGUMENTS = (
    Refused(RingStorage, {"max_size": 9}, named(max_size=SIZES)),
    Refused(
        lambda max_size=8, **settings: ExperienceBuffer(storage=RingStorage(max_size), **settings),
        {},
        {
            **named(num_envs=SIZES, n_steps=[0, True]),
            "max_size=8 or 12": {"max_size": 10, "num_envs": 4},
            "num_envs=3": {"writer": RingWriter(2), "num_envs": 3},
            "gamma must be between 0 and 1, got 1.5": {"n_steps": 3, "gamma": 1.5},
        },
    ),
    Refused(
        SequenceSampler,
        {"batch_length": 4},
        {**named(batch_length=[0, 2.5], episode_ends="over"), "burn_in": each("burn_in", 4, -1)},
    ),
    Refused(
        PrioritizedSampler,
        PRIORITIES,
        {
            **named(alpha=NUMBERS, beta=NUMBERS, eps=NUMBERS, initial_priority=NUMBERS),
            **named(weight_norm="max", reduction="sum", batch_length=0, num_earliest_frames_ignored=-1),
            "at least 1, got 0": {"max_capacity": 0},
        },
    ),
    Refused(PrioritizedSampler, PRIORITIES, {r"torch\.int64": {"dtype": torch.int64}}, TypeError),
    Refused(
        RecentSampler,
        {},
        {
            **named(recent_data_steps=0, recent_data_ratio=1.5, num_earliest_frames_ignored=-1, batch_length=0),
            "must be built with a batch_length and num_earliest_frames_ignored=0": [
                {"prioritized": PrioritizedSampler(8, 1.0, 1.0, **settings)}
                for settings in ({}, {"batch_length": 1, "num_earliest_frames_ignored": 2})
            ],
        },
    ),
    Refused(MinibatchSampler, {}, named(by="frames")),
    Refused(HindsightRelabel, {"her_proportion": 1.0}, named(her_proportion=1.5)),
    Refused(FrameStackTransform, {"frame_stack": 2}, named(frame_stack=0)),
    Refused(FrameStorage, {"max_size": 8, "frame_stack": 3}, named(frame_stack=0)),
    Refused(
        EpisodicReplayBuffer,
        EPISODES,
        {
            "return=True needs the index": {"record_episodic_return": True, "keep_episodic_info": False},
            **named(num_environments=0, max_length=0, recent_data_ratio=2.0),
            "reward_clip": {"record_episodic_return": True, "reward_clip": (1, 0)},
            r"describes one row, got one of batch size \[1\]": {"data_spec": ROW.unsqueeze(0)},
            "needs a data_spec": {"data_spec": None, "allow_multiprocess": True},
            "scratch_dir": {"allow_multiprocess": True, "scratch_dir": gettempdir()},
        },
    ),
    Refused(EpisodicReplayBuffer, EPISODES, {"Expected a TensorDict, got a int": {"data_spec": 3}}, TypeError),
    Refused(
        EpisodicReplayBuffer,
        EPISODES,
        {"'reward', which returns": {"data_spec": ROW.exclude("reward"), "record_episodic_return": True}},
        KeyError,
    ),
    Refused(
        RecurrentReplayBuffer,
        {"capacity": 1, "state_dim": 1, "action_dim": 1, "hidden_dim": 1},
        named(capacity=0, state_dim=1.5, action_dim=True, hidden_dim=-1),
    ),
    Refused(
        SimpleReplayBuffer,
        {"obs_dim": 1, "act_dim": 1, "size": 2, "batch_size": 1},
        named(size=0, batch_size=1.5, obs_dim=True, act_dim=-1),
    ),
    Refused(
        PPOBuffer,
        {"obs_dim": 1, "act_dim": 1, "size": 2, "batch_size": 1},
        named(size=0, batch_size=2.5, gamma=1.5, eps=math.nan, lam=-1.0),
    ),
    Refused(partial(BufferBase, 1, 1, 1, 1), {}, {"does not say how to sample; use Recurrent": {}}, TypeError),
    Refused(GAEBuffer, {"size": 5}, {"string": {"value_key": 3}}, TypeError),
    Refused(partial(GeneralizedAdvantages), {}, named(gamma=1.5)),
    Refused(HoldoutSplit, {}, named(validation_fraction=[0.0, 1.0, -0.1, 2.0])),
    Refused(
        IntrinsicRewardNormalizer,
        {},
        {
            "'forward' or 'backward', got 'sideways'": {"direction": "sideways"},
            **named(gamma=2.0),
        },
    ),
    Refused(
        SumSegmentTree,
        {"capacity": 4},
        {
            "at least 1, got 0": {"capacity": 0},
            "backend": {"backend": "cuda"},
            "SumSegmentTree: a leaf must be finite and not negative": each("initial", -1.0, math.nan, math.inf),
        },
    ),
    Refused(
        SumSegmentTree,
        {"capacity": 4},
        {r"must be an integer, got 2\.0": {"capacity": 2.0}, r"torch\.int64": {"dtype": torch.int64}},
        TypeError,
    ),
    Refused(
        SegmentTree,
        {"capacity": 3, "op": "min"},
        {r"op must be one of \('sum', 'min', 'max'\), or torch.add": each("op", torch.mul, sum, None, "mean")},
    ),
    Refused(
        partial(MixedReplay, ring(0), [ring(1)]),
        {"ratios": [0.5, 0.5]},
        {
            "sum to 0.9; they must sum to 1": {"ratios": [0.5, 0.4]},
            "must be 2 positive numbers, one for a buffer": each("ratios", [1.0], [1.2, -0.2]),
        },
    ),
    Refused(DemonstrationStorage, {"capacity": 1}, named(capacity=0)),
    Refused(DemonstrationWriter, {"storage": DemonstrationStorage()}, named(reward_threshold=[math.nan, math.inf])),
    Refused(DemonstrationSampler, {}, SHARES),
    Refused(
        DemonstrationAnnealing,
        {"value_capacity": 50},
        {
            "annealing must be one of 'linear', 'current', got 'cosine'": {"schedule": "cosine"},
            **named(value_capacity=-1),
        },
    ),
    Refused(DemonstrationReplay, PLAYED, named(num_envs=0, ends="done", log_prob=0.0, frame_stack=0)),
    Refused(DemonstrationActor, {"policy": imitator()}, named(log_prob="none")),
    Refused(
        DemonstrationActor,
        {"policy": imitator()},
        {r"must offer get_dist.*TensorDictModule; give log_prob='deterministic'": {"log_prob": "current"}},
        TypeError,
    ),
    Refused(
        PPODBuffer,
        {"size": 8},
        {
            **SHARES,
            **named(total_buffer_demo_capacity=0, save_demos_every=0, num_agent_demos_to_save=-1),
            **named(log_prob="none", ends="never", annealing="sudden"),
            "reward_threshold must be a finite number or None": {"initial_reward_threshold": math.nan},
            "demo_dtypes has 'Weights': 'uint8'": {"demo_dtypes": {"Weights": "uint8"}},
            "demo_dtypes has 'Action': 'number'": {"demo_dtypes": {"Action": "number"}},
        },
    ),
    Refused(
        Demonstration,
        {"steps": STEPS, "name": "a.npz"},
        {
            "'a.npz'.* lacks the entry 'action'; it has": replaced(action=None),
            r"'a.npz'.* lacks the entry \('next', 'reward'\)": replaced(reward=None),
            "'a.npz'.* lacks an observation": replaced(observation=None),
            r"'reward'\) is \[3\] of float32, expected \[T, 1\] of float32": replaced(reward=torch.zeros(3)),
            r"is \[3, 1\] of float64, expected": replaced(reward=torch.zeros(3, 1).double()),
            "'reward'.* holds NaN or infinity": replaced(reward=torch.tensor([[0.0], [math.nan], [0.0]])),
            "'observation' holds NaN or infinity": replaced(observation=torch.full((3, 4), math.inf)),
            "'action' holds NaN or infinity": replaced(action=torch.full((3, 1), math.nan)),
            r"'observation' is \[2, 4\], but there are 3 rewards": replaced(observation=torch.zeros(2, 4)),
            r"'action' is \[\], but there are 3 rewards": replaced(action=torch.tensor(1)),
            "'a.npz'.* has no steps": NOTHING,
            "frame_skip must be a positive integer, got 0": {"frame_skip": 0},
            "value must be a finite number": each("value", math.nan, math.inf),
            "metadata 'a' is": {"metadata": {"a": [1]}},
            "terminated=True and truncated=None; give both, or neither": {"terminated": True},
            "last_observation has the entries": last(other=torch.zeros(4)),
            r"of last_observation is \[3\] of float32": last(observation=torch.zeros(3)),
            "last_observation.*holds NaN": last(observation=torch.full((4,), math.nan)),
        },
    ),
    Refused(
        Demonstration,
        {"steps": STEPS},
        {
            "terminated must be True or False, got 'no'": {"terminated": "no", "truncated": True},
            "Demonstration .*Expected a TensorDict, got a dict": {"steps": {"action": torch.zeros(3)}},
        },
        TypeError,
    ),
    Refused(
        worked,
        {},
        {
            "frames_per_batch=11.*nearest is 12": {"frames_per_batch": 11, "num_envs": 4},
            **named(total_frames=0, num_envs=0),
            "seed": {"seed": -1},
        },
    ),
    Refused(
        replay_data,
        {},
        {
            "frames_per_update must be above 0, got 0.0": {"frames_per_update": 0.0},
            "warmup_frames must be .* at least 0, got -1": {"warmup_frames": -1},
            "batch_size must be a positive integer, got 0": {"batch_size": 0},
            "updates_per_epoch must be a positive integer, got 0": {"updates_per_epoch": 0},
            "must be one of 'inside', 'beside', 'none', got 'somewhere'": {"checkpoint_buffer": "somewhere"},
            "frames_per_batch=3 is no multiple of num_envs=2; take 4": {"frames_per_batch": 3},
            "frames_per_batch=2 and num_envs=2 would end each episode .* e.g. frames_per_batch=32": {
                "reset_at_each_batch": True
            },
        },
    ),
    Refused(
        model_data,
        {},
        {
            f"{name} must be a positive integer, got 0": {name: 0}
            for name in (
                *("batch_size", "num_members", "frames_per_fit"),
                *("warmup_frames", "max_epochs_per_fit", "max_validation"),
            )
        },
    ),
    Refused(
        BranchedReplay,
        {"buffer": ring(0)},
        {
            "real_ratio must be above 0 and below 1, got 0.0": {"real_ratio": 0.0},
            "real_ratio must be above 0 and below 1, got 1.0; for real rows alone": {"real_ratio": 1.0},
            "frames_per_fit must be a positive integer": {"frames_per_fit": 0},
            "branches_per_fit": {"branches_per_fit": 0},
            "fits_kept": {"fits_kept": 0},
            "first_length": {"first_length": 0},
            r"lengthened_between=\[5, 2\] must be two numbers in ascending order": {"lengthened_between": (5, 2)},
            "validation_fraction must be above 0": {"validation_fraction": 0.0},
            "n_steps=3; take 1": {"buffer": ExperienceBuffer(n_steps=3)},
        },
    ),
    Refused(
        DynamicsTargets,
        {"observation_spec": Composite(observation=Unbounded(3)), "action_spec": Unbounded(2)},
        {"observation_spec must be a Composite .* got a UnboundedContinuous": {"observation_spec": Unbounded(3)}},
        TypeError,
    ),
    Refused(
        DynamicsTargets,
        {"observation_spec": Composite(observation=Unbounded(3)), "action_spec": Unbounded(2)},
        {r"The observation spec has no \['pixels'\]; it has \['observation'\]": {"observation_keys": ["pixels"]}},
        KeyError,
    ),
    Refused(
        AsynchronousCollector,
        {"env": CountingEnv, "frames_per_batch": 8},
        {
            "num_workers must be a positive integer, got 0": {"num_workers": 0},
            "for 1 environments, but each worker has num_envs=2": {
                "replay": DemonstrationReplay(**PLAYED),
                "num_envs": 2,
            },
        },
    ),
    Refused(
        AsynchronousCollector,
        {"env": CountingEnv, "frames_per_batch": 8},
        {"ready SyncVectorEnv": {"env": vector_env()}},
        TypeError,
    ),
    Refused(
        OnPolicyDataModule,
        {"env": "CartPole-v1", "num_envs": 4, "frames_per_batch": 64},
        {
            "frames_per_batch=63 is no multiple of num_envs=4; take 64": {"frames_per_batch": 63},
            "would end each episode after its first step": {"reset_at_each_batch": True, "frames_per_batch": 4},
            "mini_batch_size=128 is larger than a rollout of frames_per_batch=64": {"mini_batch_size": 128},
            "num_mini_batch=65 batches": {"num_mini_batch": 65},
            "need 96": {"mini_batch_size": 32, "num_mini_batch": 3},
            **named(num_epochs=0, num_envs=0, mini_batch_size=0),
            "Pass eval_env=": each("env", make_vector_env("CartPole-v1", 4), Walk([4])),
        },
    ),
    Refused(
        ReplayDataModule,
        {"env": "CartPole-v1", "buffer": ExperienceBuffer, "dataset": "a folder"},
        {
            "warmup_frames=10: with dataset= and frames_per_update=0 nothing is collected": {"warmup_frames": 10},
            r"total_frames=100: .*\(max_epochs, max_steps": {"total_frames": 100},
            "collector=.*: with dataset=": {"collector": print},
            r"frames_per_update must be a finite number of at least 0, got -1\.0": {"frames_per_update": -1.0},
            r"must be above 0, got 0\.0": {"dataset": None, "frames_per_update": 0.0},
            **named(updates_per_step=0),
        },
    ),
)
