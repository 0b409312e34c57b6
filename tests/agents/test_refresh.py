"""Refreshed recurrent states of a batch equal the states that the current memory computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.learners import OFF_POLICY, data_of, learner
from kit.runs import trainer
from torchrl_lightning.agents import OffPolicyModule, RecurrentNetwork


def paths(module: OffPolicyModule) -> list[tuple[str, ...]]:
    before = [key if isinstance(key, tuple) else (key,) for key in module.memory.state_keys]
    return [*before, *[("next", *key) for key in before]]


def fit(
    case: str = "dqn",
    cell: str = "gru",
    layers: int = 1,
    *,
    next_states: bool = True,
    precision: Any = "32-true",
    **settings: Any,
) -> tuple[OffPolicyModule, list[TensorDict], list[TensorDict]]:
    """Return a trained module, and its batches before and after its updates."""
    module, served = learner(case, RecurrentNetwork(cell, 6, layers), **settings), []

    def note(batch: TensorDict) -> None:
        if next_states:
            batch["next", "recurrent_state"] = torch.zeros_like(batch["recurrent_state"])
        served.append(batch.clone())

    data = data_of(case, 2, edit=note)
    trainer(max_epochs=1, limit_val_batches=0, precision=precision).fit(module, datamodule=data)
    return module, served, data.served


def act(module: OffPolicyModule, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Return the states that a collector would have stored before and after each step, row by row, step by step."""
    keys = module.memory.state_keys
    before, after = batch.select(*keys).clone(), batch.select(*keys).clone()
    for row in range(batch.shape[0]):
        state = batch[row, 0].select(*keys)
        for t in range(batch.shape[1]):
            if t and batch["is_init"][row, t]:
                state = state.apply(torch.zeros_like)
            before[row, t] = state
            step = batch[row, t].select("observation", "is_init").update(state)
            state = module.policy(step.unsqueeze(0))[0]["next"].select(*keys)
            after[row, t] = state
    return before, after


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
def test_refreshed_states_equal_acting_step_by_step(cell: str, layers: int) -> None:
    still = partial(torch.optim.SGD, lr=0.0)
    module, served, left = fit("dqn", cell, layers, optimizer=still, refresh_states=True)
    assert any(batch["is_init"][:, 1:].any() for batch in served)
    for before, batch in zip(served, left, strict=True):
        expected, expected_next = act(module, before)
        for key in module.memory.state_keys:
            state, next_state = batch.get(key), batch["next"].get(key)
            torch.testing.assert_close(state, expected.get(key))
            torch.testing.assert_close(next_state, expected_next.get(key))
            assert torch.equal(state[:, 0], before.get(key)[:, 0])
            assert not state[:, 1:][before["is_init"][:, 1:, 0]].any()
            assert not state.requires_grad
        # Only the last batch counts: another batch may not have been used for an update.
        assert module.rewritten_keys(batch) == (paths(module) if batch is left[-1] else [])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("case", OFF_POLICY)
def test_learning_with_refreshed_states_is_bit_equal(case: str, cell: str) -> None:
    results = []
    for refresh in (False, True):
        module, served, left = fit(case, cell, learning_rate=0.01, refresh_states=refresh)
        pairs = [(old.get(key), new.get(key)) for old, new in zip(served, left, strict=True) for key in paths(module)]
        assert all(torch.equal(old, new) != refresh for old, new in pairs)
        results.append([*module.state_dict().values(), *[batch["td_error"] for batch in left]])
        assert bool(module.rewritten_keys(left[-1])) == refresh
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_are_refreshed_with_the_memory_of_the_loss() -> None:
    _, served, left = fit(learning_rate=0.1, refresh_states=True)
    reference = learner("dqn", RecurrentNetwork("gru", 6))
    (first, second), (then, later) = (act(reference, batch)[0]["recurrent_state"] for batch in served), left
    torch.testing.assert_close(then["recurrent_state"], first)
    assert not torch.allclose(later["recurrent_state"], second)


def test_next_states_are_written_only_if_they_are_stored() -> None:
    module, _, left = fit(refresh_states=True, next_states=False)
    assert ("next", "recurrent_state") not in left[-1].keys(True)
    assert module.rewritten_keys(left[-1]) == [("recurrent_state",)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_refreshed_states_keep_their_dtype(precision: str) -> None:
    _, _, left = fit("sac", refresh_states=True, precision=precision)
    assert left[-1]["recurrent_state"].dtype == torch.float32
