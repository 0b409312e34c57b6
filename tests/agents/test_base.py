"""Common behaviour of all agents: fits, metrics, optimizers, precision, compiled losses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.fake_data import FakeData
from kit.learners import NETWORKS, OFF_POLICY, ON_POLICY, SPECS, data_of, learner
from kit.runs import trainer
from kit.transitions import transitions
from torchrl_lightning.agents import MLPNetwork, base
from torchrl_lightning.agents.transitions import read_transitions

CASES = [*((case, "mlp") for case in ON_POLICY), *((case, network) for case in OFF_POLICY for network in NETWORKS)]


@pytest.mark.parametrize(("case", "network"), CASES)
def test_fit_moves_every_parameter_and_logs_over_frames(case: str, network: str) -> None:
    module, data, run = learner(case, network, learning_rate=0.01), data_of(case), trainer()
    before = {name: value.clone() for name, value in module.named_parameters()}
    run.fit(module, datamodule=data)
    assert before
    assert all(not torch.equal(before[name], value) for name, value in module.named_parameters())
    logged, epoch = run.callback_metrics, module.last_epoch_metrics
    assert [logged[f"eval/{name}"] for name in ("return", "return_std", "length", "success")] == [2.0, 1.0, 15.0, 0.5]
    assert "step" not in logged
    assert run.global_step == 6
    assert all(math.isfinite(value) for value in epoch.values())
    if case in ON_POLICY:
        assert {"train/entropy", "train/explained_variance", "train/grad_norm", "train/learning_rate"} <= epoch.keys()
        return
    assert any(name.startswith("targets.") for name in before)
    assert {"train/value", "train/learning_rate", "train/exploration"} <= epoch.keys()
    assert epoch["train/updates"] == 6
    for batch in data.served:
        assert batch["td_error"].shape == batch.shape
        assert not batch["td_error"].requires_grad
        assert (batch["td_error"] >= 0).all()


@pytest.mark.parametrize(("case", "network"), [*CASES, *((case, MLPNetwork([8], shared=True)) for case in ON_POLICY)])
def test_state_dict_holds_each_tensor_once(case: str, network: Any) -> None:
    pointers = [value.data_ptr() for value in learner(case, network).state_dict().values() if value.numel() > 1]
    assert len(pointers) == len(set(pointers))


@pytest.mark.parametrize("case", SPECS)
def test_module_raises_before_it_is_built_once(case: str) -> None:
    module = learner(case)
    policy = module.policy
    assert module.build(SPECS[case]).policy is policy
    with pytest.raises(RuntimeError, match="build"):
        _ = type(module)().policy


@pytest.mark.parametrize(("case", "critics", "count"), [("ppo", "critic", 2), ("sac", "critics", 3)])
def test_critics_may_have_an_optimizer_of_their_own(case: str, critics: str, count: int) -> None:
    still, moving = (partial(torch.optim.SGD, lr=rate) for rate in (0.0, 0.1))
    more = {"alpha_optimizer": still} if case == "sac" else {}
    module, run = learner(case, optimizer=still, critic_optimizer=moving, max_grad_norm=0.5, **more), trainer()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    critic_parameters, before = (
        set(getattr(module, critics).parameters()),
        [parameter.clone() for parameter in parameters],
    )
    run.fit(module, datamodule=data_of(case))
    assert len(run.optimizers) == count
    moved = {parameter for parameter, old in zip(parameters, before, strict=True) if not torch.equal(parameter, old)}
    assert moved == critic_parameters
    assert "train/critic_grad_norm" in module.last_epoch_metrics


def test_gradients_are_clipped() -> None:
    module = learner("ppo", optimizer=partial(torch.optim.SGD, lr=1.0), max_grad_norm=1e-3)
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    trainer(max_epochs=1).fit(module, datamodule=FakeData(1))
    after = torch.nn.utils.parameters_to_vector(module.parameters())
    assert float((after - before).norm().detach()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("case", ["ppo", "sac"])
def test_precision_other_than_mixed_is_refused(case: str) -> None:
    run = trainer(precision="bf16-mixed")
    run.fit(learner(case), datamodule=data_of(case))
    assert run.global_step == 6
    with pytest.raises(ValueError, match="bf16-mixed"):
        trainer(precision="64-true").fit(learner(case), datamodule=data_of(case))


def computed_from(case: str, module: Any) -> Any:
    """Build the input of a module's losses."""
    if case in OFF_POLICY:
        return read_transitions(transitions(SPECS[case], 16), ["observation"], 0.9)
    batch = TensorDict({"observation": torch.randn(16, 4)}, [16])
    with torch.no_grad():
        module.critic(module.policy(batch))
    batch["advantage"], batch["value_target"] = torch.randn(2, 16, 1).unbind(0)
    return batch


@pytest.mark.parametrize("case", ["a2c", "ppo", "reinforce", *OFF_POLICY])
def test_compiled_loss_equals_the_loss(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo only traces the losses, on-policy losses without a graph break; a compilation would take a minute."""
    options = {"backend": "eager", "fullgraph": case in ON_POLICY}
    monkeypatch.setattr(base, "compiled", lambda function: torch.compile(function, **options))
    results = []
    for compiled in (False, True):
        module = learner(case, compile=compiled)
        torch.manual_seed(1)
        batch = computed_from(case, module)
        torch.manual_seed(2)
        results.append(module.compute(batch))
    torch.testing.assert_close(results[0], results[1])
