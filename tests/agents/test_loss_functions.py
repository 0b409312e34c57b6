"""The losses equal TorchRL's losses in values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, MultiCategorical
from torchrl.objectives import A2CLoss, ClipPPOLoss, LossModule, ReinforceLoss
from torchrl.objectives.common import AUTO_LOSS_MASK_KEYS

from kit.specs import specs_of
from torchrl_lightning.agents import (
    A2CModule,
    ActorCriticModule,
    MLPNetwork,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
    ReinforceModule,
    clipped_surrogate_loss,
    critic_loss,
    policy_gradient_loss,
)
from torchrl_lightning.agents.loss_functions import kl_estimate, margin_loss

ACTIONS = {
    "discrete": Categorical(3),
    "multi-discrete": MultiCategorical([2, 3]),
    "box": Bounded(-torch.ones(2), torch.ones(2)),
    "tanh": Bounded(-torch.ones(2), torch.ones(2)),
}


def setting(
    cls: type[ActorCriticModule], action: str, network: Any = None, shape: tuple[int, ...] = (256,), **kwargs: Any
) -> tuple[ActorCriticModule, TensorDict]:
    torch.manual_seed(0)
    kwargs["distribution"] = "tanh_normal" if action == "tanh" else "auto"
    module = cls(network, **kwargs).build(specs_of(ACTIONS[action]))
    batch = TensorDict({"observation": torch.randn(*shape, 4)}, shape)
    if module.policy.trunk.recurrent:
        batch["recurrent_state"] = torch.randn(*shape, 1, 8)
        batch["is_init"] = torch.rand(*shape, 1) < 0.1
    with torch.no_grad():
        module.critic(module.policy(batch))
        batch = batch.exclude("next")
        batch["action_log_prob"] += 0.3 * torch.randn(shape)
    for name in ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target"):
        batch[name] = torch.randn(*shape, 1)
    return module, batch


def compare(module: ActorCriticModule, batch: TensorDict, torchrl: type[LossModule], **kwargs: Any) -> None:
    parameters = [*module.policy.parameters(), *module.critic.parameters()]
    results: list[Any] = []
    for terms in (module.losses, torchrl(module.policy, module.critic, functional=False, **kwargs)):
        torch.manual_seed(5)
        out: Any = terms(batch.copy())
        total = sum(value for key, value in out.items() if key.startswith("loss_"))
        results.append((out, torch.autograd.grad(total, parameters)))
    (mine, my_gradients), (theirs, their_gradients) = results
    shared = set(mine.keys()) & set(theirs.keys())
    assert {key for key in theirs.keys() if key.startswith("loss_")} <= shared  # noqa: SIM118
    if "kl_approx" in shared:  # TorchRL's estimate is the mean of the negative log-ratio
        shared.remove("kl_approx")
        torch.testing.assert_close(mine["kl_approx_k1"], theirs["kl_approx"], rtol=1e-6, atol=1e-6)
    for key in shared:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-6, atol=1e-6)
    for a, b in zip(my_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("clip_value", "kind"), [(None, "l2"), (0.2, "l2"), (None, "smooth_l1"), (0.1, "l1")])
def test_ppo_loss_equals_torchrl(action: str, normalize: bool, clip_value: float | None, kind: str) -> None:
    kwargs: dict[str, Any] = {
        "clip_epsilon": 0.2,
        "entropy_coeff": 0.02,
        "critic_coeff": 0.5,
        "loss_critic_type": kind,
        "clip_value": clip_value,
        "normalize_advantage": normalize,
    }
    compare(*setting(PPOModule, action, **kwargs), ClipPPOLoss, **kwargs)


@pytest.mark.parametrize("action", ["discrete", "multi-discrete", "box"])
def test_a2c_loss_equals_torchrl(action: str) -> None:
    kwargs: dict[str, Any] = {"entropy_coeff": 0.02, "critic_coeff": 0.7, "loss_critic_type": "l2"}
    compare(*setting(A2CModule, action, **kwargs), A2CLoss, **kwargs)


def test_reinforce_loss_equals_torchrl() -> None:
    compare(*setting(ReinforceModule, "discrete"), ReinforceLoss, loss_critic_type="l2")


@pytest.mark.parametrize("network", [MLPNetwork([8], shared=True), RecurrentNetwork(hidden_size=8)])
def test_ppo_loss_with_a_shared_trunk_equals_torchrl(network: Any) -> None:
    shape = (6, 10) if isinstance(network, RecurrentNetwork) else (60,)
    kwargs: dict[str, Any] = {
        "entropy_coeff": 0.02,
        "critic_coeff": 0.5,
        "loss_critic_type": "l2",
        "normalize_advantage": False,
    }
    compare(*setting(PPOModule, "discrete", network, shape, **kwargs), ClipPPOLoss, **kwargs)


def test_loss_on_sequences_leaves_the_batch_unchanged() -> None:
    module, batch = setting(PPOModule, "discrete", RecurrentNetwork(hidden_size=8), (3, 5))
    before = batch.clone()
    module.losses(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def test_intrinsic_reward_adds_an_advantage_and_a_critic() -> None:
    module, batch = setting(
        PPOModule,
        "discrete",
        intrinsic=RandomNetworkDistillation(),
        extrinsic_coeff=2.0,
        intrinsic_coeff=0.5,
        normalize_advantage=False,
    )
    both = module.losses(batch)
    batch["advantage"] = 2.0 * batch["advantage"] + 0.5 * batch["intrinsic_advantage"]
    module.extrinsic_coeff, module.intrinsic_coeff = 1.0, 0.0
    torch.testing.assert_close(both["loss_objective"], module.losses(batch)["loss_objective"])
    expected = 0.5 * (batch["intrinsic_state_value"] - batch["intrinsic_value_target"]).square().mean()
    torch.testing.assert_close(both["loss_intrinsic_critic"], expected)


def test_several_critics_average_advantages_and_add_losses() -> None:
    module, batch = setting(PPOModule, "discrete", critics=["a", "b"], critic_coeff=1.0)
    advantages, targets = {x: torch.randn(256, 1) for x in "ab"}, {x: torch.randn(256, 1) for x in "ab"}
    batch = batch.exclude("advantage", "value_target")
    batch["advantage"], batch["value_target"] = TensorDict(advantages, [256]), TensorDict(targets, [256])
    terms = module.losses(batch)
    expected = sum((batch["state_value", x] - targets[x]).square().mean() for x in "ab")
    torch.testing.assert_close(terms["loss_critic"], expected)
    mean = batch.exclude("advantage").set("advantage", (advantages["a"] + advantages["b"]) / 2)
    torch.testing.assert_close(terms["loss_objective"], module.losses(mean)["loss_objective"])


def test_missing_targets_are_named() -> None:
    module, batch = setting(A2CModule, "discrete")
    with pytest.raises(KeyError, match="before_gradients"):
        module.losses(batch.exclude("value_target"))


def test_shapes_that_would_broadcast_are_refused() -> None:
    flat, column = torch.zeros(3), torch.zeros(3, 1)
    for loss in (policy_gradient_loss, critic_loss, lambda a, b: clipped_surrogate_loss(a, b, 0.2)):
        with pytest.raises(ValueError, match=r"\[3\] with \[3, 1\]"):
            loss(flat, column)


@pytest.mark.parametrize("key", AUTO_LOSS_MASK_KEYS)
@pytest.mark.parametrize("cls", [PPOModule, A2CModule, ReinforceModule])
def test_masked_batches_are_refused(cls: type[ActorCriticModule], key: Any) -> None:
    module, batch = setting(cls, "discrete")
    with pytest.raises(ValueError, match="mask"):
        module.losses(batch.set(key, torch.ones(256, 1, dtype=torch.bool)))


@pytest.mark.parametrize("one_hot", [False, True])
def test_margin_loss_compares_with_the_best_other_action(one_hot):
    torch.manual_seed(0)
    values, action = torch.randn(50, 3, 4), torch.randint(4, (50, 3))
    losses = margin_loss(values, torch.nn.functional.one_hot(action) if one_hot else action, 0.5, one_hot=one_hot)
    for row, chosen, missed in zip(
        values.view(-1, 4).tolist(), action.flatten().tolist(), losses.flatten(), strict=True
    ):
        others = [value + 0.5 * (number != chosen) for number, value in enumerate(row)]
        assert missed == pytest.approx(max(others) - row[chosen], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimate_of_the_divergence_is_never_negative(dtype: torch.dtype) -> None:
    size = torch.cat([torch.zeros(1), torch.logspace(-30, 4, 20_001, dtype=torch.float64)]).to(dtype)
    for log_ratio in (size, -size):
        estimate = kl_estimate(log_ratio)
        assert bool((estimate >= 0).all())
        wide = log_ratio.double()
        small = wide.abs() < 1e-3
        series = wide**2 / 2 + wide**3 / 6 + wide**4 / 24
        expected = torch.where(small, series, wide.expm1() - wide).to(dtype)
        torch.testing.assert_close(estimate, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("log_ratio", [100.0, 1000.0, math.inf, -math.inf])
def test_estimate_of_the_divergence_is_infinite_beyond_the_range_of_the_dtype(log_ratio: float) -> None:
    assert kl_estimate(torch.tensor([0.0, log_ratio])).tolist() == [0.0, math.inf]


def test_estimate_of_the_divergence_is_exact_on_average() -> None:
    """The expectation over the old policy is KL(old, new)."""
    old, new = (torch.randn(1000, 4, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    mean = (old.exp() * kl_estimate(new - old)).sum(-1)
    torch.testing.assert_close(mean, (old.exp() * (old - new)).sum(-1))


def test_value_clipping_takes_the_larger_distance_of_each_row() -> None:
    # The old values are 0. Clipping moves the three values closer to the target, farther away, and not at all.
    value, target = torch.tensor([[2.0], [2.0], [0.25]]), torch.tensor([[0.0], [3.0], [1.0]])
    loss = critic_loss(value, target, old_value=torch.zeros(3, 1), clip_value=0.5)
    assert float(loss) == pytest.approx((2.0**2 + 2.5**2 + 0.75**2) / 3)
    gradient = torch.autograd.grad(
        critic_loss(value.requires_grad_(), target, "l1", old_value=torch.zeros(3, 1), clip_value=0.5), value
    )[0]
    assert gradient.tolist() == pytest.approx([pytest.approx([row]) for row in (1 / 3, 0.0, -1 / 3)])
