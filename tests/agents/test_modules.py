"""The on-policy LightningModules: schedules, divergences, intrinsic streams, modes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Unbounded

from kit.fake_data import FakeData
from kit.learners import learner
from kit.modes import dropping
from kit.rollouts import estimated
from kit.runs import ListensToBackward, parameters, trainer
from kit.specs import TWO_CHOICES, specs_of
from torchrl_lightning import GAEBuffer
from torchrl_lightning.agents import LinearSchedule, MLPNetwork, PPOModule, RandomNetworkDistillation
from torchrl_lightning.agents.metrics import MetricSums


def test_loss_falls_on_a_bandit() -> None:
    """Action 1 is always better: a few updates make it likely."""
    module = learner("a2c", learning_rate=0.05, entropy_coeff=0.0)
    bandit = FakeData(edit=lambda batch: batch.set("advantage", batch["action"].float().unsqueeze(-1) * 2 - 1))
    trainer(max_epochs=10).fit(module, datamodule=bandit)
    td = TensorDict({"observation": torch.randn(64, 4)}, [64])
    assert module.policy.get_dist(td).probs[:, 1].mean() > 0.9


def test_schedules_follow_the_frames() -> None:
    def settings(module: Any) -> list[float]:
        return [module.optimizers().param_groups[0]["lr"], float(module.entropy_coeff), float(module.clip_epsilon)]

    data = FakeData(1, note=settings)
    schedules = {"schedule": "linear", "entropy_coeff": 0.1, "entropy_schedule": LinearSchedule(0.5)}
    trainer(max_epochs=4).fit(learner("ppo", learning_rate=1e-2, **schedules), datamodule=data)
    rates, coefficients, clips = zip(*data.noted, strict=True)
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert coefficients == pytest.approx([0.1, 0.0875, 0.075, 0.0625])
    assert clips == pytest.approx([0.2] * 4)


def test_target_kl_skips_only_the_rest_of_the_epoch() -> None:
    run = trainer(max_epochs=3)
    run.fit(learner("ppo", target_kl=1e-9, learning_rate=0.5), datamodule=FakeData(5))
    # The divergence is zero at the first batch of each epoch, and large after its update.
    assert 3 <= run.global_step < 15


def moved_by(log_ratio: Any) -> Any:
    """Edit a batch so that each probability has changed by this since the action was chosen."""
    return lambda batch: batch["action_log_prob"].sub_(torch.as_tensor(log_ratio))


RATIOS: dict[str, tuple[Any, bool]] = {
    # More probable actions: the mean of the negative log-ratio is negative.
    "all up": (0.5, True),
    "all down": (-0.5, True),
    "both, on average unchanged": (torch.tensor([0.6, -0.6]).repeat(8), True),
    "overflow": (torch.tensor([200.0] + [0.0] * 15), True),
    "impossible when it was chosen": (torch.tensor([math.inf] + [0.0] * 15), True),
    "impossible now": (torch.tensor([-math.inf] + [0.0] * 15), True),
    # The estimate is about 0.01, below 1.5 * 0.01; the mean of the negative log-ratio is 0.14.
    "a little, all down": (-0.14, False),
    "nothing": (0.0, False),
}


@pytest.mark.parametrize("hand", [False, True])
@pytest.mark.parametrize("name", RATIOS)
def test_target_kl_compares_the_estimate_of_low_variance(name: str, hand: bool) -> None:
    log_ratio, stops = RATIOS[name]
    module = learner("ppo", target_kl=0.01, learning_rate=1e-9)
    run = trainer(max_epochs=1, callbacks=[] if hand else [ListensToBackward()])
    before = parameters(module)
    run.fit(module, datamodule=FakeData(2, edit=moved_by(log_ratio)))
    assert run.global_step == (0 if stops else 2)  # it stops before the step
    assert torch.equal(parameters(module), before) == stops


@pytest.mark.parametrize("hand", [False, True])
def test_both_estimates_of_the_divergence_are_logged(hand: bool) -> None:
    module = learner("ppo", learning_rate=1e-9)
    run = trainer(max_epochs=1, callbacks=[] if hand else [ListensToBackward()])
    run.fit(module, datamodule=FakeData(2, edit=moved_by(torch.tensor([0.6, 0.2]).repeat(8))))
    expected = sum(math.exp(move) - 1.0 - move for move in (0.6, 0.2)) / 2
    assert module.last_epoch_metrics["train/kl_approx"] == pytest.approx(expected, rel=1e-4)
    assert module.last_epoch_metrics["train/kl_approx_k1"] == pytest.approx(-0.4, rel=1e-4)


@pytest.mark.parametrize("case", ["a2c", "vtrace"])
def test_distance_of_the_ratio_from_one_is_logged(case: str) -> None:
    log_ratios = [0.6, 0.2, -0.5, 0.0]
    module, batch = learner(case), TensorDict({"observation": torch.randn(4, 4)}, [4])
    with torch.no_grad():
        module.policy(batch)
    for name in ("advantage", "value_target"):
        batch[name] = torch.randn(4, 1)
    moved_by(log_ratios)(batch)
    expected = sum(abs(math.exp(log_ratio) - 1.0) for log_ratio in log_ratios) / 4
    assert float(module.losses(batch)["ratio_deviation"]) == pytest.approx(expected, rel=1e-4)


def replay_half(batch: TensorDict) -> None:
    """Mark every second step as a demonstration with a stored log-probability of 0."""
    mask = torch.arange(len(batch))[:, None] % 2 == 0
    batch["demo"] = TensorDict({"mask": mask}, batch.batch_size)
    batch["action_log_prob"][mask[:, 0]] = 0.0


def test_replayed_steps_do_not_count_in_the_divergence() -> None:
    module, run = learner("ppo", target_kl=0.01, learning_rate=1e-9), trainer()
    run.fit(module, datamodule=FakeData(5, edit=replay_half))
    assert run.global_step == 10
    assert abs(module.last_epoch_metrics["train/kl_approx"]) < 1e-5
    assert module.last_epoch_metrics["train/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("case", "names"), [("ppo", ["kl_approx", "kl_approx_k1", "clip_fraction"]), ("a2c", ["ratio_deviation"])]
)
@pytest.mark.parametrize("batch_size", [[12], [3, 4]])
def test_divergences_are_means_over_the_steps_of_the_agent(case: str, names: list[str], batch_size: list[int]) -> None:
    module, batch = learner(case), TensorDict({"observation": torch.randn(*batch_size, 4)}, batch_size)
    with torch.no_grad():
        module.policy(batch)
    batch["action_log_prob"] += 0.3 * torch.randn(batch_size)
    for name in ("advantage", "value_target"):
        batch[name] = torch.randn(*batch_size, 1)
    mask = torch.rand(*batch_size, 1) < 0.5
    expected = module.losses(batch[~mask[..., 0]])
    batch["action_log_prob"][mask[..., 0]] = -math.inf
    batch["demo"] = TensorDict({"mask": mask}, batch_size)
    terms = module.losses(batch)
    batch["demo", "mask"] = torch.ones_like(mask)
    none = module.losses(batch)
    for name in names:
        assert terms[name] == pytest.approx(float(expected[name]), abs=1e-6)
        assert none[name] == 0.0


def test_intrinsic_reward_trains_only_the_predictor() -> None:
    intrinsic = RandomNetworkDistillation(MLPNetwork([8]), embedding_size=4, update_fraction=0.5)
    module = learner("ppo", intrinsic=intrinsic)
    target, predictor = module.intrinsic.target, module.intrinsic.predictor
    before = {parameter: parameter.clone() for part in (target, predictor) for parameter in part.parameters()}
    trainer().fit(module, datamodule=FakeData())
    assert {parameter for parameter, old in before.items() if not torch.equal(parameter, old)} == {
        *predictor.parameters()
    }
    assert {"train/loss_intrinsic_critic", "train/loss_intrinsic_predictor"} <= module.last_epoch_metrics.keys()


def test_data_without_specs_are_refused() -> None:
    with pytest.raises(RuntimeError, match="specs"):
        trainer().fit(PPOModule(), train_dataloaders=[0], val_dataloaders=[0])


def test_metric_sums_return_means_and_explained_variance() -> None:
    sums = MetricSums()
    value, target = torch.randn(50, 1), torch.randn(50, 1)
    sums.add_prediction(value[:20], target[:20])
    sums.add_prediction(value[20:], target[20:])
    sums.add({"a": 1.0})
    sums.add({"a": torch.tensor(2.0), "b": 5.0})
    means = sums.flush()
    explained = 1 - (target - value).var(correction=0) / target.var(correction=0)
    assert means == pytest.approx({"a": 1.5, "b": 5.0, "explained_variance": float(explained)}, rel=1e-5)
    assert sums.flush() == {}


def test_values_over_a_shared_trunk_are_estimated_in_evaluation_mode() -> None:
    specs = specs_of(TWO_CHOICES.action, observation=Unbounded(1))
    module = dropping(PPOModule(MLPNetwork([32], shared=True)).build(specs))
    buffer = estimated(GAEBuffer(5, critic=module.critic))
    assert all(part.training for part in module.modules())
    module.eval()
    expected = module.critic(buffer.rollout.select("observation"))["state_value"]
    torch.testing.assert_close(buffer.rollout["state_value"], expected)
