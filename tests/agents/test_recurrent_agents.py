"""Recurrent networks return the same values and gradients for a sequence as for single steps."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Unbounded
from torchrl.modules import set_recurrent_mode

from kit.specs import specs_of
from torchrl_lightning.agents import A2CModule, RecurrentNetwork

SPECS = specs_of(Categorical(2), observation=Unbounded(3))


def built(cell: str, layers: int) -> A2CModule:
    torch.manual_seed(0)
    return A2CModule(RecurrentNetwork(cell, hidden_size=6, num_layers=layers)).build(SPECS)


def collect(actor, rows: int, steps: int, starts: torch.Tensor) -> TensorDict:
    """Act step by step with the previous state; return the rollout ``[rows, steps]``."""
    trunk, frames = actor.trunk, []
    layers = (trunk.memory.lstm if trunk.cell == "lstm" else trunk.memory.gru).num_layers
    state = TensorDict({}, [rows])
    for key in trunk.state_keys:
        state.set(key, torch.randn(rows, layers, trunk.features))
    for t in range(steps):
        td = TensorDict({"observation": torch.randn(rows, 3), "is_init": starts[:, t]}, [rows])
        td = actor(td.update(state))
        frames.append(td)
        state = td["next"].select(*trunk.state_keys)
    return torch.stack(frames, 1).contiguous()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("resets", [(), ((0, 0), (1, 3), (2, 2), (2, 6)), ((3, 1),)], ids=["none", "several", "second"])
def test_sequences_equal_the_unroll(cell: str, layers: int, resets: tuple[tuple[int, int], ...]) -> None:
    module = built(cell, layers)
    actor, critic = module.policy, module.critic
    starts = torch.zeros(4, 7, 1, dtype=torch.bool)
    for row, step in resets:
        starts[row, step] = True
    rollout = collect(actor, 4, 7, starts).detach()
    weight = torch.randn(4, 7)

    def gradients(log_prob: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (weight * log_prob).sum() + (weight * value.squeeze(-1)).sum()
        return torch.autograd.grad(loss, [*actor.parameters(), *critic.parameters()])

    log_prob, _, (value,) = module.evaluate(rollout)
    torch.testing.assert_close(log_prob, rollout["action_log_prob"])
    mine = gradients(log_prob, value)

    states, log_probs, values = rollout[:, 0].select(*actor.trunk.state_keys), [], []
    for t in range(7):
        td = rollout[:, t].select("observation", "is_init", "action").update(states)
        features, after = actor.trunk.step(td)
        log_probs.append(actor.get_dist(td).log_prob(td["action"]))
        values.append(critic.values_of(features)[0])
        states = TensorDict(dict(zip(actor.trunk.state_keys, after, strict=True)), [4])
    expected = gradients(torch.stack(log_probs, 1), torch.stack(values, 1))
    torch.testing.assert_close(value, torch.stack(values, 1))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_critic_on_recorded_states_equals_the_sequence_and_writes_values_only(cell: str) -> None:
    module = built(cell, 1)
    actor, critic = module.policy, module.critic
    starts = torch.zeros(4, 5, 1, dtype=torch.bool)
    starts[1, 2] = True
    rollout = collect(actor, 4, 5, starts).detach()
    before = rollout.clone()
    flat = critic(rollout.copy().transpose(0, 1).reshape(-1))["state_value"].reshape(5, 4, 1).transpose(0, 1)
    with set_recurrent_mode(True):
        sequence = critic(rollout)
    torch.testing.assert_close(flat, sequence["state_value"])
    assert (rollout.select(*before.keys(True, True)) == before).all()


def test_next_row_continues_from_the_next_state() -> None:
    module = built("gru", 1)
    actor, critic = module.policy, module.critic
    rollout = collect(actor, 4, 5, torch.zeros(4, 5, 1, dtype=torch.bool)).detach()
    row = TensorDict(
        {
            "observation": rollout["observation"][:, 3],
            "recurrent_state": rollout["next", "recurrent_state"][:, 2],
            "is_init": torch.zeros(4, 1, dtype=torch.bool),
        },
        [4],
    )
    torch.testing.assert_close(critic(row)["state_value"], critic(rollout[:, 3].clone())["state_value"])


def test_missing_state_is_named() -> None:
    td = TensorDict({"observation": torch.zeros(2, 3), "is_init": torch.ones(2, 1, dtype=torch.bool)}, [2])
    with pytest.raises(KeyError, match="recurrent_state"):
        built("gru", 1).policy(td)
