"""Networks of users follow one contract for actors and critics, which is checked on a copy before collection."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from torch import nn
from torchrl.data import Bounded, Categorical, MultiCategorical, Unbounded

from kit.encoders import (
    Double,
    DoubleWeights,
    EncodedBy,
    Encoder,
    ExtraDimension,
    FloatFeatures,
    Inherited,
    InPlace,
    InPlaceBehind,
    NoBackward,
    NoFeatures,
    NoGradient,
    NoRows,
    NotBuilt,
    OneRow,
    Plain,
    Raises,
    Tuple,
    WrongFeatures,
)
from kit.learners import data_of
from kit.runs import trainer
from kit.specs import BOX, DISCRETE, TWO_CHOICES, specs_of
from torchrl_lightning import (
    BatchRenormNetwork,
    CNNNetwork,
    DQNModule,
    ExperienceBuffer,
    LossModuleAgent,
    MBPOModule,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    RandomNetworkDistillation,
    RecurrentNetwork,
    ReplayDataModule,
    SACModule,
    TD3Module,
    WorldModelFit,
    build_action_critic,
    build_actor,
    build_critic,
    build_squashed_actor,
)
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.agents import Network
from torchrl_lightning.agents.dry_run import NetworkFault, dry_run
from torchrl_lightning.agents.networks.encoders import MLPEncoder
from torchrl_lightning.agents.networks.network_protocol import has_action_encoder
from torchrl_lightning.agents.networks.q_networks import ActionValue, CriticEnsemble

AGENTS: dict[str, Any] = {"ppo": PPOModule, "dqn": DQNModule, "sac": SACModule, "td3": TD3Module}


FAULTS = {
    NoFeatures: "features of NoFeatures must be a positive integer, got None",
    WrongFeatures: r"return features \[2, 7\].*got \[2, 6\]",
    FloatFeatures: "features of FloatFeatures must be a positive integer, got 6.0",
    NotBuilt: "IndexError: list index out of range at encoders.py",
    ExtraDimension: r"return features \[2, 6\].*got \[2, 1, 6\]",
    Tuple: "got tuple",
    Raises: "KeyError: 'no such layer.*at encoders.py",
    OneRow: "RuntimeError: shape '.*' is invalid",
    NoRows: r"return features \[2, 6\].*got \[12\]",
    Double: "features of torch.float32.*got torch.float64",
    DoubleWeights: "RuntimeError: mat1 and mat2 must have the same dtype",
    InPlace: "leave its inputs unchanged",
    InPlaceBehind: "leave its inputs unchanged",
    NoGradient: "give its parameters gradients.*requires_grad=False",
    NoBackward: "RuntimeError: no way back",
}


def data_for(case: str, **settings: Any) -> Any:
    if case == "ppo":
        return OnPolicyDataModule(env="CartPole-v1", total_frames=64, frames_per_batch=32, num_mini_batch=2, **settings)
    env = "CartPole-v1" if case == "dqn" else "Pendulum-v1"
    buffer = partial(ExperienceBuffer)
    return ReplayDataModule(
        env=env, buffer=buffer, total_frames=60, warmup_frames=20, frames_per_batch=10, batch_size=8, **settings
    )


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any) -> None:
        raise AssertionError("the environment has been stepped")

    for kind in (CartPoleEnv, PendulumEnv):
        monkeypatch.setattr(kind, "step", step)


@pytest.mark.usefixtures("no_steps")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("case", AGENTS)
def test_faulty_network_is_named_in_one_line_before_the_first_step(case, kind):
    with pytest.raises(UserError) as raised:
        trainer(max_epochs=1).fit(AGENTS[case](EncodedBy(kind=kind)), datamodule=data_for(case))
    message = str(raised.value)
    assert re.search(FAULTS[kind], message), message
    assert "\n" not in message
    assert "EncodedBy" in message
    assert f"observation [{3 if case in ('sac', 'td3') else 4}] float32" in message


@pytest.mark.usefixtures("no_steps")
def test_dry_run_covers_networks_that_are_already_built():
    module = DQNModule(EncodedBy(kind=ExtraDimension)).build(TWO_CHOICES)
    with pytest.raises(NetworkFault, match=r"got \[2, 1, 6\]"):
        trainer(max_epochs=1).fit(module, datamodule=data_for("dqn"))


@pytest.mark.usefixtures("no_steps")
def test_values_of_rollouts_need_further_batch_dimensions():
    class OneBatchDimension(Encoder):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return super().forward(observation.flatten(1))

    with pytest.raises(NetworkFault, match=r"OneBatchDimension\(\[1, 2, 4\]\)"):
        trainer(max_epochs=1).fit(PPOModule(EncodedBy(kind=OneBatchDimension)), datamodule=data_for("ppo"))


@pytest.mark.parametrize("network", [EncodedBy(), Plain(), Inherited(), EncodedBy(head_sizes=[5])], ids=lambda n: "")
@pytest.mark.parametrize("case", AGENTS)
def test_network_with_only_an_encoder_trains(case, network):
    module = AGENTS[case](network)
    trainer(max_epochs=1).fit(module, datamodule=data_for(case))
    encoders = [part for part in module.modules() if isinstance(part, Encoder)]
    assert len(encoders) >= 2
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_critic_joins_the_action_behind_the_encoder():
    critic = ActionValue(BOX, EncodedBy(head_sizes=[]))
    observation, action = torch.randn(5, 4), BOX.action.rand([5])
    features = critic.encoder(observation)
    joined = torch.cat([features, (action - critic.center) / critic.half_range], -1)
    torch.testing.assert_close(critic(observation, action), critic.last(joined))
    assert critic.last[0][0].out_features == 6  # so that the value of an action depends on the observation
    other = BOX.action.rand([5])
    gaps = critic(observation, action) - critic(observation, other)
    moved = critic(observation + 1.0, action) - critic(observation + 1.0, other)
    assert not torch.allclose(gaps, moved)


def test_critic_ensemble_equals_its_critics():
    class Behind(MLPNetwork):
        def encoder(self, specs: Any) -> nn.Module:
            return MLPEncoder(specs, [8], "tanh")

    for network in (EncodedBy(), Behind()):
        critics = [ActionValue(BOX, network) for _ in range(2)]
        observation, action = torch.randn(5, 4), BOX.action.rand([5])
        expected = torch.stack([critic(observation, action).squeeze(-1) for critic in critics])
        together = CriticEnsemble(critics)
        torch.testing.assert_close(together([observation], action), expected)
        torch.testing.assert_close(together.q_values([observation], action, 1), expected[:1])


def test_critic_of_a_user_runs_under_vmap():
    critics = [ActionValue(BOX, EncodedBy()) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(critics)
    observation, action = torch.randn(5, 4), BOX.action.rand([5])

    def value(parameters: Any, buffers: Any) -> torch.Tensor:
        return torch.func.functional_call(critics[0], (parameters, buffers), (observation, action))

    expected = torch.stack([critic(observation, action) for critic in critics])
    torch.testing.assert_close(torch.vmap(value)(parameters, buffers), expected)


class OverridesBoth(MLPNetwork):
    def encoder(self, specs: Any) -> nn.Module:
        return Encoder(sum(spec.shape[-1] for spec in specs))

    def action_encoder(self, specs: Any, action: Any) -> nn.Module:
        return super().action_encoder(specs, action)


class OverridesActions(MLPNetwork):
    def action_encoder(self, specs: Any, action: Any) -> nn.Module:
        return super().action_encoder(specs, action)


@pytest.mark.parametrize(
    ("network", "early"),
    [
        (MLPNetwork(), True),
        (BatchRenormNetwork(), True),
        (CNNNetwork(), True),
        (OverridesBoth(), True),
        (OverridesActions(), True),
        (EncodedBy(), False),
        (Inherited(), False),
        (RecurrentNetwork(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_encoder_reads_actions_only_with_encodes_action(network, early):
    assert has_action_encoder(network) is early


def test_encoder_that_was_replaced_in_an_object_reads_no_actions():
    network = MLPNetwork([8])
    vars(network)["encoder"] = lambda specs: Encoder(specs[0].shape[-1])
    assert not has_action_encoder(network)
    assert ActionValue(BOX, network)(torch.randn(2, 4), BOX.action.rand([2])).shape == (2, 1)


# -- sound agents ----------------------------------------------------------------------------------------------------

MASKED = specs_of(Categorical(3), observation=Unbounded(4), action_mask=Categorical(2, (3,), dtype=torch.bool))
IMAGES = specs_of(Categorical(2), pixels=Bounded(0, 255, (3, 12, 12), dtype=torch.uint8), vector=Unbounded(2))
BOX_IMAGES = specs_of(BOX.action, pixels=Bounded(0, 255, (3, 12, 12), dtype=torch.uint8))
EDGES = specs_of(
    Categorical(2),
    infinite=Bounded(-torch.inf, torch.inf, (2,)),
    huge=Bounded(torch.full((2,), -3.4e38), torch.full((2,), 3.4e38)),
    whole=Bounded(-(2**62), 2**62, (2,), dtype=torch.int64),
    narrow=Bounded(5, 6, (1,)),
    one=Categorical(3),
    several=MultiCategorical([2, 3]),
    half=Unbounded((2,), dtype=torch.float64),
)
CNN = CNNNetwork([4, 4], [3, 3], [2, 1], [8])
SOUND = {
    "masked ppo": (lambda: PPOModule(), MASKED),
    "masked dqn": (lambda: DQNModule(), MASKED),
    "images": (lambda: PPOModule(CNN), IMAGES),
    "images of dqn": (lambda: DQNModule(CNN), IMAGES),
    "images of sac": (lambda: SACModule(CNNNetwork([4], [3], [2], [8], shared=False)), BOX_IMAGES),
    "edges ppo": (lambda: PPOModule(), EDGES),
    "edges dqn": (lambda: DQNModule(dueling=True), EDGES),
    "gru": (lambda: PPOModule(RecurrentNetwork("gru", 6)), TWO_CHOICES),
    "lstm": (lambda: PPOModule(RecurrentNetwork("lstm", 6, 2)), BOX),
    "gru of dqn": (lambda: DQNModule(RecurrentNetwork("gru", 6)), DISCRETE),
    "lstm of sac": (lambda: SACModule(RecurrentNetwork("lstm", 6, 2)), BOX),
    "gru of td3": (lambda: TD3Module(RecurrentNetwork("gru", 6)), BOX),
    "crossq": (lambda: SACModule(BatchRenormNetwork([8])), BOX),
    "td3": (lambda: TD3Module(), BOX),
    "mbpo": (lambda: MBPOModule(dynamics=WorldModelFit([8], num_members=2, num_elites=2)), BOX),
    "intrinsic": (lambda: PPOModule(intrinsic=RandomNetworkDistillation()), BOX),
    "critics": (lambda: PPOModule(critics=["a", "b"], separate_critics=True), BOX),
    "frozen": (lambda: PPOModule(EncodedBy(kind=frozen)), TWO_CHOICES),
    "no parameters": (lambda: PPOModule(MLPNetwork([])), TWO_CHOICES),
}


def frozen(inputs: int) -> nn.Module:
    return Encoder(inputs).requires_grad_(False)


@pytest.mark.parametrize("case", SOUND)
def test_sound_agent_passes_and_keeps_weights_and_generators(case):
    make, specs = SOUND[case]
    module = make().build(specs)
    L.seed_everything(5, verbose=False)
    before, training = copy.deepcopy(module.state_dict()), module.training
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    dry_run(module, specs)
    assert random.getstate() == generators[0]
    for now, then in zip(np.random.get_state(), generators[1], strict=True):  # noqa: NPY002
        assert np.array_equal(now, then)
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training is training
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def loss_agents() -> Iterator[Any]:
    from torchrl.objectives import ClipPPOLoss, SACLoss

    builders = {"actor_network": build_actor, "critic_network": build_critic}
    yield partial(LossModuleAgent, ClipPPOLoss, networks=builders), TWO_CHOICES
    builders = {"actor_network": build_squashed_actor, "qvalue_network": build_action_critic}
    yield partial(LossModuleAgent, SACLoss, networks=builders), BOX


@pytest.mark.parametrize("number", [0, 1])
def test_dry_run_covers_networks_of_torchrl_losses(number):
    make, specs = list(loss_agents())[number]
    dry_run(make(network=MLPNetwork([8])).build(specs), specs)
    dry_run(make(network=EncodedBy()).build(specs), specs)
    with pytest.raises(NetworkFault, match=r"got \[2, 1, 6\]"):
        dry_run(make(network=EncodedBy(kind=ExtraDimension)).build(specs), specs)


def test_large_network_runs_forward_without_a_copy_of_its_weights(monkeypatch):
    monkeypatch.setattr("torchrl_lightning.agents.dry_run.MAX_COPIED_BYTES", 10)
    module = PPOModule(EncodedBy()).build(TWO_CHOICES)
    before = copy.deepcopy(module.state_dict())
    dry_run(module, TWO_CHOICES)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(NetworkFault, match=r"got \[2, 1, 6\]"):
        dry_run(PPOModule(EncodedBy(kind=ExtraDimension)).build(TWO_CHOICES), TWO_CHOICES)


def test_dry_run_changes_no_random_state_or_buffers():
    class Noisy(Encoder):
        def __init__(self, inputs: int) -> None:
            super().__init__(inputs)
            self.register_buffer("calls", torch.zeros(()))
            self.drawn: list[float] = []

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.drawn.append(random.random() + np.random.rand())  # noqa: NPY002
            return nn.functional.dropout(super().forward(observation))

    module = DQNModule(EncodedBy(kind=Noisy)).build(TWO_CHOICES)
    dry_run(module, TWO_CHOICES)
    encoder = module.q_network.trunk.encoder
    assert float(encoder.calls) == 0.0
    assert encoder.drawn == []


def test_dry_run_compiles_nothing():
    compiled: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    class Compiled(Encoder):
        def __init__(self, inputs: int) -> None:
            super().__init__(inputs)
            self.layer = torch.compile(self.layer, backend=compiler)
            self.layer.in_features = inputs

    module = DQNModule(EncodedBy(kind=Compiled)).build(TWO_CHOICES)
    dry_run(module, TWO_CHOICES)
    assert not compiled
    module.q_network.values([torch.zeros(2, 4)])
    assert compiled


def test_dry_run_skips_a_loss_over_user_networks():
    class Unbuilt(LossModuleAgent):
        def network_outputs(self, step: Any) -> Any:
            raise AssertionError

    agent = Unbuilt(lambda specs: None)
    agent.dry_run_networks(None, None)
    assert not agent.passed_dry_run


def test_dry_run_skips_a_module_with_user_networks():
    class Other(SACModule):
        def build_networks(self, specs: Any, network: Any) -> Any:
            policy = super().build_networks(specs, network)
            self.critics = nn.Identity()
            return policy

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.updates += 1

    module = Other(MLPNetwork([8]))
    trainer(max_epochs=1).fit(module, datamodule=data_of("sac"))
    assert module.updates


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_features_under_autocast_have_the_dtype_of_the_run(precision):
    module = PPOModule(EncodedBy())
    trainer(max_epochs=1, precision=precision).fit(module, datamodule=data_of("ppo"))
    assert module.global_step > 0


@pytest.mark.parametrize("network", [MLPNetwork([8], "relu"), EncodedBy(), BatchRenormNetwork([8])], ids=lambda n: "")
@pytest.mark.parametrize("case", AGENTS)
def test_weights_are_bit_equal_with_and_without_the_dry_run(case, network, monkeypatch):
    calls: list[Any] = []

    def fit() -> dict[str, torch.Tensor]:
        L.seed_everything(7, verbose=False)
        module = AGENTS[case](copy.deepcopy(network))
        trainer(max_epochs=1).fit(module, datamodule=data_for(case))
        return module.state_dict()

    tried = fit()
    monkeypatch.setattr("torchrl_lightning.agents.base.dry_run", lambda *given: calls.append(given))
    untried = fit()
    assert len(calls) == 1
    assert tried.keys() == untried.keys()
    for name, tensor in tried.items():
        assert torch.equal(tensor, untried[name]), name


@dataclass
class Vectors(Network):
    """Reads several entries."""

    sizes: list[int] = field(default_factory=lambda: [8])

    def encoder(self, specs: Any) -> nn.Module:
        return MLPEncoder(specs, self.sizes, "relu")


def test_network_fault_names_each_observation_entry():
    class Failing(Vectors):
        def encoder(self, specs: Any) -> nn.Module:
            return Encoder(99)

    specs = specs_of(Categorical(2), a=Unbounded(2), b=Categorical(3))
    dry_run(DQNModule(Vectors()).build(specs), specs)
    with pytest.raises(NetworkFault, match=r"Failing of DQNModule, for observations a \[2\] float32, b \[\] int64"):
        dry_run(DQNModule(Failing()).build(specs), specs)
