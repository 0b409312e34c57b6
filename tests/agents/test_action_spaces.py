"""Every way of acting passes actions that the space contains, with the type of the space's samples."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper, SerialEnv

from kit.extras import need_extra
from kit.forks import forked_workers
from kit.replay import replay_data
from kit.runs import trainer
from torchrl_lightning import (
    EnvironmentRecipe,
    LoadedPolicy,
    OnPolicyDataModule,
    environment_specs,
    from_pretrained,
    load_policy,
    make_vector_env,
    play_episodes,
    save_pretrained,
)
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, RecurrentNetwork, SACModule, TD3Module
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector, TorchRLCollector
from torchrl_lightning.demonstrations import Demonstration, record_demonstrations
from torchrl_lightning.deploy.export import export_policy
from torchrl_lightning.environments.specs import specs_from_state, specs_state

INF = np.inf
CHOICES = {
    "Discrete int32": spaces.Discrete(3, dtype=np.int32),
    "Discrete int8 from -2": spaces.Discrete(3, start=-2, dtype=np.int8),
    "MultiDiscrete int32": spaces.MultiDiscrete([3, 2], dtype=np.int32, start=[1, 5]),
    "MultiBinary": spaces.MultiBinary(3),
}
BOXES = {
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "float16": spaces.Box(-2, 3, (2,), np.float16),
    "float64 of 0.1": spaces.Box(0.1, 0.3, (2,), np.float64),
    "scalar of float64": spaces.Box(0.1, 0.3, (), np.float64),
    "far from 0": spaces.Box(np.float32(1000.1), np.float32(1000.3), (2,), np.float32),
}
OPEN = {
    "one side": spaces.Box(np.array([-INF, 0.1]), np.array([0.3, INF]), dtype=np.float64),
    "float16 without bounds": spaces.Box(-INF, INF, (2,), np.float16),
}
SPACES = {**CHOICES, **BOXES, **OPEN}
# Only a policy of a user supports these spaces.
OTHERS = {
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
    "whole numbers": spaces.Box(0, 5, (2,), np.int32),
    "bytes": spaces.Box(0, 5, (2,), np.uint8),
    "a scalar whole number": spaces.Box(0, 5, (), np.int16),
    "MultiBinary of a shape": spaces.MultiBinary((2, 2)),
}


class Strict(gymnasium.Env[Any, Any]):
    """Fail if the space does not contain an action, or if Gymnasium would convert the action for this check."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        check(self.action_space, action)
        return self._observed(), 1.0, False, self.t >= 5, {}

    def _observed(self) -> Any:
        return self.np_random.normal(size=3).astype(np.float32) * 3


def check(space: Any, action: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert space.contains(action), f"{action!r} is not in {space}"
        assert type(action) in (type(space.sample()), np.ndarray)


def make(space: Any) -> Any:
    return partial(Strict, space)


def built(space: Any, kind: Any, **settings: Any) -> tuple[Any, Any]:
    """Return an agent with actions that reach the bounds, and the specs."""
    torch.manual_seed(0)
    specs = environment_specs(make_vector_env(make(space), 1))
    agent = kind(**{"network": MLPNetwork([8]), **getattr(kind, "keywords", {}), **settings}).build(specs)
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.mul_(30.0)
    return agent, specs


AGENTS = {
    **{(name, "ppo"): PPOModule for name in SPACES},
    **{(name, "tanh"): partial(PPOModule, distribution="tanh_normal") for name in BOXES},
    **{
        (name, "recurrent"): partial(PPOModule, network=RecurrentNetwork("gru", 4))
        for name in ("scalar", "MultiBinary")
    },
    **{(name, "sac"): SACModule for name in BOXES},
    **{(name, "td3"): partial(TD3Module, noise=3.0) for name in BOXES},
    **{(name, "dqn"): DQNModule for name in list(CHOICES)[:2]},
}


@pytest.mark.parametrize(("name", "agent"), AGENTS)
def test_actions_of_each_policy_stay_in_the_space(name: str, agent: str, tmp_path: Path) -> None:
    space = SPACES[name]
    module, specs = built(space, AGENTS[name, agent])
    policy = module.policy
    collector = GymnasiumCollector(make(space), policy, num_envs=3, frames_per_batch=30, seed=0)
    rollout = collector.rollout()
    assert rollout["action"].dtype == specs.action.dtype
    collector.shutdown()
    for deterministic in (True, False):
        assert play_episodes(make(space), policy, 3, seed=0, deterministic=deterministic)["episode_length"].sum() == 15
        loaded = LoadedPolicy(policy, specs_from_state(specs_state(specs)), deterministic=deterministic)
        observation = Strict.observation_space.sample()
        check(space, loaded.act(observation))
        for rows in (1, 5, 3):
            observations = np.stack([Strict.observation_space.sample() for _ in range(rows)])
            for form in (observations, torch.from_numpy(observations), {"observation": observations}):
                actions = loaded.act(form, starts=True)
                assert actions.shape == (rows, *(space.shape or ()))
                assert actions.dtype == space.dtype
                for i in range(rows):
                    check(space, actions[i, ...] if isinstance(space, spaces.Box) else actions[i])
    recorded = list(record_demonstrations(make(space), policy, 2, seed=0))
    for demonstration in recorded:
        assert demonstration.length == 5
        demonstration.fits(specs)
    described = export_policy(LoadedPolicy(policy, specs), tmp_path / "policy.pt2")
    assert described["outputs"]["action"] == {"shape": ["N", *(space.shape or ())], "dtype": str(space.dtype)}
    program: Any = torch.export.load(tmp_path / "policy.pt2").module()
    outputs = program(*(torch.zeros(4, *entry["shape"][1:]) for entry in described["inputs"].values()))
    actions = (outputs[0] if agent == "recurrent" else outputs).numpy()
    for i in range(4):
        check(space, actions[i, ...] if isinstance(space, spaces.Box) else actions[i])


@pytest.mark.parametrize("name", [*SPACES, *OTHERS])
def test_actions_of_random_and_user_policies_stay_in_the_space(name: str) -> None:
    space = {**SPACES, **OTHERS}[name]
    specs = environment_specs(make_vector_env(make(space), 1))
    spec = specs.action

    def act(observation: torch.Tensor) -> torch.Tensor:
        low, high = (getattr(spec.space, side, None) for side in ("low", "high"))
        shape = (*observation.shape[:-1], *spec.shape)
        if low is None or high is None:
            return torch.ones(shape)
        return torch.where(observation[..., :1].sum() > 0, low, high).expand(shape).nan_to_num(posinf=7.0, neginf=-7.0)

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    for kind in (None, policy):
        collector = GymnasiumCollector(make(space), kind, num_envs=2, frames_per_batch=20, seed=0)
        assert collector.rollout()["action"].shape[2:] == spec.shape
        collector.shutdown()
    loaded = LoadedPolicy(policy, specs)
    for sign in (-1.0, 1.0):
        check(space, loaded.act(np.full(3, sign, np.float32)))
        assert loaded.act(np.full((2, 3), sign, np.float32)).shape == (2, *(space.shape or ()))


@pytest.mark.parametrize("name", ["scalar", "scalar of float64", "Discrete int8 from -2", "float16"])
@pytest.mark.parametrize("way", ["async", "workers"])
def test_actions_in_other_processes_stay_in_the_space(way: str, name: str) -> None:
    space = SPACES[name]
    module, _ = built(space, PPOModule)
    kind: Any = GymnasiumCollector if way == "async" else partial(AsynchronousCollector, num_workers=1)
    options = {"vectorization": "async"} if way == "async" else {}
    with forked_workers():
        collector = kind(make(space), module.policy, num_envs=2, frames_per_batch=20, seed=0, **options)
        assert collector.rollout()["next", "reward"].sum() == 20
        collector.shutdown()


@pytest.mark.filterwarnings("ignore")  # TorchRL warns about classes of its own
@pytest.mark.parametrize("name", ["float16", "float64 of 0.1", "one side", "far from 0"])
def test_actions_in_torchrl_environments_stay_in_the_space(name: str) -> None:
    space = SPACES[name]
    module, _ = built(space, PPOModule)

    def wrapped() -> Any:
        return GymWrapper(Strict(space), categorical_action_encoding=True)

    for policy in (module.policy, None):
        collector = TorchRLCollector(SerialEnv(2, wrapped), policy, frames_per_batch=20, seed=0)
        rollout = collector.rollout()
        assert rollout["next", "reward"].sum() == 20
        assert rollout["action"].dtype == torch.float32
        collector.shutdown()
    assert play_episodes(wrapped, module.policy, 2, seed=0)["episode_length"].tolist() == [5, 5]
    (demonstration,) = record_demonstrations(wrapped, module.policy, 1, seed=0)
    demonstration.fits(environment_specs(wrapped()))


@pytest.mark.parametrize("name", ["scalar", "Discrete int32", "float64 of 0.1"])
def test_checkpoint_and_a_published_policy_know_the_space(name: str, tmp_path: Path) -> None:
    space = SPACES[name]
    data = OnPolicyDataModule(
        make(space), num_envs=2, frames_per_batch=16, num_mini_batch=1, num_epochs=1, seed=0, eval_episodes=2
    )
    run = trainer(max_epochs=1)
    run.fit(PPOModule(MLPNetwork([4])), datamodule=data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    policy = load_policy(tmp_path / "a.ckpt", PPOModule(MLPNetwork([4])))
    env = Strict(space)
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        observation, *_ = env.step(policy.act(observation))
    # A file of an earlier development version does not store the format; its policies act as their networks do.
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert stored["OnPolicyDataModule"]["specs"].pop("action_format")["dtype"] == str(space.dtype)
    assert specs_from_state(stored["OnPolicyDataModule"]["specs"]) == policy.specs
    config = {
        "_target_": "torchrl_lightning.PPOModule",
        "_convert_": "all",
        "network": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [4]},
    }
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    torch.save({**stored, "config": {"model": config}}, tmp_path / "b.ckpt")
    save_pretrained(tmp_path / "b.ckpt", tmp_path / "published")
    check(space, from_pretrained(tmp_path / "published").act(observation))


@pytest.mark.parametrize("name", list(CHOICES)[:2])
def test_random_frames_and_those_of_the_policy_fill_one_buffer(name: str) -> None:
    data = replay_data(env=make(CHOICES[name]), warmup_frames=12)
    trainer(max_epochs=2, limit_val_batches=0).fit(DQNModule(MLPNetwork([8])), datamodule=data)
    assert data.buffer[:]["action"].dtype == torch.int64
    assert set(data.buffer[:]["action"].tolist()) <= {0, 1, 2}


@pytest.mark.parametrize(
    "name", ["scalar", "float16", "float64 of 0.1", "Discrete int8 from -2", "MultiDiscrete int32"]
)
def test_onnx_gives_actions_of_the_space(name: str, tmp_path: Path) -> None:
    need_extra("onnx")
    import onnxruntime

    space = SPACES[name]
    module, specs = built(space, PPOModule)
    export_policy(LoadedPolicy(module.policy, specs), tmp_path / "policy.onnx", format="onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    (actions,) = session.run(None, {"observation": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32) * 9})
    for i in range(4):
        check(space, actions[i, ...] if isinstance(space, spaces.Box) else actions[i])


def test_recurrent_states_fix_the_number_of_environments() -> None:
    _, specs = built(BOXES["scalar"], PPOModule)
    rows = {count: np.zeros((count, 3), np.float32) for count in (1, 5, 3)}
    free = LoadedPolicy(built(BOXES["scalar"], PPOModule)[0].policy, specs)
    for count, observations in rows.items():
        assert free.act(observations).shape == (count,)
        assert free.act(observations[0]).shape == ()
    recurrent = LoadedPolicy(built(BOXES["scalar"], PPOModule, network=RecurrentNetwork("gru", 4))[0].policy, specs)
    first = recurrent.act(rows[5])
    state = dict(recurrent.state)
    with pytest.raises(ValueError, match=r"of 5 environments.*got 3\..*starts=True"):
        recurrent.act(rows[3])
    assert recurrent.act(rows[3], starts=True).tolist() == first[:3].tolist()
    with pytest.raises(ValueError, match=r"of 5 environments.*got 1\."):
        recurrent.act(rows[1], state=state)
    assert recurrent.act(rows[5], state=state).shape == (5,)


def test_recipe_of_the_checkpoint_plays_what_the_policy_gives() -> None:
    space = BOXES["scalar"]
    module, specs = built(space, PPOModule)
    recipe = EnvironmentRecipe(make(space), action_repeat=2)
    policy = LoadedPolicy(module.policy, specs)
    env: Any = recipe()
    observation, _ = env.reset(seed=0)
    env.step(policy.act(observation))
    (demonstration,) = record_demonstrations(recipe, module.policy, 1, seed=0)
    assert isinstance(demonstration, Demonstration)
    assert demonstration.steps["action"].shape == (3, 1)
