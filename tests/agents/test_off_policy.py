"""The off-policy LightningModules: target networks, exploration, delays, several updates per step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle
import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.learners import NETWORKS, OFF_POLICY, SPECS, data_of, learner
from kit.runs import parameters, trainer
from kit.seeds import generator
from kit.specs import BOX, DISCRETE, ONE_HOT
from kit.transitions import sequences, transitions
from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning.agents import DQNModule, MLPNetwork, OffPolicyModule
from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.environments import environment_specs, make_vector_env
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer


def weights(module: OffPolicyModule) -> list[torch.Tensor]:
    return [parameters(network) for network in (module.q_network, module.targets.q_network)]


@pytest.mark.parametrize(("tau", "interval"), [(0.25, 1), (1.0, 2)])
def test_target_networks_update_softly_or_by_copy(tau: float, interval: int) -> None:
    module = learner("dqn", tau=tau, target_interval=interval, optimizer=partial(torch.optim.SGD, lr=0.1))
    data = data_of("dqn", note=weights)
    trainer(max_epochs=1).fit(module, datamodule=data)
    states = [*data.noted, weights(module)]
    for update, ((_, old), (online, target)) in enumerate(pairwise(states), 1):
        expected = old + tau * (online - old) if update % interval == 0 else old
        torch.testing.assert_close(target, expected)


def test_epsilon_follows_the_frames() -> None:
    data = data_of("dqn")
    trainer().fit(learner("dqn", epsilon_start=1.0, epsilon_end=0.1, epsilon_frames=40), datamodule=data)
    assert data.noted == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1])


def test_epsilon_is_the_fraction_of_random_actions() -> None:
    module = learner("dqn")
    td = TensorDict({"observation": torch.randn(1, 4).expand(3000, 4)}, [3000])
    module.policy.amount.fill_(0.6)
    best = module.policy.network.values([td["observation"][:1]]).argmax()
    torch.manual_seed(0)
    share = (module.policy(td.copy())["action"] != best).float().mean()
    assert float(share) == pytest.approx(0.4, abs=0.03)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert (module.policy(td.copy())["action"] == best).all()


@pytest.mark.parametrize(("number", "expected"), [(0, 0.8), (1, 0.8**3), (2, 0.8**5)])
def test_workers_explore_by_powers_of_epsilon(number: int, expected: float) -> None:
    """A collector passes the number of its worker to the compiled policy behind the normaliser."""
    specs = environment_specs(make_vector_env("CartPole-v1", 1))
    policy = DQNModule(epsilon_start=0.8, epsilon_end=0.8, epsilon_spread=4.0).build(specs).policy
    with torch.no_grad():
        policy.network.head.weight.zero_()
        policy.network.head.bias.copy_(torch.tensor([1.0, 0.0]))  # the best action is always the first
    worker = Worker(pickled(NormalizedPolicy(policy, ObservationNormalizer(specs, True, 10.0))), number, 3, 0)
    actions = torch.cat([worker.rollout(0)["action"].flatten() for _ in range(20)])
    assert 2 * float((actions == 1).float().mean()) == pytest.approx(expected, abs=0.06)
    assert policy.exponent == 1.0


def pickled(policy: Any) -> bytes:
    return cloudpickle.dumps(("CartPole-v1", policy, {"num_envs": 4, "frames_per_batch": 400, "seed": 0}))


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", OFF_POLICY)
def test_policies_give_actions_and_states_only(case: str, network: str, mode: ExplorationType) -> None:
    module, specs = learner(case, network), SPECS[case]
    module.policy.amount.fill_(0.5)
    step = transitions(specs, 5) if network == "mlp" else sequences(specs, module, 5, 2)[:, 0]
    step = step.exclude("action", "next")
    before = set(step.keys(True, True))
    states = {"mlp": set(), "gru": {("next", "recurrent_state")}}
    states["lstm"] = {("next", "recurrent_state", name) for name in "hc"}
    with set_exploration_type(mode):
        torch.manual_seed(1)
        bare = module.policy.compute_step(step)
        assert set(step.keys(True, True)) == before
        torch.manual_seed(1)
        written = module.policy(step)
        again = module.policy(step.copy())["action"]
    assert set(step.keys(True, True)) - before == set(module.policy.out_keys) == {"action"} | states[network]
    assert bare.keys() == set(module.policy.out_keys)
    assert all(torch.equal(value, written.get(key)) for key, value in bare.items())
    assert specs.action.expand(5, *specs.action.shape).is_in(written["action"])
    assert mode == ExplorationType.RANDOM or torch.equal(again, written["action"])


def test_noise_is_in_units_of_the_range_and_within_bounds() -> None:
    module = learner("td3")
    td = TensorDict({"observation": torch.randn(1, 4).expand(4000, 4)}, [4000])
    module.policy.amount.fill_(0.1)
    torch.manual_seed(0)
    action = module.policy(td)["action"]
    torch.testing.assert_close(action.std(0), torch.tensor([0.2, 0.05]), rtol=0.05, atol=0.0)
    module.policy.amount.fill_(3.0)
    assert BOX.action.expand(4000, 2).is_in(module.policy(td)["action"])


def test_policies_support_one_hot_actions() -> None:
    module = DQNModule(MLPNetwork([8])).build(ONE_HOT)
    action = module.policy(TensorDict({"observation": torch.randn(7, 4)}, [7]))["action"]
    assert ONE_HOT.action.expand(7, 3).is_in(action)


@pytest.mark.parametrize("ranks", [1, 2])
def test_td3_delays_its_policy(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks exchanged a gradient of zeros, Adam's momentum would move the policy between its updates."""
    monkeypatch.setattr(L.Trainer, "world_size", ranks)
    data = data_of("td3", batches=7, note=lambda module: parameters(module.policy))
    trainer(max_epochs=1).fit(learner("td3", target_interval=3), datamodule=data)
    moved = [not torch.equal(a, b) for a, b in pairwise(data.noted)]
    assert moved == [False, False, True, False, False, True]


def test_several_updates_a_step_equal_several_steps() -> None:
    results = []
    for count in (1, 2):
        module, rng = learner("dqn", target_interval=3, tau=0.5), generator(4)
        batches = [transitions(DISCRETE, 8, generator=rng) for _ in range(4)]
        several = [UpdateBatches(iter(batches[:2])), UpdateBatches(iter(batches[2:]))]
        steps, data = iter(batches if count == 1 else several), data_of("dqn", batches=4 // count)
        data.batch = lambda *_, steps=steps: next(steps)
        trainer(max_epochs=1).fit(module, datamodule=data)
        assert module.updates == 4
        learned = data.served if count == 1 else batches  # Lightning transfers only single batches
        results.append([*weights(module), *(batch["td_error"] for batch in learned)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(("target", "sign"), [(100.0, 1), (-100.0, -1)])
def test_alpha_rises_if_entropy_is_too_low(target: float, sign: int) -> None:
    module = learner("sac", target_entropy=target, learning_rate=0.01)
    trainer(max_epochs=1).fit(module, datamodule=data_of("sac"))
    assert float(module.log_alpha.detach()) * sign > 0


def test_checkpoint_of_another_kind_of_module_is_refused() -> None:
    with pytest.raises(KeyError, match="off_policy"):
        learner("dqn").on_load_checkpoint({})
