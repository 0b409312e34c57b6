"""A setter validates first: a refused value changes nothing, and the state still loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.rings import ring
from kit.rows import numbered
from kit.specs import TWO_CHOICES as SPECS
from kit.states import differences
from torchrl_lightning import (
    BufferReport,
    DiscountedReturns,
    DQNModule,
    DynamicsEnsemble,
    EnvironmentRecipe,
    EpisodeVideo,
    EpisodicReplayBuffer,
    EpisodicReturn,
    ExperienceBuffer,
    FramesProgressBar,
    FrameStackTransform,
    GAEBuffer,
    GeneralizedAdvantages,
    GymnasiumCollector,
    HindsightRelabel,
    HoldoutSplit,
    MBReplayBuffer,
    MinibatchSampler,
    PPODBuffer,
    PPOModule,
    PrioritizedSampler,
    RecentSampler,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    RolloutMetricsLogger,
    SACModule,
    SequenceSampler,
    StopAtScore,
    TD3Module,
    UniformSampler,
)
from torchrl_lightning.datamodules._run.reward_scale import RewardScale
from torchrl_lightning.demonstrations import DemonstrationSampler, DemonstrationStorage, DemonstrationWriter
from torchrl_lightning.environments.normalization import ObservationNormalizer
from torchrl_lightning.estimators import IntrinsicRewardNormalizer
from torchrl_lightning.ray.rate_limiter import RateLimiter

NAN, INF = float("nan"), float("inf")


def prioritized(**settings: Any) -> PrioritizedSampler:
    return PrioritizedSampler(4, **settings)


def windows() -> PrioritizedSampler:
    return PrioritizedSampler(4, batch_length=2)


def recent() -> RecentSampler:
    return RecentSampler(2, recent_data_steps=3, recent_data_ratio=0.5, prioritized=windows())


def returns() -> EpisodicReturn:
    buffer = ExperienceBuffer(storage=RingStorage(8), writer=RingWriter(track_episodes=True))
    return EpisodicReturn(buffer.storage, gamma=0.5, reward_clip=(-1, 1))


def episodic() -> EpisodicReplayBuffer:
    return EpisodicReplayBuffer(TensorDict({"x": torch.zeros(1)}), 2, 4)


def data() -> ReplayDataModule:
    return ReplayDataModule(EnvironmentRecipe("CartPole-v1"), buffer=lambda num_envs: ring(8, num_envs))


def limiter() -> RateLimiter:
    return RateLimiter(2.0, error_buffer=8, min_size=4)


def collector() -> GymnasiumCollector:
    return GymnasiumCollector("CartPole-v1", frames_per_batch=4)


SETTERS: list[tuple[Callable[[], Any], str, list[Any]]] = [
    (prioritized, "alpha", [-1, NAN, INF, "1", None]),
    (prioritized, "beta", [-1, NAN, INF, "1", None]),
    (prioritized, "eps", [1.0]),  # has no setter
    (prioritized, "reduction", ["sum", None, 3]),
    (prioritized, "weight_norm", ["sum", 3, "buffer"]),
    (prioritized, "stratified", [1, None, "yes"]),
    (prioritized, "initial_priority", [-1, NAN, INF, "1"]),
    (prioritized, "batch_length", [0, 1, 2, 1.5, "2", True]),
    (prioritized, "num_earliest_frames_ignored", [-1, 1, 1.5]),
    (prioritized, "priority_key", [3, ()]),
    (prioritized, "generator", [3, None]),
    (windows, "batch_length", [0, -1, 1.5, "2", True]),
    (windows, "num_earliest_frames_ignored", [-1, 1.5]),
    (UniformSampler, "with_replacement", [1, None, "no"]),
    (UniformSampler, "stratified", [1, None, "no"]),
    (UniformSampler, "generator", [0]),
    (lambda: SequenceSampler(4, burn_in=2), "batch_length", [0, 2, 1.5, "4"]),
    (lambda: SequenceSampler(4, burn_in=2), "burn_in", [-1, 4, 1.5, True]),
    (lambda: SequenceSampler(4), "episode_ends", ["cut", None]),
    (lambda: SequenceSampler(4), "start_states", ["old", None]),
    (lambda: SequenceSampler(4), "recurrent_keys", [[3]]),
    (recent, "recent_data_steps", [0, -1, 1.5]),
    (recent, "recent_data_ratio", [-0.1, 1.1, NAN, "1"]),
    (recent, "with_replacement", [1, None]),
    (recent, "num_earliest_frames_ignored", [-1, 1, 1.5]),
    (recent, "generator", [0]),
    (MinibatchSampler, "drop_last", [1, None]),
    (MinibatchSampler, "shuffle", [1, None]),
    (lambda: DemonstrationSampler(0.2, 0.3), "rho", [-0.1, 0.8, 1.1, NAN, "0.1"]),
    (lambda: DemonstrationSampler(0.2, 0.3), "phi", [-0.1, 0.9, 1.1, NAN]),
    (lambda: DemonstrationSampler(0.2, 0.3), "alpha", [-1, INF, NAN]),
    (lambda: DemonstrationSampler(0.2, 0.3), "human_share", [-1, 2, NAN]),
    (lambda: PPODBuffer(4, rho=0.2, phi=0.3), "rho", [-0.1, 0.8, NAN]),
    (lambda: PPODBuffer(4, rho=0.2, phi=0.3), "phi", [-0.1, 0.9, NAN]),
    (lambda: PPODBuffer(4, rho=0.2, phi=0.3), "alpha", [-1, INF]),
    (lambda: GAEBuffer(4), "gamma", [-1, 1.1, NAN, "1"]),
    (lambda: GAEBuffer(4), "gamma_intrinsic", [-1, 1.1, NAN, "1"]),
    (lambda: GAEBuffer(4), "gae_lambda", [-1, 1.1, NAN, "1"]),
    (lambda: DiscountedReturns(0.9), "gamma", [-1, 1.1, NAN, "1"]),
    (lambda: IntrinsicRewardNormalizer(0.9), "gamma", [-1, 1.1, NAN, "1"]),
    (lambda: MBReplayBuffer(4), "max_size", [0, -1, 1.5, "4"]),
    (lambda: ExperienceBuffer(storage=RingStorage(4), n_steps=2), "gamma", [-1, 1.1, NAN, "1"]),
    (lambda: ExperienceBuffer(storage=RingStorage(4), n_steps=2), "n_steps", [3]),  # has no setter
    (RingWriter, "done_reduce", ["or", 1]),
    (RingWriter, "overwrite", [1, None]),
    (RingWriter, "check_successors", [1, None]),
    (HindsightRelabel, "her_proportion", [-0.1, 1.1, NAN, "1"]),
    (HindsightRelabel, "strategy", ["random", None]),
    (HindsightRelabel, "skip_reached", [1, None]),
    (returns, "gamma", [-1, 1.1, NAN]),
    (lambda: ExperienceBuffer(storage=RingStorage(4)), "priority_key", [3, ()]),
    (episodic, "num_earliest_frames_ignored", [-1, 1.5, "1"]),
    (HoldoutSplit, "validation_fraction", [0.0, 1.0, -1, NAN, "1"]),
    (HoldoutSplit, "max_validation", [0, 1.5]),
    (HoldoutSplit, "seed", [-1, 1.5, "0"]),
    (lambda: DemonstrationWriter(DemonstrationStorage()), "cut_after_reward", [1, None]),
    (lambda: GeneralizedAdvantages(0.9), "lmbda", [-1, 1.1, NAN]),
    (lambda: GeneralizedAdvantages(0.9), "reward_key", [3, ()]),
    (lambda: PPOModule(), "clip_epsilon", [-1, NAN, "1"]),  # a registered buffer, which PyTorch does not replace
    (lambda: PPOModule(), "entropy_coeff", [NAN, "1"]),
    (lambda: PPOModule(), "target_kl", [0, -1, NAN, "1"]),
    (lambda: PPOModule(), "critic_coeff", [NAN, "1"]),
    (lambda: PPOModule(), "max_grad_norm", [0, -1, NAN]),
    (lambda: PPOModule(), "learning_rate", [0, -1, NAN, "1"]),
    (lambda: SACModule(), "gamma", [-1, 1.1, NAN]),
    (lambda: SACModule(), "tau", [-1, 1.1, NAN]),
    (lambda: SACModule(), "loss_function", ["l3", None]),
    (lambda: DQNModule(), "target_interval", [0, -1, 1.5]),
    (lambda: TD3Module(), "policy_noise", [-1, NAN]),
    (lambda: EnvironmentRecipe("CartPole-v1"), "action_repeat", [0, 1.5]),
    (lambda: EnvironmentRecipe("CartPole-v1"), "drop", [3, 1.5]),
    (lambda: EnvironmentRecipe("CartPole-v1"), "env_kwargs", [3, [1]]),
    (lambda: EnvironmentRecipe("CartPole-v1"), "observe", [3]),
    (DynamicsEnsemble, "hidden_sizes", [[0], [1.5]]),
    (data, "num_envs", [0, 1.5]),
    (data, "frames_per_batch", [0, 1.5]),
    (data, "batch_size", [0, 1.5]),
    (returns, "reward_clip", [(1, -1), (1,), (NAN, 1)]),
    (returns, "default_return", [NAN, "low"]),
    (limiter, "samples_per_insert", [0, -1, NAN, INF, "2", None]),
    (limiter, "error_buffer", [0, -1, NAN, "2", None]),
    (limiter, "min_size", [0, -1, 1.5, "2"]),
    (RateLimiter, "samples_per_insert", [2.0]),  # without an error_buffer
    (RateLimiter, "error_buffer", [8.0]),
    (lambda: RewardScale(10.0), "clip", [0, -1, NAN, "1"]),
    (lambda: RewardScale(10.0), "epsilon", [-1, NAN, INF, "1"]),
    (lambda: ObservationNormalizer(SPECS, True, 10.0), "clip", [0, -1, NAN, "1"]),
    (lambda: ObservationNormalizer(SPECS, True, 10.0), "epsilon", [-1, NAN, INF, "1"]),
    (lambda: FrameStackTransform(2), "frame_stack", [0, -1, 1.5, "2"]),
    (lambda: FrameStackTransform(2), "keys", [[3], 3]),
    (lambda: DemonstrationWriter(DemonstrationStorage()), "threshold", [NAN, INF, "1", None]),
    (lambda: IntrinsicRewardNormalizer(0.9), "direction", ["sideways", None]),
    (lambda: BufferReport("page.html"), "last", [0, 1.5]),
    (lambda: EpisodeVideo("films"), "every_n_evaluations", [0, 1.5, None]),
    (RolloutMetricsLogger, "every_n_epochs", [0, 1.5, None]),
    (FramesProgressBar, "refresh_every", [-1, NAN, INF, "1"]),
    (lambda: StopAtScore(1.0), "stopping_threshold", [NAN, "1", True, None]),
    (collector, "total_frames", [0, -2, 1.5, "1"]),
    (collector, "reset_at_each_batch", [1, None]),
    (collector, "init_random_frames", [-1, 1.5, None]),
    (collector, "exploration_type", ["sometimes", 3]),
    (collector, "return_same_td", [1, None]),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        pytest.param(make, name, value, id=f"{type(make()).__name__}-{name}-{value}")
        for make, name, values in SETTERS
        for value in values
    ],
)
def test_rejected_value_changes_nothing(make: Callable[[], Any], name: str, value: Any) -> None:
    part = make()
    before = getattr(part, name)
    has_state = hasattr(part, "load_state_dict") and not isinstance(part, torch.nn.Module | ReplayDataModule)
    state = part.state_dict() if has_state else {}
    with pytest.raises(
        (ValueError, TypeError, AttributeError), match="key" if name.endswith(("key", "keys")) else name
    ):
        setattr(part, name, value)
    assert getattr(part, name) == before
    if has_state:
        assert not differences(state, part.state_dict())
        make().load_state_dict(part.state_dict())


@pytest.mark.parametrize("batch_length", [None, 2])
@pytest.mark.parametrize("alpha", [2.0, 1e300])
@pytest.mark.parametrize("stored", [True, False])
def test_overflowing_alpha_changes_nothing(batch_length: int | None, alpha: float, stored: bool) -> None:
    def make() -> ExperienceBuffer:
        return ring(4, sampler=PrioritizedSampler(4, 0.5, dtype="float32", batch_length=batch_length))

    buffer = make()
    cells = buffer.extend(numbered(3))
    buffer.update_priority(
        cells[-1:] if batch_length else cells, torch.tensor([1.0, 4.0, 1e25][-len(cells[-1:]) :])[-1:]
    )
    if not stored:  # new data still get the highest priority so far
        buffer.extend(numbered(4))
        buffer.update_priority(torch.arange(4), torch.ones(4))
    sampler = buffer.sampler
    before, state = sampler.table.leaves.clone(), buffer.state_dict()
    with pytest.raises(ValueError, match="alpha"):
        sampler.alpha = alpha
    assert sampler.alpha == 0.5
    assert torch.equal(sampler.table.leaves, before)
    assert not differences(state, buffer.state_dict())
    make().load_state_dict(buffer.state_dict())
    buffer.update_priority(cells[:1], torch.tensor([4.0]))
    assert sampler.table.leaves[0] in (2.0, 0.0)


def test_changed_ratio_is_used() -> None:
    part = limiter()
    part.inserted, part.drawn = 8, 0
    assert not part.admits_insert(8)
    part.samples_per_insert = 0.5
    assert part.admits_insert(8)
    with pytest.raises(ValueError, match="samples_per_insert"):
        part.samples_per_insert = INF
    assert part.samples_per_insert == 0.5
    assert part.admits_insert(8)


def test_changed_values_take_effect() -> None:
    flag = torch.zeros(6, 1, dtype=torch.bool)
    data = TensorDict({"t": torch.arange(6), "next": {"reward": torch.ones(6, 1), "done": flag}}, [6])
    buffer = ring(8, n_steps=2, gamma=0.5, data=data)
    buffer.gamma = 0.25
    assert buffer.sample(64)["next", "reward"].max() == 1.25
    sampler = SequenceSampler(4)
    windows = ring(8, sampler=sampler, data=data)
    sampler.episode_ends, sampler.batch_length, sampler.burn_in = "pad", 5, 1
    batch = windows.sample(64)
    assert batch.shape == (64, 5)
    assert not batch["mask"].all()
    part = returns()
    part.default_return = -7.0
    assert part.with_default(data.update({"next": {"terminated": flag}}))["discounted_return"].unique().tolist() == [-7]
