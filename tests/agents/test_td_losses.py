"""The direct off-policy forwards return TorchRL's losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Unbounded
from torchrl.envs import MultiStepTransform
from torchrl.modules import TanhNormal
from torchrl.objectives import DQNLoss, LossModule, SACLoss, SoftUpdate, TD3Loss, ValueEstimators

from kit.specs import BOX, DISCRETE, ONE_HOT, specs_of
from kit.transitions import shake_targets, transitions
from torchrl_lightning.agents import CNNNetwork, DQNModule, MLPNetwork, OffPolicyModule, SACModule, TD3Module
from torchrl_lightning.agents.networks.q_networks import ActionValue, CriticEnsemble, build_action_critic
from torchrl_lightning.agents.networks.squashed import SquashedHead
from torchrl_lightning.agents.transitions import read_transitions

EXTRAS = ["plain", "weights", "mask", "weights and mask", "n-step"]
CASES = {
    "dqn": (DQNModule, DISCRETE, {"double": False}),
    "double dqn": (DQNModule, DISCRETE, {}),
    "dueling dqn": (DQNModule, DISCRETE, {"dueling": True, "loss_function": "l2"}),
    "one-hot dqn": (DQNModule, ONE_HOT, {}),
    "sac": (SACModule, BOX, {}),
    "sac, three critics": (SACModule, BOX, {"num_critics": 3, "loss_function": "smooth_l1", "alpha": 0.3}),
    "sac, fixed alpha": (SACModule, BOX, {"learn_alpha": False, "alpha": 0.2}),
    "td3": (TD3Module, BOX, {}),
    "td3, one critic": (TD3Module, BOX, {"num_critics": 1, "loss_function": "l1", "policy_noise": 1.0}),
}


def make(case: str) -> tuple[OffPolicyModule, Any]:
    torch.manual_seed(0)
    cls, specs, kwargs = CASES[case]
    module = cls(MLPNetwork([32, 32], "relu"), **kwargs).build(specs)
    shake_targets(module)
    return module, specs


def torchrls(module: Any, specs: Any) -> LossModule:
    """Build TorchRL's loss over the module's networks and targets."""
    if isinstance(module, DQNModule):
        options = {"double_dqn": module.double_q, "delay_value": True, "action_space": module.q_network.action_space}
        loss: Any = DQNLoss(module.q_network, loss_function=module.loss_function, **options)
        SoftUpdate(loss, eps=0.5)  # TorchRL warns if nothing updates the targets
        loss.target_value_network_params.data.update_(TensorDict.from_module(module.targets.q_network).data)
    else:
        critics = [build_action_critic(specs, module.network) for _ in range(module.num_critics)]
        common = {"num_qvalue_nets": len(critics), "loss_function": module.loss_function}
        if isinstance(module, SACModule):
            loss = SACLoss(
                module.actor_network,
                critics,
                alpha_init=float(module.log_alpha.detach().exp()),
                fixed_alpha=not isinstance(module.log_alpha, torch.nn.Parameter),
                target_entropy=module.target_entropy,
                **common,
            )
        else:
            head = module.actor_network.head
            bounds = (head.center - head.half_range, head.center + head.half_range)
            loss = TD3Loss(module.actor_network, critics, bounds=bounds, **common)
            # TorchRL expects both in units of the action.
            del loss.policy_noise, loss.noise_clip
            loss.policy_noise = module.policy_noise * head.half_range
            loss.noise_clip = module.noise_clip * head.half_range
        SoftUpdate(loss, eps=0.5)
        if isinstance(module, TD3Module):
            loss.target_actor_network_params.data.update_(TensorDict.from_module(module.targets.actor_network).data)
        for ours, theirs in (
            (module.critics, loss.qvalue_network_params),
            (module.targets.critics, loss.target_qvalue_network_params),
        ):
            for mine, stacked in zip(stacks(ours), trained_parameters(theirs), strict=True):
                stacked.data.copy_(mine.data.mT if mine.shape[1] > 1 else mine.data.squeeze(1))
    loss.loss_mask_key = "mask"
    loss.make_value_estimator(ValueEstimators.TD0, gamma=module.gamma)
    return loss


def stacks(critics: CriticEnsemble) -> list[torch.Tensor]:
    """Return weight and bias of each layer, ``[N, in, out]`` and ``[N, 1, out]``."""
    return [tensor for pair in zip(critics.weights, critics.biases, strict=True) for tensor in pair]


def trained_parameters(parameters: Any) -> list[torch.Tensor]:
    """Return weight and bias of each layer of TorchRL's stacked parameters."""
    layers = sorted({key[:-1] for key in parameters.keys(True, True) if key[-1] == "weight"})
    return [parameters[(*layer, name)] for layer in layers for name in ("weight", "bias")]


def pairs(module: Any, loss: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return our parameters and TorchRL's, in one order."""
    if isinstance(module, DQNModule):
        return list(module.q_network.parameters()), list(loss.value_network_params.parameters())
    ours = [*module.actor_network.parameters(), *stacks(module.critics)]
    theirs = [*loss.actor_network_params.parameters(), *trained_parameters(loss.qvalue_network_params)]
    if isinstance(getattr(module, "log_alpha", None), torch.nn.Parameter):
        ours, theirs = [*ours, module.log_alpha], [*theirs, loss.log_alpha]
    return ours, theirs


def with_extras(batch: TensorDict, extras: str) -> TensorDict:
    size = batch.shape[0]
    if "weights" in extras:
        batch["priority_weight"] = torch.rand(size) + 0.1
    if "mask" in extras:
        batch["mask"] = torch.rand(size) < 0.7
    if extras == "n-step":
        batch["steps_to_next_obs"] = torch.randint(1, 4, (size,))
    return batch


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("extras", EXTRAS)
def test_losses_and_gradients_equal_torchrls(case: str, extras: str) -> None:
    module, specs = make(case)
    loss = torchrls(module, specs)
    batch = with_extras(transitions(specs, 64), extras)
    torch.manual_seed(3)
    mine, error = module.losses(read_transitions(batch, ["observation"], module.gamma))
    torch.manual_seed(3)
    theirs = loss(batch)
    mine = {name: value for name, value in mine.items() if name.startswith("loss_")}
    names = {"loss": "loss_value"}
    theirs = {names.get(name, name): value for name, value in theirs.items() if name.startswith("loss")}
    if getattr(loss, "fixed_alpha", False):
        theirs.pop("loss_alpha")  # nothing learns from it
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-6)
    parameters = pairs(module, loss)
    gradients = [
        torch.autograd.grad(sum(terms.values()), own) for terms, own in zip((mine, theirs), parameters, strict=True)
    ]
    for ours, expected in zip(*gradients, strict=True):
        if ours.ndim == 3:
            ours = ours.mT if ours.shape[1] > 1 else ours.squeeze(1)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    # Our TD error is absolute; TorchRL's DQN and TD3 write its square.
    written = batch["td_error"].reshape(-1)
    expected = written if case.startswith("sac") else written.sqrt()
    counted = batch.get("mask", torch.ones(64, dtype=torch.bool))
    torch.testing.assert_close(error[counted], expected[counted], rtol=1e-5, atol=1e-6)
    assert (error[~counted] == 0).all()


@pytest.mark.parametrize("case", ["dqn", "sac", "td3"])
def test_masked_steps_do_not_change_the_loss(case: str) -> None:
    module, specs = make(case)
    batch = with_extras(transitions(specs, 64), "mask")
    results = []
    for filler in (0.0, torch.nan):
        batch["next", "reward"][~batch["mask"]] = filler
        torch.manual_seed(3)
        terms, error = module.losses(read_transitions(batch, ["observation"], 0.9))
        total = sum(value for name, value in terms.items() if name.startswith("loss_"))
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        results.append([total, error, *torch.autograd.grad(total, parameters)])
    for clean, hidden in zip(*results, strict=True):
        assert torch.equal(clean, hidden)


def test_critics_with_convolutions_run_in_sequence() -> None:
    specs = specs_of(BOX.action, pixels=Unbounded((1, 12, 12)), vector=Unbounded(3))
    network = CNNNetwork(channels=[4], kernels=[4], strides=[2], hidden_sizes=[8])
    torch.manual_seed(0)
    critics = [ActionValue(specs, network) for _ in range(2)]
    ensemble = CriticEnsemble(critics)
    entries = [torch.rand(6, 1, 12, 12), torch.randn(6, 3)]
    action = torch.rand(6, 2, requires_grad=True)
    values = ensemble(entries, action)
    expected = torch.stack([critic(*entries, action).squeeze(-1) for critic in critics])
    torch.testing.assert_close(values, expected)
    values = ensemble.q_values(entries, action)
    torch.testing.assert_close(values, expected)
    assert torch.equal(ensemble.q_values(entries, action, 1), values[:1])
    gradients = torch.autograd.grad(values.sum(), [action, *ensemble.parameters()], allow_unused=True)
    torch.testing.assert_close(gradients[0], torch.autograd.grad(expected.sum(), action)[0])
    assert gradients[1:] == (None,) * (len(gradients) - 1)
    module = SACModule(network).build(specs)
    batch = transitions(BOX, 6).exclude("observation", ("next", "observation"))
    for step in (batch, batch["next"]):
        step["pixels"], step["vector"] = entries
    terms, _ = module.losses(read_transitions(batch, ["pixels", "vector"], 0.99))
    (terms["loss_qvalue"] + terms["loss_actor"]).backward()
    assert all(parameter.grad is not None for parameter in module.critics.parameters())


def test_squashed_samples_and_log_probabilities_equal_torchrl() -> None:
    torch.manual_seed(0)
    head = SquashedHead(8, BOX.action)
    loc, std = 3.0 * torch.randn(100, 2, requires_grad=True), torch.rand(100, 2) + 0.1
    torch.manual_seed(1)
    action, log_prob = head.rsample((loc, std))
    dist = TanhNormal(loc, std, low=BOX.action.space.low, high=BOX.action.space.high, event_dims=1)
    torch.manual_seed(1)
    expected_action, expected = dist.rsample_and_log_prob()
    torch.testing.assert_close(action, expected_action)
    torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.act((loc, std), deterministic=True), dist.deterministic_sample)
    assert BOX.action.is_in(action)


def test_discount_of_the_batch_has_priority() -> None:
    batch = transitions(DISCRETE, 4)
    value, reward = torch.ones(4), batch["next", "reward"].squeeze(-1)
    going_on = (~batch["next", "terminated"].squeeze(-1)).float()
    steps = torch.tensor([1, 2, 3, 1])
    batch["steps_to_next_obs"] = steps
    target = read_transitions(batch, ["observation"], 0.5).target(value)
    torch.testing.assert_close(target, reward + 0.5**steps * going_on)
    batch["gamma"] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    target = read_transitions(batch, ["observation"], 0.5).target(value)
    torch.testing.assert_close(target, reward + batch["gamma"] * going_on)


def test_n_step_targets_support_torchrl_multi_step_transform() -> None:
    """With `done_keys=[]` the flags come from the same step as the successor."""
    rollout = transitions(DISCRETE, 1, 6)
    done = torch.tensor([False, False, True, False, False, False]).reshape(1, 6, 1)
    rollout["next", "done"], rollout["next", "terminated"] = done, done
    rollout["next", "truncated"] = torch.zeros_like(done)
    batch = MultiStepTransform(n_steps=3, gamma=0.5, done_keys=[]).inv(rollout)[0]
    reward = rollout["next", "reward"].flatten()
    target = read_transitions(batch, ["observation"], 0.5).target(torch.full((3,), 8.0))
    torch.testing.assert_close(target[0], reward[0] + 0.5 * reward[1] + 0.25 * reward[2])  # no value after the end
    torch.testing.assert_close(target[1], reward[1] + 0.5 * reward[2])
    torch.testing.assert_close(target[2], reward[2])


def test_missing_entries_are_named() -> None:
    batch = transitions(DISCRETE, 4)
    with pytest.raises(KeyError, match="terminated"):
        read_transitions(batch.exclude(("next", "terminated")), ["observation"], 0.9)
    with pytest.raises(KeyError, match="next"):
        read_transitions(batch.exclude("next"), ["observation"], 0.9)
