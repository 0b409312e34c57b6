"""GymnasiumCollector yields what TorchRL's Collector yields."""

from __future__ import annotations

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
from torchrl_lightning.collectors import GymnasiumCollector, environment_specs

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL warns about classes of its own
KEY = {"box": "observation", "discrete": "observation", "scalar": "observation", "dict": "image"}


def act(observation: Tensor) -> tuple[Tensor, Tensor]:
    total = observation.double().reshape(4, -1).sum(-1)
    return total.long() % 3, total[:, None].float() / 7


def plain_policy(kind: str) -> TensorDictModule:
    return TensorDictModule(act, in_keys=[KEY[kind]], out_keys=["action", "state_value"])


def recurrent_policy(cell: str) -> TensorDictSequential:
    torch.manual_seed(0)
    body: nn.Module
    if cell == "gru":
        body = GRUModule(
            3, 5, in_keys=["observation", "recurrent_state", "is_init"], out_keys=["embed", ("next", "recurrent_state")]
        )
    else:
        names = [("recurrent_state", "h"), ("recurrent_state", "c")]
        body = LSTMModule(
            3, 5, in_keys=["observation", *names, "is_init"], out_keys=["embed", *(("next", *name) for name in names)]
        )
    head = TensorDictModule(lambda x: (x.sum(-1) * 1000).long() % 3, in_keys=["embed"], out_keys=["action"])
    return TensorDictSequential(body, head)


def torchrl_env(kind: str, primers: list[object]) -> SerialEnv:
    def wrap(make):
        return lambda: TransformedEnv(
            GymWrapper(make(), categorical_action_encoding=True), Compose(InitTracker(), *(p() for p in primers))
        )

    return SerialEnv(4, [wrap(make) for make in factories(kind)])


def compare(ours: TensorDict, theirs: TensorDict) -> None:
    assert ours.shape == theirs.shape
    assert ours.names == theirs.names
    assert ours.device == theirs.device
    keys = set(theirs.keys(True))
    assert set(ours.keys(True)) == keys
    for key in keys:
        mine, other = ours[key], theirs[key]
        if isinstance(other, Tensor):
            assert mine.dtype == other.dtype, key
            assert mine.shape == other.shape, key
            assert torch.equal(mine, other), key
        else:
            assert mine.names == other.names, key


def run_both(kind: str, policy: nn.Module, primers: list[object] = (), batches: int = 4, **kwargs: object) -> None:
    reference = Collector(torchrl_env(kind, list(primers)), policy, frames_per_batch=28, total_frames=28 * batches)
    collector = GymnasiumCollector(
        vector_env(kind, **kwargs), policy, frames_per_batch=28, total_frames=28 * batches, seed=0
    )
    seen = 0
    for mine, other in zip(collector, reference, strict=True):
        compare(mine, other)
        seen += 1
    reference.shutdown()
    collector.shutdown()
    assert seen == batches == len(collector)


@pytest.mark.parametrize("kind", ["box", "discrete", "scalar", "dict"])
def test_equal_step_for_step(kind: str) -> None:
    run_both(kind, plain_policy(kind))


def test_equal_with_disabled_autoreset() -> None:
    run_both("dict", plain_policy("dict"), mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_recurrent_states_are_carried_and_zeroed_alike(cell: str) -> None:
    policy = recurrent_policy(cell)
    body = policy.module[0]
    run_both("box", policy, [body.make_tensordict_primer])


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
