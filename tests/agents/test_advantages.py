"""The learner standardises the advantages of each mini-batch, unless the buffer standardised the rollout."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.fake_data import FakeData
from kit.runs import trainer
from torchrl_lightning import (
    A2CModule,
    ActorCriticModule,
    GAEBuffer,
    MLPNetwork,
    OnPolicyDataModule,
    PPOBuffer,
    PPODBuffer,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
    VanillaOnPolicyBuffer,
    VTraceBuffer,
    VTraceModule,
)


class Seen(PPOModule):
    """Store the advantages that the loss reads."""

    advantages: list[Tensor]

    def advantage(self, batch: Any) -> Tensor:
        advantage = super().advantage(batch)
        self.advantages.append(advantage.detach().clone())
        return advantage


def learned_from(buffer: Any, network: Any = None, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = Seen(network or MLPNetwork([8]), **options)
    module.advantages = []
    data = OnPolicyDataModule(
        "CartPole-v1", buffer=buffer, num_envs=4, frames_per_batch=128, num_mini_batch=4, num_epochs=1, seed=1
    )
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=data)
    assert len(module.advantages) == 4
    return module.advantages


def is_standard(advantage: Tensor) -> bool:
    moments = torch.stack((advantage.mean(), advantage.std()))
    return torch.allclose(moments, torch.tensor([0.0, 1.0]), atol=1e-2)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{each.__name__: (each, {}) for each in (VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer, PPODBuffer)},
    "PPOBuffer": (partial(PPOBuffer, obs_dim=None, act_dim=None, batch_size=8), {}),
    "recurrent": (GAEBuffer, {"network": RecurrentNetwork(hidden_size=8)}),
    "intrinsic": (GAEBuffer, {"intrinsic": RandomNetworkDistillation()}),
    "several critics": (GAEBuffer, {"critics": ["a", "b"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_advantages_are_standardised_once(case: str) -> None:
    buffer, options = CASES[case]
    batches = learned_from(buffer, **options)
    assert options or is_standard(torch.cat(batches))  # a sum of several standardised streams is not standardised
    assert not any(is_standard(batch) for batch in batches)
    batches = learned_from(partial(buffer, standardize_advantages=False), **options)
    assert all(is_standard(batch) for batch in batches)


def test_advantages_stay_unchanged_with_false() -> None:
    batches = learned_from(partial(GAEBuffer, standardize_advantages=False), normalize_advantage=False)
    assert not is_standard(torch.cat(batches))
    assert not any(is_standard(batch) for batch in batches)


def test_normalize_advantage_false_with_a_standardising_buffer_raises() -> None:
    with pytest.raises(ValueError, match=r"normalize_advantage.*GAEBuffer.*standardize_advantages=False"):
        learned_from(GAEBuffer, normalize_advantage=False)


def test_normalize_advantage_true_with_a_standardising_buffer_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchrl_lightning"):
        batches = learned_from(GAEBuffer, normalize_advantage=True)
    assert all(is_standard(batch) for batch in batches)
    (warning,) = [record.message for record in caplog.records if "normalize_advantage" in record.message]
    assert "standardize_advantages" in warning


@pytest.mark.parametrize("learner", [A2CModule, VTraceModule])
def test_advantages_of_other_modules_are_standardised_by_the_buffer(learner: type[ActorCriticModule]) -> None:
    data = OnPolicyDataModule("CartPole-v1", num_envs=4, frames_per_batch=64, num_mini_batch=2, num_epochs=1, seed=1)
    trainer(max_epochs=1, limit_val_batches=0).fit(learner(MLPNetwork([8])), datamodule=data)


@pytest.mark.parametrize(("normalize", "expected"), [(None, True), (True, True), (False, False)])
def test_mini_batches_of_unknown_data_are_standardised(normalize: bool | None, expected: bool) -> None:
    module = Seen(MLPNetwork([8]), normalize_advantage=normalize)
    module.advantages = []
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=FakeData())
    assert [is_standard(advantage) for advantage in module.advantages] == [expected] * 3
