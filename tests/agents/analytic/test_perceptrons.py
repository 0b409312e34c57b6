"""Compiled values of many rows equal torch's values, and torch computes all other cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from kit.specs import DISCRETE
from torchrl_lightning.agents import MLPNetwork, RecurrentNetwork, build_actor, build_critic
from torchrl_lightning.agents.analytic import compiled_values
from torchrl_lightning.agents.analytic.perceptrons import MIN_ROWS
from torchrl_lightning.agents.networks.actors import Critic

ROWS = MIN_ROWS + 3  # not a multiple of a block


def critic_of(network: Any = None, **options: Any) -> Critic:
    torch.manual_seed(0)
    critic: Critic = build_critic(DISCRETE, network or MLPNetwork([64, 64]), **options)
    for parameter in critic.parameters():
        parameter.data.mul_(2.0)
    return critic


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> TensorDict:
    observation = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDict({"observation": observation.to(dtype)}, shape)


def torchs(critic: Critic, data: TensorDict) -> list[Tensor]:
    """Return the values by autograd's path."""
    with torch.enable_grad():
        return [value.detach() for value in critic.values(data)]


def assert_equal(value: Tensor, expected: Tensor) -> None:
    """Values differ by rounding, relative to the largest value: a small value is a sum of large terms."""
    torch.testing.assert_close(value, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(ROWS,), (7, 300), (2, 3, 400)])
@pytest.mark.parametrize(
    "network", [MLPNetwork([64, 64]), MLPNetwork([32], "relu", head_sizes=[16]), MLPNetwork([200, 300])]
)
def test_values_equal_torch(network: MLPNetwork, shape: tuple[int, ...]) -> None:
    critic, data = critic_of(network), batch(*shape)
    with torch.no_grad():
        found = compiled_values(critic, data)
        written = critic(data.copy())["state_value"]
    assert found is not None
    (value,) = found
    assert value.shape == (*shape, 1)
    assert torch.equal(value, written)
    assert_equal(value, torchs(critic, data)[0])


def test_values_of_several_heads_and_of_an_actor_s_trunk_equal_torch() -> None:
    data = batch(ROWS)
    keys = ("state_value", "intrinsic_value")
    actor = build_actor(DISCRETE, MLPNetwork([64, 64]))
    for critic in (critic_of(out_keys=keys), critic_of(out_keys=keys, actor=actor)):
        with torch.no_grad():
            found = compiled_values(critic, data)
        assert found is not None
        assert len(found) == 2
        for value, expected in zip(found, torchs(critic, data), strict=True):
            assert_equal(value, expected)


def test_values_of_float64_observations_equal_torch() -> None:
    critic, data = critic_of(), batch(ROWS, dtype=torch.float64)
    with torch.no_grad():
        found = compiled_values(critic, data)
    assert found is not None
    assert_equal(found[0], torchs(critic, data)[0])


def test_values_of_changed_parameters_are_new() -> None:
    critic, data = critic_of(), batch(ROWS)
    with torch.no_grad():
        before = critic.values(data)[0]
        for parameter in critic.parameters():
            parameter.zero_()
        after = critic.values(data)[0]
    assert before.abs().max() > 0
    assert torch.equal(after, torch.zeros(ROWS, 1))


def test_torch_computes_other_cases() -> None:
    critic, data = critic_of(), batch(ROWS)
    assert compiled_values(critic, data) is None  # gradients
    with torch.no_grad():
        assert compiled_values(critic, data) is not None
        assert compiled_values(critic, batch(MIN_ROWS - 1)) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled_values(critic, data) is None
        assert compiled_values(critic_of(MLPNetwork([64], "gelu")), data) is None
        assert compiled_values(critic_of().double(), data) is None
        memory = RecurrentNetwork(hidden_size=4)
        assert compiled_values(critic_of(memory, actor=build_actor(DISCRETE, memory)), data) is None
        assert torch.vmap(lambda x: torch.ones(1) * (compiled_values(critic, x) is None))(batch(2, ROWS)).all()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            critic(TensorDict({"observation": torch.zeros(ROWS, 5)}, [ROWS]))
        handle = critic.module[0].register_forward_hook(lambda *_: torch.zeros(ROWS, 1))
        assert torch.equal(critic.values(data)[0], torch.zeros(ROWS, 1))
        handle.remove()
        assert compiled_values(critic, data) is not None


def test_overridden_values_are_called() -> None:
    class Doubled(Critic):
        def values_of(self, features: Tensor) -> list[Tensor]:
            return [2 * value for value in super().values_of(features)]

    critic, data = critic_of(), batch(ROWS)
    doubled = Doubled(list(critic.module), critic.out_keys, critic.trunks)
    with torch.no_grad():
        torch.testing.assert_close(doubled.values(data)[0], 2 * torchs(critic, data)[0], rtol=1e-6, atol=1e-6)
