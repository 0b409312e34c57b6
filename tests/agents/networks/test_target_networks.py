"""Target networks: soft updates, and evaluation mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kit.learners import data_of, learner
from kit.runs import trainer
from torchrl_lightning.agents import RecurrentNetwork
from torchrl_lightning.agents.analytic import OptimizedParameters
from torchrl_lightning.agents.networks.target_networks import TargetNetworks


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def randomize(model: nn.Module) -> None:
    model(torch.randn(8, 3))  # running means
    for parameter in model.parameters():
        nn.init.normal_(parameter)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tau", [0.3, 1.0])
def test_soft_update_moves_parameters_and_copies_running_means(flat: bool, tau: float) -> None:
    torch.manual_seed(0)
    first, second = network(), network()
    owner = nn.ModuleDict({"first": first, "second": second})
    owner["targets"] = targets = TargetNetworks({"first": first, "second": second})
    if flat:
        parts = [list(first.parameters())]
        OptimizedParameters(torch.optim.SGD(parts[0], lr=0.1), parts)
    for change in (lambda: None, lambda: owner.to(torch.float64), lambda: copy.deepcopy(owner)):
        copied = change()
        for part in (first, second):
            randomize(part.float())
        owner.float()
        before = copy.deepcopy(targets)
        targets.soft_update(tau)
        for target, old, online in zip(
            targets.parameters(), before.parameters(), [*first.parameters(), *second.parameters()], strict=True
        ):
            torch.testing.assert_close(target, old + tau * (online - old))
            assert not target.requires_grad
            assert tau < 1.0 or torch.equal(target, online)
        assert torch.equal(targets.first[1].running_mean, first[1].running_mean)
        assert targets.second[1].num_batches_tracked == second[1].num_batches_tracked
    # A copied target uses the copied networks.
    nn.init.zeros_(copied["first"][0].bias)
    copied["targets"].soft_update(1.0)
    assert copied["targets"].first[0].bias.eq(0).all()
    assert not targets.first[0].bias.eq(0).any()


def test_target_networks_run_in_evaluation_mode() -> None:
    module = learner("td3", "gru")
    modes: list[bool] = []
    for name in ("actor_network", "memory"):
        encoder = getattr(module.targets, name).get_submodule("trunk" if name == "actor_network" else "").encoder
        encoder.register_forward_hook(lambda part, *_: modes.extend(p.training for p in part.modules()))
    module.targets.critics.register_forward_hook(lambda part, *_: modes.append(part.training))
    trainer(max_epochs=1, limit_val_batches=0).fit(module.train(), datamodule=data_of("td3", 2))
    assert modes
    assert not any(modes)
    assert all(part.training for part in module.modules())
    # The targets of flattened parameters are also flattened.
    assert len({parameter.untyped_storage().data_ptr() for parameter in module.targets.parameters()}) <= 2


def test_recurrent_target_uses_updated_parameters() -> None:
    module = learner("td3", RecurrentNetwork("gru", 4))
    with torch.no_grad():
        for parameter in module.memory.parameters():
            parameter += 1.0
    module.targets.soft_update(1.0)
    x, state = torch.randn(2, 1, 4), torch.zeros(1, 2, 4)
    assert torch.equal(module.memory.memory.gru(x, state)[0], module.targets.memory.memory.gru(x, state)[0])
