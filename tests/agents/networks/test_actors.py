"""Actors and critics built from specs: the fast forward equals TorchRL's generic one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Binary, Categorical, MultiCategorical, OneHot, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules.utils import get_primers_from_module

from kit.specs import BOX, DISCRETE, TWO_CHOICES, specs_of
from torchrl_lightning.agents import CNNNetwork, MLPNetwork, RecurrentNetwork, build_actor, build_critic
from torchrl_lightning.agents.networks.encoders import FlatEntries, mlp
from torchrl_lightning.agents.networks.squashed import build_squashed_actor

ACTIONS = {
    "discrete": Categorical(3),
    "multi-discrete": MultiCategorical([2, 3]),
    "equal multi-discrete": Categorical(3, shape=(2,)),
    "binary": Binary(3, dtype=torch.int8),
    "one-hot": OneHot(3),
    "bounded": BOX.action,
    "unbounded": Unbounded(2),
}


def inputs(batch: int = 64, **extra: torch.Tensor) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.randn(batch, 4),
            "recurrent_state": torch.randn(batch, 2, 5),
            "is_init": torch.arange(batch).unsqueeze(-1) % 3 == 0,
            **extra,
        },
        [batch],
    )


CASES = [*((name, "auto") for name in ACTIONS), ("bounded", "tanh_normal")]


@pytest.mark.parametrize("exploration", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, None])
@pytest.mark.parametrize("network", [MLPNetwork([8]), RecurrentNetwork(hidden_size=5, num_layers=2)])
@pytest.mark.parametrize(("action", "distribution"), CASES)
def test_fast_forward_is_the_generic_one(action: str, distribution: str, network: Any, exploration: Any) -> None:
    torch.manual_seed(0)
    actor = build_actor(specs_of(ACTIONS[action]), network, distribution=distribution)
    for parameter in actor.parameters():
        parameter.data.mul_(3)
    td = inputs()
    with torch.no_grad(), set_exploration_type(exploration):
        torch.manual_seed(1)
        fast = actor(td.copy())
        fast_rng = torch.get_rng_state()
        torch.manual_seed(1)
        generic = actor.generic_forward(td.copy())
        assert torch.equal(fast_rng, torch.get_rng_state())
        torch.manual_seed(1)
        outputs = actor.compute_step(td)
    assert list(outputs) == actor.out_keys
    assert all(torch.equal(value, fast[key]) for key, value in outputs.items())
    assert set(td.keys(True, True)) == set(inputs().keys(True, True))
    assert set(fast.keys(True, True)) == set(generic.keys(True, True)) == {*td.keys(), *actor.out_keys}
    for key in actor.out_keys:
        assert fast[key].dtype == generic[key].dtype
        # Near a bound, the inverse of tanh amplifies rounding errors of the action.
        atol = 1e-4 if distribution == "tanh_normal" and key == "action_log_prob" else 1e-6
        torch.testing.assert_close(fast[key], generic[key], rtol=1e-6, atol=atol)
    assert fast["action_log_prob"].shape == (64,)
    assert ACTIONS[action].is_in(fast["action"][0].to(ACTIONS[action].dtype))


@pytest.mark.parametrize(("action", "distribution"), CASES)
def test_evaluate_agrees_with_the_distribution(action: str, distribution: str) -> None:
    actor = build_actor(specs_of(ACTIONS[action]), distribution=distribution)
    td = actor(inputs())
    log_prob, entropy = actor.head.evaluate(actor.head.sampling_parameters(actor.trunk.encode(td)), td["action"])
    dist = actor.get_dist(td)
    torch.testing.assert_close(log_prob, dist.log_prob(td["action"]))
    torch.testing.assert_close(log_prob, td["action_log_prob"], rtol=1e-4, atol=1e-5)
    if distribution != "tanh_normal":
        torch.testing.assert_close(entropy, dist.entropy())
    assert entropy.shape == (64,)


def test_mean_exploration_and_keyword_dispatch_take_the_generic_path() -> None:
    actor = build_actor(BOX)
    with torch.no_grad(), set_exploration_type(ExplorationType.MEAN):
        td = inputs()
        assert torch.equal(actor.compute_step(td)["action"], actor(td)["action"])
    assert "action" in actor(inputs(), tensordict_out=TensorDict({}, [64]))


def test_first_policy_is_nearly_uniform() -> None:
    dist = build_actor(DISCRETE).get_dist(inputs())
    assert (dist.probs - 1 / 3).abs().max() < 0.02


def test_copy_keeps_its_own_parameters() -> None:
    actor = build_actor(DISCRETE, MLPNetwork([8]))
    copied = copy.deepcopy(actor)
    torch.nn.init.zeros_(actor.head.layers.weight)
    td = inputs()
    assert not torch.equal(copied.get_dist(td).logits, actor.get_dist(td).logits)
    copied.load_state_dict(actor.state_dict())
    assert torch.equal(copied.get_dist(td).logits, actor.get_dist(td).logits)


def test_dict_observations_are_concatenated() -> None:
    specs = specs_of(
        Categorical(2), position=Unbounded((2, 3)), goal=Categorical(5), speed=Unbounded(1, dtype=torch.float64)
    )
    actor, critic = build_actor(specs), build_critic(specs)
    assert actor.in_keys == critic.in_keys == ["goal", "position", "speed"]
    td = TensorDict(
        {
            "position": torch.randn(7, 2, 3),
            "goal": torch.arange(7) % 5,
            "speed": torch.randn(7, 1, dtype=torch.float64),
        },
        [7],
    )
    assert actor.trunk.encoder.flat.features == 6 + 5 + 1
    assert critic(actor(td))["state_value"].shape == (7, 1)


@pytest.mark.parametrize("shape", [(3, 36, 40), (36, 40, 3), (36, 40)])
def test_pixels_of_any_layout(shape: tuple[int, ...]) -> None:
    specs = specs_of(Categorical(2), pixels=Unbounded(shape, dtype=torch.uint8), speed=Unbounded(2))
    network = CNNNetwork(hidden_sizes=[16])
    actor = build_actor(specs, network)
    critic = build_critic(specs, network, actor=actor)
    td = TensorDict(
        pixels=torch.randint(0, 255, (5, *shape), dtype=torch.uint8), speed=torch.randn(5, 2), batch_size=[5]
    )
    before = td["pixels"].clone()
    assert critic(actor(td))["state_value"].shape == (5, 1)
    assert torch.equal(td["pixels"], before)


def test_choices_are_one_hot_and_bits_stay_bits() -> None:
    unequal, bits, equal = MultiCategorical([2, 3]), Binary(2, dtype=torch.int8), Categorical(3, shape=(2,))
    flat = FlatEntries([unequal, bits, equal, Categorical(2)])
    entries = [torch.tensor([[[1, 2]]]), torch.tensor([[[1, 0]]]), torch.tensor([[[0, 1]]]), torch.tensor([[1]])]
    assert flat(*entries).tolist() == [[[0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1]]]
    assert flat.features == 15


def test_image_entry_is_the_one_with_channels() -> None:
    encoder = CNNNetwork(hidden_sizes=[8]).encoder([Unbounded((5, 3)), Unbounded((36, 36, 3)), Binary(4)])
    assert encoder.pixels == 1
    assert encoder(torch.zeros(2, 5, 3), torch.zeros(2, 36, 36, 3), torch.zeros(2, 4)).shape == (2, 8)


def test_channels_last_equals_channels_first() -> None:
    first = CNNNetwork().encoder([Unbounded((3, 40, 40), dtype=torch.uint8)])
    last = CNNNetwork().encoder([Unbounded((40, 40, 3), dtype=torch.uint8)])
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 255, (2, 3, 40, 40), dtype=torch.uint8)
    torch.testing.assert_close(first(image), last(image.movedim(1, -1)))


@pytest.mark.parametrize("shape", [(7, 7, 3), (3, 7, 7), (20, 20, 12), (12, 20, 20), (7, 7), (7, 7, 12), (12, 7, 7)])
def test_channels_of_small_and_stacked_images_are_found(shape: tuple[int, ...]) -> None:
    encoder = CNNNetwork([4, 4, 4], [2, 2, 2], [1, 1, 1], [8]).encoder([Unbounded(shape, dtype=torch.uint8)])
    channels = next((n for n in shape if shape.count(n) == 1), 1)
    assert encoder.convolutions[0].in_channels == channels
    assert encoder(torch.zeros(5, *shape, dtype=torch.uint8)).shape == (5, 8)


def test_shared_trunk_is_registered_once() -> None:
    specs, network = TWO_CHOICES, MLPNetwork([8], shared=True)
    actor = build_actor(specs, network)
    critic = build_critic(specs, network, actor=actor, out_keys=["state_value", "intrinsic_state_value"])
    assert critic.trunks[0] is actor.trunk
    assert sum(p.numel() for p in critic.parameters()) == 2 * 9
    td = critic(inputs())
    torch.testing.assert_close(td["state_value"], critic.module[0](actor.trunk.encode(td)))


@pytest.mark.parametrize("action", ["discrete", "bounded"])
def test_head_layers_are_between_shared_trunk_and_heads(action: str) -> None:
    specs, network = specs_of(ACTIONS[action]), MLPNetwork([8], shared=True, head_sizes=[5])
    actor = build_actor(specs, network)
    critic = build_critic(specs, network, actor=actor)
    td = critic(actor(inputs()))
    ((td["action_log_prob"].sum()) * 0 + td["state_value"].sum()).backward()
    assert sum(p.numel() for p in critic.parameters()) == 8 * 5 + 5 + 5 + 1
    assert actor.trunk.encoder.layers[0].weight.grad.abs().sum() > 0
    assert all(p.grad.abs().sum() == 0 for p in actor.head.parameters())


def test_separate_critics_differ() -> None:
    keys = [("state_value", "a"), ("state_value", "b")]
    critic = build_critic(TWO_CHOICES, out_keys=keys, separate=True)
    td = critic(inputs())
    assert td["state_value", "a"].shape == (64, 1)
    gradient = torch.autograd.grad(td["state_value", "a"].sum(), list(critic.trunks[1].parameters()), allow_unused=True)
    assert all(part is None for part in gradient)


@pytest.mark.parametrize(
    ("cell", "keys"), [("gru", {"recurrent_state"}), ("lstm", {("recurrent_state", x) for x in "hc"})]
)
def test_primer_contains_the_recurrent_state(cell: str, keys: set[Any]) -> None:
    primer = get_primers_from_module(build_actor(TWO_CHOICES, RecurrentNetwork(cell, 8)))
    assert set(primer.primers.keys(True, True)) == keys


def test_uniform_initialization_equals_torch() -> None:
    network = MLPNetwork([8], "relu", head_sizes=[16], initialization="uniform")
    torch.manual_seed(0)
    actor = build_squashed_actor(BOX, network)
    torch.manual_seed(0)
    hidden = [nn.Linear(4, 8), nn.Linear(8, 16)]
    layers = [layer for layer in actor.modules() if isinstance(layer, nn.Linear)]
    for layer, plain in zip(layers[:2], hidden, strict=True):
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer.bias, plain.bias)
    assert layers[2].weight.norm() < 0.1  # the head is still orthogonal


def test_mlp_equals_sequential() -> None:
    network = mlp(3, [8, 4], "tanh")
    plain = nn.Sequential(*network)
    x = torch.randn(5, 3)
    assert torch.equal(network(x), plain(x))
    assert network.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(mlp(3, [8], "gelu")(x).isfinite(), torch.ones(5, 8, dtype=torch.bool))


def test_mlp_honours_hooks_parametrizations_and_replaced_layers() -> None:
    network, x, calls = mlp(3, [8, 4], "relu"), torch.randn(5, 3), []
    handle = network[0].register_forward_hook(lambda module, inputs, output: calls.append(output) or output * 0)
    assert torch.equal(network(x), torch.relu(network[2].bias).expand(5, 4))
    assert len(calls) == 1
    handle.remove()
    nn.utils.parametrizations.spectral_norm(network[0])
    network[1] = nn.Softplus()
    torch.testing.assert_close(network.eval()(x), nn.Sequential(*network).eval()(x))
    network[2].register_full_backward_hook(lambda module, inputs, outputs: calls.append(outputs[0]))
    network(x.requires_grad_()).sum().backward()
    assert len(calls) == 2
