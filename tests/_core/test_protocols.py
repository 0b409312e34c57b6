"""Objects of users may lack optional methods; existing methods are called, and their errors are raised."""

from __future__ import annotations

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from tensordict import TensorDict
from torchrl.data import RandomSampler

from kit import replay
from kit.actor_critic import TinyActorCritic, fit, rollouts
from torchrl_lightning import DQNModule, GymnasiumCollector, PPOModule, SequenceSampler
from torchrl_lightning._core.protocols import (
    CollectorApi,
    DataApi,
    EnvsApi,
    LearnerApi,
    PolicyApi,
    SamplerApi,
    SourceApi,
)


@pytest.mark.parametrize("view", [CollectorApi, DataApi, EnvsApi, LearnerApi, PolicyApi, SamplerApi, SourceApi])
def test_object_without_optional_members_has_defaults(view) -> None:
    part = object()
    assert view.of(part) == view(part)
    assert view.of(None) == view(None)


def test_plain_lightning_module_has_default_members() -> None:
    learner = LearnerApi.of(BoringModel())
    assert learner == LearnerApi(learner.part)
    assert (learner.policy, learner.critic, learner.collection_policy, learner.is_built) == (None, None, None, None)
    assert not any((learner.fit_is_over, learner.has_memory, learner.can_imagine))
    assert learner.rewritten_keys(TensorDict()) == ()


def test_policy_and_critic_are_read_at_each_use() -> None:
    module = BoringModel()
    learner = LearnerApi.of(module)
    module.policy, module.critic = (BoringModel().layer for _ in range(2))
    assert learner.policy is module.policy
    assert learner.critic is module.critic


@pytest.mark.parametrize("kind", [PPOModule, DQNModule])
def test_our_modules_build_their_networks_late(kind) -> None:
    learner = LearnerApi.of(kind())
    assert learner.is_built is False
    assert learner.training_metrics == kind.training_metrics
    with pytest.raises(RuntimeError, match="build"):
        _ = learner.policy


def test_own_collectors_flag_each_trajectory_start() -> None:
    collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=4)
    assert CollectorApi.of(collector).marks_trajectory_starts
    assert not CollectorApi.of(iter([])).marks_trajectory_starts
    assert CollectorApi.of(iter([])).metrics() == {}


def test_torchrl_samplers_draw_single_steps_of_even_rings() -> None:
    ours, theirs = SamplerApi.of(SequenceSampler(4)), SamplerApi.of(RandomSampler())
    assert (ours.supports_uneven_rings, ours.batch_length) == (True, 4)
    assert (theirs.supports_uneven_rings, theirs.batch_length) == (False, None)


def test_clock_defaults_to_the_frames_of_the_data_module() -> None:
    class Counting:
        frames = 7

    assert DataApi.of(Counting()).clock == (7, "frames")
    assert DataApi.of(object()).clock is None
    assert DataApi.of(replay.replay_data()).clock == (0, "frames")


class Mistaken(TinyActorCritic):
    def annotate(self, rollout):
        raise AttributeError("no such tensor")


class MistakenDQN(DQNModule):
    def rewritten_keys(self, batch):
        raise AttributeError("no such key")


class MistakenCollector:
    """The collector of a user, without optional methods."""

    def __init__(self, policy) -> None:
        self._inner = GymnasiumCollector("CartPole-v1", policy, num_envs=4, frames_per_batch=64)

    def __iter__(self):
        return iter(self._inner)

    def shutdown(self) -> None:
        self._inner.shutdown()


class MistakenMetrics(MistakenCollector):
    def metrics(self):
        raise AttributeError("no such metric")


class MistakenWeights(MistakenCollector):
    def update_policy_weights_(self):
        raise AttributeError("no such weights")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: fit(folder, module=Mistaken(), max_epochs=1), "no such tensor"),
        (lambda folder: fit(folder, rollouts(collector=MistakenMetrics), max_epochs=1), "no such metric"),
        (lambda folder: fit(folder, rollouts(collector=MistakenWeights), max_epochs=1), "no such weights"),
        (lambda folder: replay.fit(folder, replay.replay_data(), MistakenDQN(), max_epochs=1), "no such key"),
    ],
    ids=["annotate", "metrics", "update_policy_weights_", "rewritten_keys"],
)
def test_error_in_a_user_method_is_not_hidden(make, message, tmp_path) -> None:
    with pytest.raises(AttributeError, match=message):
        make(tmp_path)


def test_collector_with_only_rollouts_is_enough(tmp_path) -> None:
    module, _ = fit(tmp_path, rollouts(collector=MistakenCollector), max_epochs=1)
    assert module.updates == 4
