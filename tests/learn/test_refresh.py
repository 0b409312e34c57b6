"""Recurrent states of a batch, refreshed as the memory would meet them now."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.runs import trainer
from learn.replay_fakes import AGENTS, FakeReplay, sequences
from torchrl_lightning.learn import DQNModule, MLPNetwork, OffPolicyModule, RecurrentNetwork

STILL = partial(torch.optim.SGD, lr=0.0)


def make(case: str, cell: str = "gru", layers: int = 1, **kwargs: Any) -> tuple[OffPolicyModule, Any]:
    torch.manual_seed(0)
    cls, specs = AGENTS[case]
    return cls(RecurrentNetwork(cell, 6, layers), **kwargs).build(specs), specs


def with_next_states(specs: Any, module: OffPolicyModule, generator: torch.Generator) -> TensorDict:
    batch = sequences(specs, module, 6, 5, generator)
    batch["next", "recurrent_state"] = torch.zeros_like(batch["recurrent_state"])
    return batch


def paths(module: OffPolicyModule) -> list[tuple[str, ...]]:
    before = [key if isinstance(key, tuple) else (key,) for key in module.memory.state_keys]
    return [*before, *[("next", *key) for key in before]]


def fit(module: OffPolicyModule, specs: Any, make_batch: Any = with_next_states) -> tuple[list[TensorDict], FakeReplay]:
    """Give the batches as they were served, and the stream that has them as the module left them."""
    served: list[TensorDict] = []

    def serve(generator: torch.Generator) -> TensorDict:
        batch = make_batch(specs, module, generator)
        served.append(batch.clone())
        return batch

    stream = FakeReplay(specs, serve, batches=2)
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=stream)
    return served, stream


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
def test_states_are_those_of_acting_step_by_step(cell: str, layers: int) -> None:
    module, specs = make("dqn", cell, layers, optimizer=STILL, refresh_states=True)
    served, stream = fit(module, specs)
    assert any(batch["is_init"][:, 1:].any() for batch in served)
    for before, batch in zip(served, stream.served, strict=True):
        expected, expected_next = act(module, before)
        for key in module.memory.state_keys:
            state, next_state = batch.get(key), batch["next"].get(key)
            torch.testing.assert_close(state, expected.get(key))
            torch.testing.assert_close(next_state, expected_next.get(key))
            assert torch.equal(state[:, 0], before.get(key)[:, 0])
            assert not state[:, 1:][before["is_init"][:, 1:, 0]].any()
            assert not state.requires_grad
        # Only of the last batch: another one may never have been learned from.
        assert module.rewritten_keys(batch) == (paths(module) if batch is stream.served[-1] else [])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("case", AGENTS)
def test_learning_is_the_same_bit_for_bit(case: str, cell: str) -> None:
    results = []
    for refresh in (False, True):
        module, specs = make(case, cell, learning_rate=0.01, refresh_states=refresh)
        served, stream = fit(module, specs)
        changed = [
            not torch.equal(old.get(key), new.get(key))
            for old, new in zip(served, stream.served, strict=True)
            for key in paths(module)
        ]
        assert changed == [refresh] * len(changed)
        results.append([*module.state_dict().values(), *[batch["td_error"] for batch in stream.served]])
        assert bool(module.rewritten_keys(stream.served[-1])) == refresh
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_memory_is_the_one_that_the_loss_was_computed_with() -> None:
    module, specs = make("dqn", learning_rate=0.1, refresh_states=True)
    twin, _ = make("dqn")
    twin.load_state_dict(module.state_dict())
    served, stream = fit(module, specs)
    expected, _ = act(twin, served[0])
    torch.testing.assert_close(stream.served[0]["recurrent_state"], expected["recurrent_state"])
    expected, _ = act(twin, served[1])
    assert not torch.allclose(stream.served[1]["recurrent_state"], expected["recurrent_state"])


def test_states_after_a_step_are_only_written_where_there_are_some() -> None:
    module, specs = make("dqn", refresh_states=True)
    _, stream = fit(module, specs, lambda specs, module, generator: sequences(specs, module, 6, 5, generator))
    batch = stream.served[-1]
    assert ("next", "recurrent_state") not in batch.keys(True)
    assert module.rewritten_keys(batch) == [("recurrent_state",)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_states_keep_their_type(precision: str) -> None:
    module, specs = make("sac", refresh_states=True)
    stream = FakeReplay(specs, lambda generator: with_next_states(specs, module, generator))
    trainer(max_epochs=1, limit_val_batches=0, precision=precision).fit(module, datamodule=stream)
    assert stream.served[-1]["recurrent_state"].dtype == torch.float32


def test_a_network_without_memory_has_nothing_to_refresh() -> None:
    with pytest.raises(ValueError, match="needs a RecurrentNetwork, but the network is a MLPNetwork"):
        DQNModule(MLPNetwork([8]), refresh_states=True)
