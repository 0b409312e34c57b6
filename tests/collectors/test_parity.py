"""GymnasiumCollector yields what TorchRL's Collector yields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymWrapper, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import GRUModule, LSTMModule

from kit.counting import factories, vector_env
from kit.states import differences, plain
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.environments import environment_specs

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL warns about classes of its own
KEY = {"box": "observation", "discrete": "observation", "scalar": "observation", "dict": "image"}


def act(observation: Tensor) -> tuple[Tensor, Tensor]:
    total = observation.double().reshape(4, -1).sum(-1)
    return total.long() % 3, total[:, None].float() / 7


def plain_policy(kind: str) -> TensorDictModule:
    return TensorDictModule(act, in_keys=[KEY[kind]], out_keys=["action", "state_value"])


def recurrent_policy(cell: str) -> TensorDictSequential:
    torch.manual_seed(0)
    kind, *names = {
        "gru": (GRUModule, "recurrent_state"),
        "lstm": (LSTMModule, ("recurrent_state", "h"), ("recurrent_state", "c")),
    }[cell]
    following = [("next", name) if isinstance(name, str) else ("next", *name) for name in names]
    body = kind(3, 5, in_keys=["observation", *names, "is_init"], out_keys=["embed", *following])
    head = TensorDictModule(lambda x: (x.sum(-1) * 1000).long() % 3, in_keys=["embed"], out_keys=["action"])
    return TensorDictSequential(body, head)


def torchrl_env(kind: str, primers: list[object]) -> SerialEnv:
    def wrap(make):
        return lambda: TransformedEnv(
            GymWrapper(make(), categorical_action_encoding=True), Compose(InitTracker(), *(p() for p in primers))
        )

    return SerialEnv(4, [wrap(make) for make in factories(kind)])


def names(data: TensorDict) -> dict[Any, Any]:
    nested = {key: data[key] for key in data.keys(True) if not isinstance(data[key], Tensor)}
    return {key: (part.names, part.device, part.batch_size) for key, part in {"": data, **nested}.items()}


def run_both(kind: str, policy: nn.Module, primers: list[object] = (), **kwargs: object) -> None:
    sizes = {"frames_per_batch": 28, "total_frames": 28 * 4}
    reference = Collector(torchrl_env(kind, list(primers)), policy, **sizes)
    collector = GymnasiumCollector(vector_env(kind, **kwargs), policy, **sizes, seed=0)
    for mine, other in zip(collector, reference, strict=True):
        assert names(mine) == names(other)
        assert not differences(plain(mine), plain(other))
    reference.shutdown()
    collector.shutdown()
    assert len(collector) == 4


@pytest.mark.parametrize("kind", ["box", "discrete", "scalar", "dict"])
def test_rollouts_of_both_collectors_are_equal(kind: str) -> None:
    run_both(kind, plain_policy(kind))


def test_rollouts_are_equal_with_disabled_autoreset() -> None:
    run_both("dict", plain_policy("dict"), mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_recurrent_states_are_carried_and_zeroed_alike(cell: str) -> None:
    policy = recurrent_policy(cell)
    run_both("box", policy, [policy.module[0].make_tensordict_primer])


@pytest.mark.parametrize("kind", ["box", "discrete", "scalar", "dict"])
def test_specs_equal(kind: str) -> None:
    single = GymWrapper(factories(kind)[0](), categorical_action_encoding=True)
    specs = environment_specs(vector_env(kind))
    assert specs.observation == single.observation_spec
    assert specs.action == single.action_spec
    of_torchrl = environment_specs(torchrl_env(kind, []))
    assert of_torchrl.observation == specs.observation
    assert of_torchrl.action == specs.action
    assert of_torchrl.num_envs == specs.num_envs == 4
    assert of_torchrl.keys == specs.keys
