"""Networks on one device work with rollouts and buffers on another device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchrl.data import Bounded, Categorical, Unbounded

from kit.learners import OFF_POLICY, ON_POLICY, learner
from kit.rollouts import estimated, make_rollout
from kit.runs import trainer
from kit.specs import DISCRETE, TWO_CHOICES, specs_of
from kit.transitions import read, sequences
from kit.world_models import POINT, pushed
from torchrl_lightning import (
    ExperienceBuffer,
    GAEBuffer,
    GymnasiumCollector,
    OnPolicyDataModule,
    PrioritizedSampler,
    ReplayDataModule,
    RingStorage,
    RingWriter,
    SequenceSampler,
    VTraceBuffer,
    play_episodes,
)
from torchrl_lightning.agents import (
    CrossEntropyPlanner,
    DQNModule,
    DynamicsEnsemble,
    MBPOModule,
    MLPNetwork,
    Network,
    PPOModule,
    RandomNetworkDistillation,
    RandomShootingPlanner,
    RecurrentNetwork,
    WorldModelFit,
    build_actor,
    build_critic,
)
from torchrl_lightning.agents.recurrent import recompute_states
from torchrl_lightning.rollout.values import RECURRENT_KEYS

HERE, THERE = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten
# These operations accept tensors of both devices on a real accelerator: copies, indexing, packed sequences.
TAKES_BOTH = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten._pack_padded_sequence.default,
    aten._pad_packed_sequence.default,
    aten.gru.data,
    aten.lstm.data,
}


class There(Tensor):
    """A CPU tensor that reports the other device."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> There:
        wrapped = Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=THERE,
        )
        wrapped.elem = elem.detach()
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU; wrap the result if an accelerator would return it on the other device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    if there and func not in TAKES_BOTH and any(not isinstance(t, There) and t.dim() for t in tensors):
        raise RuntimeError(f"{func} got tensors on two devices")
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": HERE}
    if func is aten.copy_.default:
        goes_there = isinstance(args[0], There)
    else:
        goes_there = bool(there) if device is None else torch.device(device).type == THERE.type
    wrappers = {id(tensor.elem): tensor for tensor in there}
    out = func(*tree_map_only(There, unwrap, args), **tree_map_only(There, unwrap, kwargs))
    if not goes_there:
        return out
    if func is aten._pack_padded_sequence.default:
        return There(out[0]), out[1]
    return tree_map_only(Tensor, lambda tensor: wrappers[id(tensor)] if id(tensor) in wrappers else There(tensor), out)


def unwrap(tensor: There) -> Tensor:
    return tensor.elem


class SecondDevice(TorchDispatchMode):
    """Simulate ``THERE`` as a device that creates tensors, computes, and copies back."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def move_there(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to the other device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(There(parameter.detach()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = There(buffer)
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [part._parameters[name] for name in part._flat_weights_names]
    return module


SPECS = specs_of(Categorical(2), observation=Unbounded(1))
Move = Callable[[nn.Module], nn.Module]


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.cuda)])
def there(request: pytest.FixtureRequest) -> Iterator[tuple[torch.device, Move]]:
    """Yield another device, and a function that moves a module to it."""
    if request.param == "cuda":
        yield torch.device("cuda", 0), lambda module: module.cuda()
        return
    with SecondDevice():
        yield THERE, move_there


def test_intrinsic_reward_of_a_rollout_on_another_device(there: tuple[torch.device, Move]) -> None:
    rnd = RandomNetworkDistillation(MLPNetwork([8])).build(SPECS)
    far = there[1](copy.deepcopy(rnd))
    for _ in range(2):
        near, other = ({"next": {"observation": torch.rand(4, 3, 1)}} for _ in range(2))
        other["next"]["observation"] = near["next"]["observation"].clone()
        rollouts = [TensorDict(entries, [4, 3]) for entries in (near, other)]
        rnd.annotate(rollouts[0])
        far.annotate(rollouts[1])  # type: ignore[operator]
        reward = rollouts[1]["next", "intrinsic_reward"]
        assert reward.device.type == "cpu"
        torch.testing.assert_close(reward, rollouts[0]["next", "intrinsic_reward"])


@pytest.mark.parametrize("cls", [GAEBuffer, VTraceBuffer])
@pytest.mark.parametrize(
    "network", [MLPNetwork([8], shared=True), RecurrentNetwork("gru", 4), RecurrentNetwork("lstm", 4)]
)
def test_values_and_log_probabilities_of_a_rollout_on_another_device(
    cls: Any, network: Network, there: tuple[torch.device, Move]
) -> None:
    torch.manual_seed(0)
    actor = build_actor(SPECS, network)
    critic = build_critic(SPECS, network, actor=actor)
    data = make_rollout()
    for key in getattr(actor.trunk, "state_keys", ()):
        data[key] = torch.rand(3, 5, 1, 4)
        data["next", *((key,) if isinstance(key, str) else key)] = torch.rand(3, 5, 1, 4)
    rollouts = []
    for device in (None, there[0]):
        if device is not None:
            there[1](actor), there[1](critic)
        buffer = cls(5, actor=actor, critic=critic)
        estimated(buffer, data)
        assert {value.device.type for value in buffer.rollout.values(True, True)} == {"cpu"}
        rollouts.append(buffer.rollout)
    # cuDNN multiplies by recurrent weights in TF32, with ten bits for the fraction.
    roughly = {"rtol": 1e-2, "atol": 1e-3} if there[0].type == "cuda" and actor.trunk.recurrent else {}
    for key in ("state_value", ("next", "state_value"), "advantage", "value_target"):
        torch.testing.assert_close(rollouts[1][key], rollouts[0][key], **roughly)


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("planner", [CrossEntropyPlanner, RandomShootingPlanner])
def test_planner_on_another_device_acts(planner: Any, propagation: str, there: tuple[torch.device, Move]) -> None:
    specs = specs_of(Bounded(-2.0, 2.0, (1,)), observation=Unbounded(3))
    module = DynamicsEnsemble([8], planner=partial(planner, horizon=2, candidates=20), propagation=propagation)
    there[1](module.build(specs, num_members=3))
    collector = GymnasiumCollector("Pendulum-v1", module.policy, num_envs=2, frames_per_batch=4, seed=0)
    rollout = collector.rollout()
    collector.shutdown()
    assert rollout["action"].device.type == "cpu"
    assert rollout["action"].abs().max() > 0.0


def test_world_model_on_another_device_fits_stored_rows_and_generates(
    there: tuple[torch.device, Move], monkeypatch: pytest.MonkeyPatch
) -> None:
    if there[0] == THERE:  # the simulated device does not support fused steps
        monkeypatch.setattr(
            "torchrl_lightning.agents.model_based.world_model_fit.FusedAdam", partial(torch.optim.Adam, foreach=False)
        )
    dynamics = WorldModelFit([8], num_members=3, num_elites=2, batch_size=16, max_epochs=2)
    module = MBPOModule(MLPNetwork([8], "relu"), dynamics=dynamics).build(POINT)
    there[1](module)
    rows = pushed(40)
    module.fit_dynamics(rows, pushed(10))
    assert module.imagine(rows, 2).to("cpu")["next", "reward"].isfinite().all()


def test_policy_on_another_device_acts(there: tuple[torch.device, Move]) -> None:
    policy = there[1](build_actor(TWO_CHOICES, RecurrentNetwork("gru", 4)))
    collector = GymnasiumCollector("CartPole-v1", policy, num_envs=2, frames_per_batch=8, seed=0)
    rollout = collector.rollout()
    collector.shutdown()
    assert {value.device.type for value in rollout.values(True, True)} == {"cpu"}
    assert rollout["next", "recurrent_state"].any()
    assert play_episodes("CartPole-v1", policy, 2, seed=0)["episode_length"].device.type == "cpu"  # type: ignore[arg-type]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_rewritten_batches_and_priorities_reach_the_buffer(cell: str, there: tuple[torch.device, Move]) -> None:
    torch.manual_seed(0)
    module = learner("dqn", RecurrentNetwork(cell, 6))
    memory = RecurrentNetwork(cell, 6).trunk(["observation"], [Unbounded(4)])
    data = sequences(DISCRETE, module, 2, 8)
    buffer = ExperienceBuffer(
        storage=RingStorage(16), writer=RingWriter(num_envs=2), sampler=PrioritizedSampler(16, 1.0, 1.0), batch_size=6
    )
    buffer.extend(data)
    batch = buffer.sample()
    far = batch.unsqueeze(0).to(there[0])
    there[1](memory)
    part = read(module, far, 0.99)
    states, _ = recompute_states(part, memory)
    for key, state in zip(memory.state_keys, states, strict=True):
        far.set(key, state)
    far["td_error"] = part.reward.abs() + 1.0
    far = far.squeeze(0)
    buffer.update_tensordict_priority(far)
    assert len(buffer.write_back(far, memory.state_keys))
    root = RECURRENT_KEYS[0]
    cells = buffer[:][root] if cell == "gru" else buffer[:][root, "h"]
    assert cells.device.type == "cpu"


@pytest.mark.parametrize("case", [*ON_POLICY, *OFF_POLICY])
def test_acting_policy_follows_its_module(case: str) -> None:
    # Another dtype replaces another device, because every machine supports it.
    module = learner(case).to(torch.float64)
    tensors = [*module.policy.parameters(), *module.policy.buffers()]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_runs_on_an_accelerator(precision: Any, tmp_path: Any) -> None:
    optimizer = partial(torch.optim.Adam, lr=1e-3)
    on_policy = OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=32, num_epochs=1, num_mini_batch=2)
    replay = ReplayDataModule(
        "CartPole-v1",
        num_envs=2,
        buffer=lambda num_envs: ExperienceBuffer(
            storage=RingStorage(256), writer=RingWriter(num_envs=num_envs), sampler=SequenceSampler(8), batch_size=4
        ),
        batch_size=4,
        frames_per_batch=32,
        frames_per_update=16,
        warmup_frames=64,
        updates_per_epoch=4,
    )
    modules = (
        PPOModule(
            intrinsic=RandomNetworkDistillation(), optimizer=optimizer, critic_optimizer=optimizer, max_grad_norm=0.5
        ),
        DQNModule(RecurrentNetwork(hidden_size=8), optimizer=optimizer, max_grad_norm=0.5, refresh_states=True),
    )
    for module, data in zip(modules, (on_policy, replay), strict=True):
        settings: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "precision": precision, "max_epochs": 2}
        fitted = trainer(default_root_dir=tmp_path, **settings)
        fitted.fit(module, datamodule=data)
        assert fitted.global_step > 0
        assert all(parameter.isfinite().all() for parameter in module.parameters())
