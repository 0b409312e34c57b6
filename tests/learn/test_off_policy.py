"""The off-policy LightningModules: updates, target networks, exploration, priorities, metrics."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.runs import parameters, trainer
from learn.replay_fakes import AGENTS, BOX, DISCRETE, ONE_HOT, FakeReplay, sequences, transitions
from torchrl_lightning.learn import DQNModule, MLPNetwork, OffPolicyModule, RecurrentNetwork, agents
from torchrl_lightning.learn.transitions import read_transitions
from torchrl_lightning.updates import UpdateBatches

NETWORKS = {"mlp": MLPNetwork([8], "relu"), "gru": RecurrentNetwork("gru", 6), "lstm": RecurrentNetwork("lstm", 6, 2)}


def small(case: str, network: str = "mlp", **kwargs: Any) -> OffPolicyModule:
    torch.manual_seed(0)
    return AGENTS[case][0](NETWORKS[network], **kwargs)


def data(case: str, module: OffPolicyModule, **kwargs: Any) -> FakeReplay:
    specs = AGENTS[case][1]
    if isinstance(module.network, RecurrentNetwork):
        return FakeReplay(specs, lambda generator: sequences(specs, module, 6, 5, generator), **kwargs)
    return FakeReplay(specs, lambda generator: transitions(specs, 16, generator=generator), **kwargs)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", AGENTS)
def test_fit_updates_every_parameter_and_logs_over_frames(case: str, network: str) -> None:
    module = small(case, network, learning_rate=0.01).build(AGENTS[case][1])
    before = {name: value.clone() for name, value in module.named_parameters()}
    fit, stream = trainer(), data(case, module)
    fit.fit(module, datamodule=stream)
    assert before
    assert all(not torch.equal(before[name], value) for name, value in module.named_parameters())
    assert any(name.startswith("targets.") for name in before)
    assert fit.callback_metrics["step"] == 60
    assert fit.callback_metrics["eval/return"] == 2.0
    epoch = module.epoch_metrics
    assert {"train/value", "train/learning_rate", "train/exploration"} <= epoch.keys()
    assert epoch["train/updates"] == 6
    assert all(math.isfinite(value) for value in epoch.values())
    assert fit.global_step == 6
    for batch in stream.served:
        assert batch["td_error"].shape == batch.shape
        assert not batch["td_error"].requires_grad
        assert (batch["td_error"] >= 0).all()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", AGENTS)
def test_state_dict_holds_each_tensor_once(case: str, network: str) -> None:
    state = small(case, network).build(AGENTS[case][1]).state_dict()
    pointers = [value.data_ptr() for value in state.values() if value.numel() > 1]
    assert len(pointers) == len(set(pointers))


@pytest.mark.parametrize(("tau", "interval"), [(0.25, 1), (1.0, 2)])
def test_target_networks_follow_by_share_or_by_copy(tau: float, interval: int) -> None:
    module = small("dqn", tau=tau, target_interval=interval, optimizer=partial(torch.optim.SGD, lr=0.1))
    module.build(DISCRETE)
    seen = []

    class Recorder(FakeReplay):
        def epoch(self) -> Any:
            for batch in super().epoch():
                seen.append(weights(module))
                yield batch

    stream = Recorder(DISCRETE, lambda generator: transitions(DISCRETE, 16, generator=generator))
    trainer(max_epochs=1).fit(module, datamodule=stream)
    seen.append(weights(module))
    for update, ((_, old), (online, target)) in enumerate(pairwise(seen), 1):
        expected = old + tau * (online - old) if update % interval == 0 else old
        torch.testing.assert_close(target, expected)


def weights(module: OffPolicyModule) -> list[torch.Tensor]:
    return [parameters(network) for network in (module.q_network, module.targets.q_network)]


def test_epsilon_follows_the_frames() -> None:
    module = small("dqn", epsilon_start=1.0, epsilon_end=0.1, epsilon_frames=40)
    stream = data("dqn", module)
    trainer().fit(module, datamodule=stream)
    assert stream.exploration == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1])


def test_epsilon_is_the_share_of_random_actions() -> None:
    module = small("dqn").build(DISCRETE)
    td = TensorDict({"observation": torch.randn(1, 4).expand(3000, 4)}, [3000])
    module.policy.amount.fill_(0.6)
    best = module.policy.network.values([td["observation"][:1]]).argmax()
    torch.manual_seed(0)
    share = (module.policy(td.copy())["action"] != best).float().mean()
    assert float(share) == pytest.approx(0.4, abs=0.03)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert (module.policy(td.copy())["action"] == best).all()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", AGENTS)
def test_policies_write_actions_and_states_only(case: str, network: str) -> None:
    specs = AGENTS[case][1]
    module = small(case, network).build(specs)
    if network == "mlp":
        td = TensorDict({"observation": torch.randn(5, 4)}, [5])
    else:
        td = sequences(specs, module, 5, 2)[:, 0].exclude("action", "next")
    before = set(td.keys(True, True))
    expected = {"mlp": set(), "gru": {("next", "recurrent_state")}}
    expected["lstm"] = {("next", "recurrent_state", name) for name in "hc"}
    td = module.policy(td)
    assert set(td.keys(True, True)) - before == {"action"} | expected[network]
    assert set(module.policy.out_keys) == {"action"} | expected[network]
    assert specs.action.expand(5, *specs.action.shape).is_in(td["action"])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        again = [module.policy(td.copy())["action"] for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", AGENTS)
def test_acting_on_plain_tensors_is_the_same(case: str, network: str, mode: ExplorationType) -> None:
    specs = AGENTS[case][1]
    module = small(case, network).build(specs)
    module.policy.amount.fill_(0.5)
    recurrent = network != "mlp"
    step = sequences(specs, module, 5, 2)[:, 0] if recurrent else transitions(specs, 5)
    step = step.exclude("action", "next")
    keys = set(step.keys(True, True))
    with set_exploration_type(mode):
        torch.manual_seed(1)
        acted = module.policy.act_on(step)
        assert set(step.keys(True, True)) == keys
        torch.manual_seed(1)
        written = module.policy(step)
    assert acted.keys() == set(module.policy.out_keys)
    assert all(torch.equal(value, written.get(key)) for key, value in acted.items())


def test_noise_is_in_units_of_the_range_and_within_bounds() -> None:
    module = small("td3").build(BOX)
    td = TensorDict({"observation": torch.randn(1, 4).expand(4000, 4)}, [4000])
    module.policy.amount.fill_(0.1)
    torch.manual_seed(0)
    action = module.policy(td)["action"]
    torch.testing.assert_close(action.std(0), torch.tensor([0.2, 0.05]), rtol=0.05, atol=0.0)
    module.policy.amount.fill_(3.0)
    assert BOX.action.expand(4000, 2).is_in(module.policy(td)["action"])


def test_one_hot_actions() -> None:
    module = DQNModule(MLPNetwork([8])).build(ONE_HOT)
    action = module.policy(TensorDict({"observation": torch.randn(7, 4)}, [7]))["action"]
    assert ONE_HOT.action.expand(7, 3).is_in(action)


@pytest.mark.parametrize("ranks", [1, 2])
def test_td3_delays_its_policy(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where ranks exchange a gradient of zeros meanwhile: Adam would move on along its momentum."""
    monkeypatch.setattr(L.Trainer, "world_size", ranks)
    module = small("td3", target_interval=3).build(BOX)
    actors = []

    class Recorder(FakeReplay):
        def epoch(self) -> Any:
            for batch in super().epoch():
                actors.append(torch.nn.utils.parameters_to_vector(module.policy.parameters()).detach().clone())
                yield batch

    stream = Recorder(BOX, lambda generator: transitions(BOX, 16, generator=generator), batches=7)
    trainer(max_epochs=1).fit(module, datamodule=stream)
    moved = [not torch.equal(a, b) for a, b in pairwise(actors)]
    assert moved == [False, False, True, False, False, True]


def test_several_updates_a_step_equal_several_steps() -> None:
    results = []
    for count in (1, 2):
        module = small("dqn", target_interval=3, tau=0.5)
        module.build(DISCRETE)
        generator = torch.Generator().manual_seed(4)
        batches = [transitions(DISCRETE, 8, generator=generator) for _ in range(4)]
        steps = iter(batches if count == 1 else [UpdateBatches(iter(batches[:2])), UpdateBatches(iter(batches[2:]))])
        stream = FakeReplay(DISCRETE, lambda _, steps=steps: next(steps), batches=4 // count)
        trainer(max_epochs=1).fit(module, datamodule=stream)
        assert module.updates == 4
        learned = stream.served if count == 1 else batches  # Lightning moves what it knows as a batch
        results.append([*weights(module), *(batch["td_error"] for batch in learned)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_three_optimizers() -> None:
    freeze = partial(torch.optim.SGD, lr=0.0)
    module = small("sac", optimizer=freeze, critic_optimizer=partial(torch.optim.SGD, lr=0.1), alpha_optimizer=freeze)
    module.build(BOX)
    actor = [p.clone() for p in module.policy.parameters()]
    alpha = module.log_alpha.clone()
    critics = [p.clone() for p in module.critics.parameters()]
    fit = trainer(max_epochs=1)
    fit.fit(module, datamodule=data("sac", module))
    assert len(fit.optimizers) == 3
    assert all(torch.equal(a, b) for a, b in zip(actor, module.policy.parameters(), strict=True))
    assert torch.equal(alpha, module.log_alpha)
    learnt = module.critics.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(critics, learnt, strict=True))


@pytest.mark.parametrize("case", AGENTS)
def test_a_compiled_loss_gives_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by dynamo, not compiled: that would take a minute."""
    monkeypatch.setattr(agents, "compiled", lambda function: torch.compile(function, backend="eager"))
    results = []
    for compiled in (False, True):
        module = small(case, compile=compiled).build(AGENTS[case][1])
        torch.manual_seed(1)
        part = read_transitions(transitions(AGENTS[case][1], 16), ["observation"], 0.9)
        torch.manual_seed(2)
        results.append(module.compute(part))
    torch.testing.assert_close(results[0], results[1])


def test_alpha_rises_where_entropy_is_too_low() -> None:
    for target, sign in ((100.0, 1), (-100.0, -1)):
        module = small("sac", target_entropy=target, learning_rate=0.01).build(BOX)
        trainer(max_epochs=1).fit(module, datamodule=data("sac", module))
        assert float(module.log_alpha.detach()) * sign > 0


def test_mixed_precision_trains() -> None:
    module, fit = small("sac"), trainer(precision="bf16-mixed")
    fit.fit(module, datamodule=data("sac", module))
    assert fit.global_step == 6


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(RuntimeError, match="build"):
        _ = small("dqn").policy
    for case, options, says in (
        ("sac", {"tau": 0.0}, "tau"),
        ("td3", {"target_interval": 0}, "target_interval"),
        ("dqn", {"epsilon_start": 2.0}, "epsilon_start"),
        ("dqn", {"epsilon_frames": 0}, "frames"),
        ("sac", {"learn_alpha": False, "alpha_optimizer": torch.optim.Adam}, "learn_alpha"),
    ):
        with pytest.raises(ValueError, match=says):
            small(case, **options)
    with pytest.raises(KeyError, match="off_policy"):
        small("dqn").build(DISCRETE).on_load_checkpoint({})
