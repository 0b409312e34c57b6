"""The direct forwards give TorchRL's losses and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, Unbounded
from torchrl.objectives import A2CLoss, ClipPPOLoss, LossModule, ReinforceLoss

from torchrl_lightning.learn import (
    DirectA2CLoss,
    DirectClipPPOLoss,
    DirectReinforceLoss,
    MLPNetwork,
    RecurrentNetwork,
    build_actor,
    build_critic,
)

ACTIONS = {
    "discrete": Categorical(3),
    "multi-discrete": MultiCategorical([2, 3]),
    "box": Bounded(-torch.ones(2), torch.ones(2)),
    "tanh": Bounded(-torch.ones(2), torch.ones(2)),
}


def setting(action: str, network: Any = None, keys: Any = ("state_value",), shape: tuple[int, ...] = (256,)):
    torch.manual_seed(0)
    specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=ACTIONS[action], num_envs=1)
    actor = build_actor(specs, network, distribution="tanh_normal" if action == "tanh" else "auto")
    critic = build_critic(specs, network, out_keys=keys, actor=actor)
    batch = TensorDict({"observation": torch.randn(*shape, 4)}, shape)
    if actor.is_recurrent:
        batch["recurrent_state"] = torch.randn(*shape, 1, 8)
        batch["is_init"] = torch.rand(*shape, 1) < 0.1
    with torch.no_grad():
        critic(actor(batch))
        batch = batch.exclude("next")
        batch["action_log_prob"] += 0.3 * torch.randn(shape)
    for name in ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target"):
        batch[name] = torch.randn(*shape, 1)
    return actor, critic, batch


def compare(direct: LossModule, torchrl: LossModule, batch: TensorDict) -> None:
    results = []
    for loss in (direct, torchrl):
        torch.manual_seed(5)
        out = loss(batch.copy())
        parameters = [*loss.actor_network.parameters(), *loss.critic_network.parameters()]
        total = sum(value for key, value in out.items() if key.startswith("loss_"))
        results.append((out, torch.autograd.grad(total, parameters)))
    (mine, my_gradients), (theirs, their_gradients) = results
    shared = set(mine.keys()) & set(theirs.keys())
    assert {key for key in set(theirs.keys()) if key.startswith("loss_")} <= shared
    for key in shared:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-6, atol=1e-6)
    for a, b in zip(my_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("clip_value", "kind"), [(None, "l2"), (0.2, "l2"), (None, "smooth_l1"), (0.1, "l1")])
def test_ppo(action: str, normalize: bool, clip_value: float | None, kind: str) -> None:
    actor, critic, batch = setting(action)
    kwargs: dict[str, Any] = {
        "clip_epsilon": 0.2,
        "entropy_coeff": 0.02,
        "critic_coeff": 0.5,
        "loss_critic_type": kind,
        "clip_value": clip_value,
        "normalize_advantage": normalize,
    }
    compare(DirectClipPPOLoss(actor, critic, **kwargs), ClipPPOLoss(actor, critic, functional=False, **kwargs), batch)


def test_ppo_with_another_range_on_each_side() -> None:
    actor, critic, batch = setting("discrete")
    kwargs: dict[str, Any] = {"clip_epsilon": (0.1, 0.3), "entropy_coeff": 0.02, "loss_critic_type": "l2"}
    compare(DirectClipPPOLoss(actor, critic, **kwargs), ClipPPOLoss(actor, critic, functional=False, **kwargs), batch)


@pytest.mark.parametrize("action", ["discrete", "multi-discrete", "box"])
def test_a2c(action: str) -> None:
    actor, critic, batch = setting(action)
    kwargs: dict[str, Any] = {"entropy_coeff": 0.02, "critic_coeff": 0.7, "loss_critic_type": "l2"}
    compare(DirectA2CLoss(actor, critic, **kwargs), A2CLoss(actor, critic, functional=False, **kwargs), batch)


def test_reinforce() -> None:
    actor, critic, batch = setting("discrete")
    compare(DirectReinforceLoss(actor, critic), ReinforceLoss(actor, critic, functional=False), batch)


@pytest.mark.parametrize("network", [MLPNetwork([8], shared=True), RecurrentNetwork(hidden_size=8)])
def test_ppo_with_a_shared_trunk(network: Any) -> None:
    shape = (6, 10) if isinstance(network, RecurrentNetwork) else (60,)
    actor, critic, batch = setting("discrete", network, shape=shape)
    kwargs: dict[str, Any] = {"entropy_coeff": 0.02, "critic_coeff": 0.5, "loss_critic_type": "l2"}
    compare(DirectClipPPOLoss(actor, critic, **kwargs), ClipPPOLoss(actor, critic, functional=False, **kwargs), batch)


def test_sequences_and_batch_are_left_as_they_were() -> None:
    actor, critic, batch = setting("discrete", RecurrentNetwork(hidden_size=8), shape=(3, 5))
    before = batch.clone()
    DirectClipPPOLoss(actor, critic, entropy_coeff=0.0, critic_coeff=0.5).terms(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def test_intrinsic_stream_adds_its_advantage_and_its_critic() -> None:
    actor, critic, batch = setting("discrete", keys=("state_value", "intrinsic_state_value"))
    kwargs: dict[str, Any] = {"entropy_coeff": 0.0, "critic_coeff": 0.5, "loss_critic_type": "l2"}
    both = DirectClipPPOLoss(actor, critic, extrinsic_coeff=2.0, intrinsic_coeff=0.5, **kwargs).terms(batch)
    plain = batch.copy()
    plain["advantage"] = 2.0 * batch["advantage"] + 0.5 * batch["intrinsic_advantage"]
    alone = DirectClipPPOLoss(actor, critic, **kwargs).terms(plain)
    torch.testing.assert_close(both["loss_objective"], alone["loss_objective"])
    expected = 0.5 * (batch["intrinsic_state_value"] - batch["intrinsic_value_target"]).square().mean()
    torch.testing.assert_close(both["loss_intrinsic_critic"], expected)


def test_several_critics_average_advantages_and_add_losses() -> None:
    keys = [("state_value", "a"), ("state_value", "b")]
    actor, critic, batch = setting("discrete", keys=keys)
    advantages, targets = {x: torch.randn(256, 1) for x in "ab"}, {x: torch.randn(256, 1) for x in "ab"}
    batch = batch.exclude("advantage", "value_target")
    batch["advantage"], batch["value_target"] = TensorDict(advantages, [256]), TensorDict(targets, [256])
    terms = DirectClipPPOLoss(actor, critic, entropy_coeff=0.0, critic_coeff=1.0, loss_critic_type="l2").terms(batch)
    expected = sum((batch["state_value", x] - targets[x]).square().mean() for x in "ab")
    torch.testing.assert_close(terms["loss_critic"], expected)
    mean = batch.exclude("advantage").set("advantage", (advantages["a"] + advantages["b"]) / 2)
    again = DirectClipPPOLoss(actor, critic, entropy_coeff=0.0, critic_coeff=1.0).terms(mean)
    torch.testing.assert_close(terms["loss_objective"], again["loss_objective"])


def test_missing_targets_are_named() -> None:
    actor, critic, batch = setting("discrete")
    with pytest.raises(KeyError, match="before_gradients"):
        DirectA2CLoss(actor, critic).terms(batch.exclude("value_target"))


@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid", ("my", "mask")])
def test_masked_batches_are_refused_and_not_misread(key: Any) -> None:
    actor, critic, batch = setting("discrete")
    for direct in (DirectClipPPOLoss(actor, critic), DirectA2CLoss(actor, critic), DirectReinforceLoss(actor, critic)):
        expected = direct.terms(batch)
        masked = batch.copy().set(key, torch.ones(256, 1, dtype=torch.bool))
        if key == ("my", "mask"):
            direct.loss_mask_key = key
        with pytest.raises(ValueError, match="mask"):
            direct.terms(masked)
        direct.loss_mask_key = None
        assert direct.terms(masked).keys() == expected.keys()
