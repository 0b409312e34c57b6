"""Action masks: policies take no forbidden actions, and losses account for the mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, OneHot, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type

from kit.masked import Doors
from kit.replay import replay_data
from kit.runs import trainer
from kit.torchrl_losses import dqn as loss_of_values
from kit.torchrl_losses import loss_agent
from torchrl_lightning import ActionMaskFromInfo, OnPolicyDataModule
from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule, RecurrentNetwork, VTraceModule, build_actor
from torchrl_lightning.agents.transitions import read_transitions
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.deploy.loading import LoadedPolicy
from torchrl_lightning.environments import environment_specs, make_vector_env
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.masks import ActionMask

ROWS = 30_000  # a million steps over all policies
ACTIONS = {
    "discrete": Categorical(6),
    "one_hot": OneHot(6),
    "several": MultiCategorical([2, 4]),
}


def specs_of(kind: str) -> Any:
    observation = Composite(observation=Unbounded(6), action_mask=Binary(6, dtype=torch.int8))
    return SimpleNamespace(observation=observation, action=ACTIONS[kind], num_envs=ROWS)


def steps(rows: int = ROWS, parts: tuple[int, ...] = (6,)) -> TensorDict:
    mask = torch.rand(rows, sum(parts)) < 0.3
    first = 0
    for size in parts:
        mask[torch.arange(rows), first + torch.randint(size, (rows,))] = True
        first += size
    return TensorDict(
        {
            "observation": torch.randn(rows, 6),
            "action_mask": mask.to(torch.int8),
            "is_init": torch.zeros(rows, 1, dtype=torch.bool),
        },
        [rows],
    )


@pytest.mark.parametrize("kind", ACTIONS)
def test_forbidden_action_is_never_taken_in_a_million_steps(kind: str) -> None:
    specs, parts = specs_of(kind), (2, 4) if kind == "several" else (6,)
    mask, step = ActionMask(specs.action), steps(parts=parts)
    actors = [lambda: {"action": mask.draw(step["action_mask"])}]
    for network in (MLPNetwork([8]), MLPNetwork([8], shared=True)):
        actor = build_actor(specs, network)
        torch.nn.init.normal_(actor.head.layers.weight, std=3.0)  # strong preferences
        actors.append(lambda actor=actor: actor.compute_step(step))
    if kind != "several":
        policy = DQNModule(MLPNetwork([8])).build(specs).policy
        actors.append(lambda: policy.compute_step(step))
    with torch.no_grad():
        for act in actors:
            for _ in range(4):
                mask.check_actions(act()["action"], step["action_mask"], 0)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            for act in actors[1:]:
                mask.check_actions(act()["action"], step["action_mask"], 0)


def test_random_actions_are_drawn_evenly_among_the_allowed() -> None:
    counts = ActionMask(Categorical(4)).draw(torch.tensor([1, 0, 1, 1]).expand(30_000, 4)).bincount(minlength=4)
    assert counts[1] == 0
    assert all(abs(int(counts[i]) - 10_000) < 500 for i in (0, 2, 3))


@pytest.mark.parametrize("kind", ACTIONS)
def test_probabilities_and_entropy_are_those_of_the_allowed_actions(kind: str) -> None:
    specs, parts = specs_of(kind), (2, 4) if kind == "several" else (6,)
    module, step = PPOModule(MLPNetwork([8])).build(specs), steps(32, parts)
    step["action"] = module.policy.compute_step(step)["action"]
    log_prob, entropy, _ = module.evaluate(step)
    (log_prob.mean() + entropy.mean()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    logits = module.policy.head(module.policy.trunk.encode(step))[0].detach()
    expected, expected_entropy = torch.zeros(32), torch.zeros(32)
    first = 0
    for number, size in enumerate(parts):
        allowed = step["action_mask"][:, first : first + size].bool()
        probabilities = logits[:, first : first + size].exp() * allowed
        probabilities /= probabilities.sum(-1, keepdim=True)
        choice = step["action"].float().argmax(-1) if kind == "one_hot" else step["action"].reshape(32, -1)[:, number]
        expected += probabilities[torch.arange(32), choice].log()
        expected_entropy -= torch.special.xlogy(probabilities, probabilities).sum(-1)
        first += size
    torch.testing.assert_close(log_prob.detach(), expected)
    torch.testing.assert_close(entropy.detach(), expected_entropy)
    torch.testing.assert_close(module.policy.get_dist(step).log_prob(step["action"]).detach(), expected)
    assert module.policy.generic_forward(step.clone())["action"].shape == step["action"].shape


@pytest.mark.parametrize("double", [True, False])
def test_dqn_target_is_the_best_allowed_next_action(double: bool) -> None:
    module, now, after = DQNModule(MLPNetwork([8]), double=double, loss_function="l1"), steps(16), steps(16)
    module.build(specs_of("discrete"))
    after["action_mask"][0] = 0  # the end of an episode
    ended = torch.zeros(16, 1, dtype=torch.bool)
    ended[0] = True
    after.update({"reward": torch.randn(16, 1), "terminated": ended, "done": ended})
    batch = now.update({"action": torch.randint(6, (16,)), "next": after})
    _, error = module.losses(read_transitions(batch, ["observation"], 0.9, masked=True))
    with torch.no_grad():
        best = module.q_network.values([after["observation"]]).masked_fill(after["action_mask"] == 0, -1e9).amax(-1)
        target = after["reward"][:, 0] + 0.9 * best * ~ended[:, 0]
        value = module.q_network.values([now["observation"]])[torch.arange(16), batch["action"]]
    torch.testing.assert_close(error, (value - target).abs())


@pytest.mark.parametrize(
    ("agent", "stream", "env"),
    [
        (lambda: PPOModule(MLPNetwork([8])), "rollouts", Doors),
        (lambda: PPOModule(RecurrentNetwork(hidden_size=4)), "rollouts", lambda: Doors((2, 3))),
        (lambda: VTraceModule(MLPNetwork([8])), "rollouts", Doors),
        (lambda: DQNModule(MLPNetwork([8])), "uniform", Doors),
        (lambda: DQNModule(MLPNetwork([8])), "uniform", lambda: Doors(last=1)),
        (lambda: DQNModule(MLPNetwork([8]), dueling=True), "prioritized, three steps", Doors),
        (lambda: DQNModule(RecurrentNetwork("gru", 4)), "sequence", Doors),
    ],
)
def test_runs_take_allowed_actions_in_learning_warmup_and_evaluation(agent: Any, stream: str, env: Any) -> None:
    module, shared = agent(), {"env": env, "num_envs": 4, "total_frames": 192, "normalize_observation": True}
    if stream == "rollouts":
        data: Any = OnPolicyDataModule(frames_per_batch=64, mini_batch_size=32, **shared)
    else:
        data = replay_data(stream, batch_size=16, warmup_frames=64, updates_per_epoch=8, **shared)
    trainer(max_epochs=-1).fit(module, datamodule=data)  # the environment raises otherwise
    assert "action_mask" not in getattr(module, "critic", module).in_keys if stream == "rollouts" else module.masked
    assert data.evaluate(module.policy, episodes=4)["episode_return"].isfinite().all()


def test_agent_without_mask_support_is_incompatible() -> None:
    agent = loss_agent(loss_of_values)
    with pytest.raises(IncompatibleError, match=r"'action_mask'.*LossModuleAgent.*drop="):
        trainer(max_epochs=1).fit(agent, datamodule=replay_data(env=Doors))


class EmptyMask(Doors):
    def show(self) -> dict[str, Any]:
        observation = super().show()
        if self.count == 2:
            observation["action_mask"][:] = 0
        return observation


def test_empty_mask_raises() -> None:
    collector = GymnasiumCollector(make_vector_env(EmptyMask, 2), None, frames_per_batch=16)
    with pytest.raises(EnvironmentFault, match=r"At step 2 of the rollout, environment 0 .*'action_mask'"):
        collector.rollout()


def test_next_step_autoreset_may_end_with_empty_mask() -> None:
    env = SyncVectorEnv([Doors] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    data = replay_data(env=env, eval_env=Doors, warmup_frames=32, total_frames=64)
    trainer(max_epochs=-1).fit(DQNModule(MLPNetwork([8])), datamodule=data)
    assert int(data.buffer[:]["next", "done"].sum()) > 0


def test_forbidden_action_of_a_policy_raises() -> None:
    env = make_vector_env(Doors, 2)

    policy = TensorDictModule(lambda mask: mask.long().argmin(-1), in_keys=["action_mask"], out_keys=["action"])
    with pytest.raises(ValueError, match=r"drop=\[action_mask\]"):
        GymnasiumCollector(env, policy, frames_per_batch=64).rollout()


@pytest.mark.parametrize("learner", [PPOModule, DQNModule])
def test_loaded_policy_rejects_observation_with_empty_mask(learner: Any) -> None:
    specs = environment_specs(make_vector_env(Doors, 1))
    policy = LoadedPolicy(learner(MLPNetwork([8])).build(specs).policy, specs)
    observation = {"observation": np.zeros(4, np.float32), "action_mask": np.int8([0, 0, 1, 0])}
    assert policy.act(observation) == 2
    with pytest.raises(EnvironmentFault, match=r"0.*'action_mask'"):
        policy.act({**observation, "action_mask": np.zeros(4, np.int8)})
    batch = {"observation": np.zeros((2, 4), np.float32), "action_mask": np.int8([[0, 0, 1, 0], [0, 0, 0, 0]])}
    assert policy.act(batch, starts=True)[0] == 2  # the other episode has ended


class MaskEnv(gymnasium.Env[Any, Any]):
    def __init__(self, action: Any, mask: Any, name: str = "action_mask") -> None:
        self.action_space = action
        self.observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 1, (1,)), name: mask})


@pytest.mark.parametrize(
    ("action", "mask", "message"),
    [
        (gymnasium.spaces.Discrete(3), gymnasium.spaces.MultiBinary(4), r"MultiBinary\(3\).*shape \[4\]"),
        (gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(0, 1, (3,), np.float32), "integers .* torch.float32"),
        (gymnasium.spaces.Box(0, 1, (3,)), gymnasium.spaces.MultiBinary(3), "discrete choices, got"),
    ],
)
def test_mask_of_another_kind_raises(action: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        environment_specs(make_vector_env(lambda: MaskEnv(action, mask), 1))


@pytest.mark.parametrize(("size", "remedy"), [(3, "mask: action_mask"), (4, "mask: last_mask")])
def test_entry_named_mask_must_be_renamed(size: int, remedy: str) -> None:
    mask = gymnasium.spaces.MultiBinary(size)
    with pytest.raises(ValueError, match=rf"'mask'.*rename={{{remedy}}}"):
        environment_specs(make_vector_env(lambda: MaskEnv(gymnasium.spaces.Discrete(3), mask, "mask"), 1))


def test_masks_in_info_become_part_of_the_observation() -> None:
    env = ActionMaskFromInfo(gymnasium.make("Taxi-v4"))
    observation, info = env.reset(seed=1)
    assert observation in env.observation_space
    assert observation["action_mask"].tolist() == info["action_mask"].tolist()
    specs = environment_specs(make_vector_env(lambda: ActionMaskFromInfo(gymnasium.make("Taxi-v4")), 1))
    assert list(PPOModule(MLPNetwork([8])).build(specs).critic.in_keys) == ["observation"]
    with pytest.raises(EnvironmentFault, match="'action_mask'"):
        ActionMaskFromInfo(gymnasium.make("CartPole-v1")).reset()
    with pytest.raises(ValueError, match="Discrete action space, got Box"):
        ActionMaskFromInfo(gymnasium.make("Pendulum-v1"))
