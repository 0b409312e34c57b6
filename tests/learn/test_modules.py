"""The LightningModules: updates, schedules, metrics, evaluation, resuming."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Composite, Unbounded

from kit.rollouts import estimated
from kit.runs import trainer
from learn.fakes import SPECS, FakeData
from torchrl_lightning import GAEBuffer
from torchrl_lightning.learn import (
    A2CModule,
    ActorCriticModule,
    LinearSchedule,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
    ReinforceModule,
    VTraceModule,
    agents,
)
from torchrl_lightning.learn.reports import MetricSums

MODULES = [PPOModule, A2CModule, ReinforceModule, VTraceModule]


def small(cls: type[ActorCriticModule] = PPOModule, **kwargs: Any) -> ActorCriticModule:
    torch.manual_seed(0)
    return cls(MLPNetwork([8]), **kwargs)


@pytest.mark.parametrize("cls", MODULES)
def test_fit_updates_every_parameter_and_logs_over_frames(cls: type[ActorCriticModule]) -> None:
    module = small(cls).build(SPECS)
    before = {name: value.clone() for name, value in module.named_parameters()}
    fit = trainer()
    fit.fit(module, datamodule=FakeData())
    assert all(not torch.equal(before[name], value) for name, value in module.named_parameters())
    metrics = fit.callback_metrics
    assert metrics["step"] == 200
    assert metrics["eval/return"] == 2.0
    assert metrics["eval/return_std"] == 1.0
    assert metrics["eval/length"] == 15.0
    assert metrics["eval/success"] == 0.5
    epoch = module.epoch_metrics
    assert {"train/entropy", "train/explained_variance", "train/grad_norm", "train/learning_rate"} <= epoch.keys()
    assert all(math.isfinite(value) for value in epoch.values())
    assert fit.global_step == 6


def test_loss_falls_on_a_bandit() -> None:
    """Action 1 is always better: a few updates make it likely."""
    module = small(A2CModule, learning_rate=0.05, entropy_coeff=0.0)

    class Bandit(FakeData):
        def epoch(self) -> Any:
            for batch in super().epoch():
                yield batch.set("advantage", batch["action"].float().unsqueeze(-1) * 2 - 1)

    trainer(max_epochs=10).fit(module, datamodule=Bandit())
    td = TensorDict({"observation": torch.randn(64, 4)}, [64])
    assert module.policy.get_dist(td).probs[:, 1].mean() > 0.9


@pytest.mark.parametrize("cls", MODULES)
def test_state_dict_holds_each_tensor_once(cls: type[ActorCriticModule]) -> None:
    for network in (MLPNetwork([8]), MLPNetwork([8], shared=True)):
        state = cls(network).build(SPECS).state_dict()
        pointers = [value.data_ptr() for value in state.values() if value.numel() > 1]
        assert len(pointers) == len(set(pointers))


def resumable(**kwargs: Any) -> PPOModule:
    torch.manual_seed(0)
    intrinsic = RandomNetworkDistillation(MLPNetwork([8]), embedding_size=4, update_fraction=0.5)
    return PPOModule(
        MLPNetwork([8]), intrinsic=intrinsic, schedule="linear", entropy_coeff=0.1, entropy_schedule="cosine", **kwargs
    )


def test_schedules_follow_the_frames() -> None:
    module = small(learning_rate=1e-2, schedule="linear", entropy_coeff=0.1, entropy_schedule=LinearSchedule(0.5))
    rates, coefficients, clips = [], [], []

    class Recorder(FakeData):
        def epoch(self) -> Any:
            rates.append(module.optimizers().param_groups[0]["lr"])
            coefficients.append(float(module.entropy_coeff))
            clips.append(float(module.clip_epsilon))
            yield from super().epoch()

    trainer(max_epochs=4).fit(module, datamodule=Recorder())
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert coefficients == pytest.approx([0.1, 0.0875, 0.075, 0.0625])
    assert clips == pytest.approx([0.2] * 4)


def test_target_kl_leaves_out_the_rest_of_the_epoch_only() -> None:
    module, fit = small(target_kl=1e-9, learning_rate=0.5), trainer(max_epochs=3)
    fit.fit(module, datamodule=FakeData(batches=5))
    # Each epoch's first batch is fresh (no divergence yet); the step that follows moves far.
    assert 3 <= fit.global_step < 15


class Replaying(FakeData):
    """Half of the steps are a demonstration's, stored with a log-probability of 0."""

    def epoch(self) -> Any:
        for batch in super().epoch():
            mask = torch.arange(len(batch))[:, None] % 2 == 0
            batch["demo"] = TensorDict({"mask": mask}, batch.batch_size)
            batch["action_log_prob"][mask[:, 0]] = 0.0
            yield batch


def test_replayed_steps_do_not_say_how_far_the_policy_moved() -> None:
    module, fit = small(target_kl=0.01, learning_rate=1e-9), trainer(max_epochs=2)
    fit.fit(module, datamodule=Replaying(batches=5))
    assert fit.global_step == 10
    assert abs(module.epoch_metrics["train/kl_approx"]) < 1e-5
    assert module.epoch_metrics["train/clip_fraction"] == 0.0


@pytest.mark.parametrize(
    ("cls", "names"), [(PPOModule, ["kl_approx", "clip_fraction"]), (A2CModule, ["ratio_deviation"])]
)
@pytest.mark.parametrize("batch_size", [[12], [3, 4]])
def test_divergences_are_means_over_the_steps_of_the_agent(cls: Any, names: list[str], batch_size: list[int]) -> None:
    module, batch = small(cls).build(SPECS), TensorDict({"observation": torch.randn(*batch_size, 4)}, batch_size)
    with torch.no_grad():
        module.policy(batch)
    batch["action_log_prob"] += 0.3 * torch.randn(batch_size)
    for name in ("advantage", "value_target"):
        batch[name] = torch.randn(*batch_size, 1)
    mask = torch.rand(*batch_size, 1) < 0.5
    own = module.terms(batch[~mask[..., 0]])
    batch["action_log_prob"][mask[..., 0]] = -math.inf
    batch["demo"] = TensorDict({"mask": mask}, batch_size)
    found = module.terms(batch)
    batch["demo", "mask"] = torch.ones_like(mask)
    none = module.terms(batch)
    for name in names:
        assert found[name] == pytest.approx(float(own[name]), abs=1e-6)
        assert none[name] == 0.0


def test_gradients_are_clipped() -> None:
    module = small(optimizer=partial(torch.optim.SGD, lr=1.0), max_grad_norm=1e-3).build(SPECS)
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    trainer(max_epochs=1).fit(module, datamodule=FakeData(batches=1))
    after = torch.nn.utils.parameters_to_vector(module.parameters())
    assert float((after - before).norm().detach()) == pytest.approx(1e-3, rel=1e-3)


def test_two_optimizers_share_out_all_parameters() -> None:
    module = small(optimizer=partial(torch.optim.SGD, lr=0.0), critic_optimizer=partial(torch.optim.SGD, lr=1.0))
    module.build(SPECS)
    actor = [p.clone() for p in module.policy.parameters()]
    critic = [p.clone() for p in module.critic.parameters()]
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=FakeData(batches=1))
    assert all(torch.equal(a, b) for a, b in zip(actor, module.policy.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(critic, module.critic.parameters(), strict=True))
    assert "train/critic_grad_norm" in module.epoch_metrics


def test_intrinsic_stream_trains_the_predictor_and_not_the_target() -> None:
    module = resumable().build(SPECS)
    target = [p.clone() for p in module.intrinsic.target.parameters()]
    predictor = [p.clone() for p in module.intrinsic.predictor.parameters()]
    fit = trainer()
    fit.fit(module, datamodule=FakeData())
    assert all(torch.equal(a, b) for a, b in zip(target, module.intrinsic.target.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(predictor, module.intrinsic.predictor.parameters(), strict=True))
    assert {"train/loss_intrinsic_critic", "train/loss_intrinsic_predictor"} <= module.epoch_metrics.keys()


def test_true_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match="bf16-mixed"):
        trainer(precision="64-true").fit(small(), datamodule=FakeData())


def test_mixed_precision_trains() -> None:
    fit = trainer(precision="bf16-mixed")
    fit.fit(small(), datamodule=FakeData())
    assert fit.global_step == 6


def test_what_is_missing_is_said() -> None:
    with pytest.raises(RuntimeError, match="build"):
        _ = small().policy
    with pytest.raises(ValueError, match="linear"):
        small(schedule="linaer")
    with pytest.raises(RuntimeError, match="specs"):
        trainer().fit(small(), train_dataloaders=[0], val_dataloaders=[0])


def test_building_twice_changes_nothing() -> None:
    module = small().build(SPECS)
    policy = module.policy
    assert module.build(SPECS).policy is policy


def test_metric_sums() -> None:
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


def dropping(module: Any) -> Any:
    """Put dropout behind each hidden activation."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Tanh | nn.ReLU):
                setattr(part, name, nn.Sequential(child, nn.Dropout(0.5)))
    return module.train()


def test_values_over_a_shared_trunk_are_estimated_in_evaluation_mode() -> None:
    specs = SimpleNamespace(observation=Composite(observation=Unbounded(1)), action=SPECS.action)
    module = dropping(PPOModule(MLPNetwork([32], shared=True)).build(specs))
    buffer = estimated(GAEBuffer(5, critic=module.critic))
    assert all(part.training for part in module.modules())
    module.eval()
    expected = module.critic(buffer.rollout.select("observation"))["state_value"]
    torch.testing.assert_close(buffer.rollout["state_value"], expected)


def test_rewards_for_novelty_are_estimated_in_evaluation_mode() -> None:
    rnd: Any = dropping(RandomNetworkDistillation(MLPNetwork([32], "relu")).build(SPECS))
    modes: set[bool] = set()
    rnd.target.register_forward_hook(lambda module, *_: modes.add(module.encoder.training))
    rewards = []
    for _ in range(2):
        rollout = TensorDict({"next": {"observation": torch.arange(32.0).view(4, 2, 4)}}, [4, 2])
        rnd.count.zero_()
        rnd.annotate(rollout)
        rewards.append(rollout["next", "intrinsic_reward"])
    assert torch.equal(*rewards)
    rnd.loss(rollout)
    assert modes == {False}
    assert all(part.training for part in rnd.modules())


@pytest.mark.parametrize("cls", [A2CModule, PPOModule, ReinforceModule])
def test_a_compiled_loss_gives_the_same(cls: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by dynamo in one piece, not compiled: that would take a minute."""
    monkeypatch.setattr(agents, "compiled", lambda function: torch.compile(function, backend="eager", fullgraph=True))
    batch = TensorDict({"observation": torch.randn(16, 4)}, [16])
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = cls(MLPNetwork([8]), compile=compiled).build(SPECS)
        with torch.no_grad():
            module.critic(module.policy(batch))
        batch["advantage"], batch["value_target"] = torch.randn(2, 16, 1).unbind(0)
        results.append(module.compute(batch))
    torch.testing.assert_close(results[0], results[1])
