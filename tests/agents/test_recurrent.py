"""The memory of an off-policy loss computes the same features as the policy, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from kit.learners import OFF_POLICY, SPECS, learner
from kit.transitions import read, sequences, shake_targets
from torchrl_lightning.agents import OffPolicyModule, RecurrentNetwork
from torchrl_lightning.agents.networks.trunks import RecurrentTrunk
from torchrl_lightning.agents.recurrent import encode_sequence, successor_layout
from torchrl_lightning.agents.transitions import Transitions, read_transitions


def make(case: str = "dqn", cell: str = "gru", layers: int = 1, **kwargs: Any) -> tuple[OffPolicyModule, Any]:
    module = learner(case, RecurrentNetwork(cell, 6, layers), **kwargs)
    shake_targets(module)
    return module, SPECS[case]


def behind(module: OffPolicyModule, batch: TensorDict) -> Transitions:
    return encode_sequence(read(module, batch), module.memory, module.targets.memory)


def unroll(trunk: RecurrentTrunk, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of every step and of its true successor, one step after the other."""
    keys = trunk.state_keys
    states, now, after = batch[:, 0].select(*keys), [], []
    for t in range(batch.shape[1]):
        td = trunk(batch[:, t].select("observation", "is_init").update(states))
        now.append(td["features"])
        states = td["next"].select(*keys)
        successor = TensorDict(
            {
                "observation": batch["next", "observation"][:, t],
                "is_init": torch.zeros(batch.shape[0], 1, dtype=torch.bool),
            },
            [batch.shape[0]],
        )
        after.append(trunk(successor.update(states))["features"])
    return torch.stack(now, 1), torch.stack(after, 1)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ends", ["inside", "none", "first"])
def test_features_equal_an_unroll(cell: str, layers: int, ends: str) -> None:
    module, specs = make("dqn", cell, layers)
    batch = sequences(specs, module, 8, 7, ends=ends == "inside")
    if ends == "first":
        batch["is_init"][::2, 0] = True
    result = behind(module, batch)
    online_now, online_after = unroll(module.memory, batch)
    _, target_after = unroll(module.targets.memory, batch)
    torch.testing.assert_close(result.now[0], online_now)
    torch.testing.assert_close(result.after[0], online_after)
    torch.testing.assert_close(result.after_target[0], target_after)
    weight = torch.randn_like(online_now)
    parameters = list(module.memory.parameters())
    gradients = [torch.autograd.grad((weight * x).sum(), parameters) for x in (result.now[0], online_now)]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_layout_equals_the_reference(data: st.DataObject) -> None:
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    flags = st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=rows, max_size=rows)
    boundary = data.draw(flags)
    steps, successors, source = successor_layout(torch.tensor(boundary))
    for row in range(rows):
        expected: list[int] = []
        for t in range(length):
            assert int(steps[row, t]) == len(expected)
            expected.append(t)
            assert int(successors[row, t]) == len(expected)
            if boundary[row][t] or t == length - 1:
                expected.append(length + t)
        assert source[row, : len(expected)].tolist() == expected


@pytest.mark.parametrize("case", OFF_POLICY)
def test_losses_equal_flat_transitions_over_the_features(case: str) -> None:
    """Losses of flat transitions equal TorchRL's losses; priority weights and mask apply to steps."""
    module, specs = make(case)
    batch = sequences(specs, module, 6, 5)
    batch["mask"] = torch.rand(6, 5) < 0.7
    batch["priority_weight"] = (torch.rand(6, 1) + 0.1).expand(6, 5)
    torch.manual_seed(2)
    mine, error = module.compute(read(module, batch, module.gamma))
    remembered = behind(module, batch)
    flat = TensorDict(
        {
            "remembered": remembered.now[0].detach(),
            "action": batch["action"],
            "mask": batch["mask"],
            "priority_weight": batch["priority_weight"],
            "next": batch["next"].select("reward", "done", "terminated").set("remembered", remembered.after[0]),
        },
        [6, 5],
    )
    rows = read_transitions(flat.reshape(-1), ["remembered"], module.gamma)
    rows.after_target = [remembered.after_target[0].flatten(0, 1)]
    torch.manual_seed(2)
    expected, expected_error = module.losses(rows)
    for name, value in mine.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(error.flatten(), expected_error)
    assert (error[~batch["mask"]] == 0).all()


@pytest.mark.parametrize("case", ["sac", "td3"])
def test_policy_loss_has_no_gradient_into_the_memory(case: str) -> None:
    module, specs = make(case, target_interval=1)
    batch = sequences(specs, module, 6, 5)
    terms, _ = module.compute(read(module, batch))
    memory = list(module.memory.parameters())
    unused = torch.autograd.grad(terms["loss_actor"], memory, allow_unused=True, retain_graph=True)
    assert all(gradient is None for gradient in unused)
    torch.autograd.grad(terms["loss_qvalue"], memory)  # raises if a gradient is missing


def test_burn_in_changes_the_memory_but_not_the_loss() -> None:
    module, specs = make()
    batch = sequences(specs, module, 6, 8, ends=False)
    batch["mask"] = torch.ones(6, 8, dtype=torch.bool)
    batch["mask"][:, :3] = False

    def value(batch: TensorDict) -> torch.Tensor:
        terms, _ = module.compute(read(module, batch))
        return terms["loss_value"].detach()

    reference, other = value(batch), batch.clone()
    other["next", "reward"][:, :3] = 100.0
    assert torch.equal(value(other), reference)
    other["observation"][:, 1] += 1.0
    other["next", "observation"][:, 0] += 1.0
    assert not torch.allclose(value(other), reference)


def test_padding_behind_an_unfinished_episode_is_not_its_successor() -> None:
    module, specs = make()
    batch = sequences(specs, module, 4, 6, ends=False)
    batch["mask"] = torch.ones(4, 6, dtype=torch.bool)
    batch["mask"][1, 3:] = False
    results = []
    for filler in (0.0, 5.0):
        batch["observation"][1, 3:] = filler
        terms, error = module.compute(read(module, batch))
        results.append((terms["loss_value"].detach(), error))
    torch.testing.assert_close(results[0], results[1])


def test_flat_batches_are_refused() -> None:
    module, specs = make()
    batch = sequences(specs, module, 4, 6)[:, 0]
    with pytest.raises(ValueError, match="SequenceSampler"):
        module.compute(read(module, batch))
    with pytest.raises(KeyError, match="recurrent_state"):
        read(module, batch.exclude("recurrent_state"))


def test_successors_several_steps_ahead_are_valid_within_the_window() -> None:
    """Compare n-step windows of longer sequences with an unroll over all steps."""
    module, specs = make()
    rows, length, window, n = 12, 12, 7, 3
    raw = sequences(specs, module, rows, length)
    batch = raw[:, :window].clone()
    steps, expected_mask = torch.zeros(rows, window, dtype=torch.long), torch.zeros(rows, window, dtype=torch.bool)
    for row in range(rows):
        for t in range(window):
            last = next(j for j in range(t, t + n) if j == t + n - 1 or raw["next", "done"][row, j])
            steps[row, t] = last - t + 1
            batch["next", "observation"][row, t] = raw["next", "observation"][row, last]
            batch["next", "terminated"][row, t] = raw["next", "terminated"][row, last]
            expected_mask[row, t] = last + 1 < window or (last < window and bool(raw["next", "done"][row, last]))
    batch["steps_to_next_obs"] = steps
    assert expected_mask[:, :2].all()
    assert not expected_mask[:, 3:].all()
    now, after = unroll(module.memory, raw)
    for flags in ("first", "last"):
        if flags == "last":  # as TorchRL's transform stores them with done_keys=[]
            ahead = torch.arange(window) + steps - 1
            batch["next", "done"] = raw["next", "done"].gather(1, ahead.unsqueeze(-1))
        result = behind(module, batch)
        torch.testing.assert_close(result.now[0], now[:, :window])
        assert result.mask is not None
        assert torch.equal(result.mask, expected_mask)
        index = (torch.arange(window) + steps - 1).unsqueeze(-1).expand(-1, -1, after.shape[-1])
        expected = after.gather(1, index)[expected_mask]
        torch.testing.assert_close(result.after[0][expected_mask], expected)
    # The window ends before its padding, which repeats a step.
    batch["mask"] = torch.ones(rows, window, dtype=torch.bool)
    batch["mask"][0, 4:] = False
    result = behind(module, batch)
    last = [t + int(steps[0, t]) - 1 for t in range(window)]
    expected_mask[0] = torch.tensor([end < 3 or (end == 3 and bool(raw["next", "done"][0, 3])) for end in last])
    assert result.mask is not None
    assert torch.equal(result.mask, expected_mask)


@pytest.mark.parametrize(("length", "burn_in"), [(3, 0), (6, 3)])
def test_sequences_without_a_successor_are_refused(length: int, burn_in: int) -> None:
    module, specs = make()
    batch = sequences(specs, module, 4, length)
    batch["steps_to_next_obs"] = torch.full((4, length), 3)
    batch["mask"] = (torch.arange(length) >= burn_in).expand(4, length)
    with pytest.raises(ValueError, match=rf"{burn_in}.*3"):
        module.compute(read(module, batch))
