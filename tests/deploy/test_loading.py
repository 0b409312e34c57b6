from __future__ import annotations

import shutil
import sys

import gymnasium
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from kit.actor_critic import TinyActorCritic
from kit.extras import need_extra
from kit.replay import dqn, fit, replay_data
from kit.runs import trainer
from torchrl_lightning import (
    EnvironmentRecipe,
    LoadedPolicy,
    OnPolicyDataModule,
    export_policy,
    load_policy,
    play_episodes,
)
from torchrl_lightning._core import trust
from torchrl_lightning._core.checksums import CHECKSUMS_KEY
from torchrl_lightning.agents import MLPNetwork, PPOModule, RecurrentNetwork
from torchrl_lightning.cli.config.instantiate import SaveConfig
from torchrl_lightning.deploy.loading import CONFIG, extract_config

MODEL = {
    "_target_": "torchrl_lightning.PPOModule",
    "_convert_": "all",
    "network": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [4]},
    "optimizer": {"_target_": "torch.optim.RMSprop", "_partial_": True, "lr": 0.001},
}


def train(path, module, *, config=None, env="CartPole-v1"):
    """Train on one rollout and write a checkpoint; return the module and its data."""
    data = OnPolicyDataModule(env, num_envs=2, frames_per_batch=16, num_mini_batch=1, num_epochs=1, seed=0)
    callbacks = [] if config is None else [SaveConfig(OmegaConf.create({"data": {"env": env}, "model": config}))]
    run = trainer(max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    run.fit(module, datamodule=data)
    run.save_checkpoint(path)
    return module, data


def observations(size=4):
    return TensorDict({"observation": torch.randn(16, size, generator=torch.Generator().manual_seed(0))}, [16])


def best_actions(module, batch):
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        return module.policy(batch.copy())["action"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a checkpoint as the command writes it, and the module and data of its run."""
    path = tmp_path_factory.mktemp("trained") / "a.ckpt"
    return path, *train(path, PPOModule(MLPNetwork([4])), config=MODEL)


@pytest.fixture
def stored(trained):
    return torch.load(trained[0], weights_only=True)


def first_weight(stored):
    return next(name for name in stored["state_dict"] if name.endswith("weight"))


def test_checkpoint_of_the_command_is_sufficient(trained, tmp_path):
    path, module, data = trained
    policy = load_policy(shutil.copy(path, tmp_path / "moved.ckpt"))
    assert policy.specs == data.specs
    assert not policy.training
    batch = observations()
    actions = policy(batch.copy())["action"]
    assert torch.equal(actions, best_actions(module, batch))
    assert not any(parameter.requires_grad for parameter in policy.parameters())
    assert play_episodes("CartPole-v1", policy, 1, seed=0)["episode_length"] > 5
    # deterministic=False samples actions.
    policy = load_policy(path, deterministic=False)
    assert len({str(policy(batch.copy())["action"].tolist()) for _ in range(5)}) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_policy_acts_the_same_under_another_default_dtype(trained, dtype, tmp_path):
    expected = load_policy(trained[0])(observations())["action"]
    observation = observations()
    torch.set_default_dtype(dtype)
    try:
        policy = load_policy(trained[0])
        assert {each.dtype for each in policy.parameters()} == {torch.float32}
        assert torch.equal(policy(observation)["action"], expected)
        export_policy(policy, tmp_path / "a.pt2")
    finally:
        torch.set_default_dtype(torch.float32)
    exported = torch.export.load(str(tmp_path / "a.pt2")).module()
    assert torch.equal(exported(observations()["observation"]), expected)


def test_policy_acts_on_raw_observations(trained):
    policy = load_policy(trained[0])
    env = gymnasium.make("CartPole-v1")
    first, _ = env.reset(seed=0)
    action = policy.act(first)
    assert action.shape == ()
    assert env.action_space.contains(action)
    assert action in {0: "left", 1: "right"}
    batch = observations()
    assert policy.act(batch["observation"].numpy(), starts=True).tolist() == policy(batch)["action"].tolist()
    assert policy.act(first) == action  # one row after a batch is accepted
    with pytest.raises(ValueError, match=r"has shape \[3\], expected \[4\]"):
        policy.act(first[:3])


def test_recurrent_policy_stores_its_states_or_takes_them(tmp_path):
    def make():
        return PPOModule(RecurrentNetwork("gru", 4))

    train(tmp_path / "a.ckpt", make())
    policy, other = (load_policy(tmp_path / "a.ckpt", make()) for _ in range(2))
    rows = observations()["observation"].numpy()
    states = []
    for row in rows:  # each episode has three steps
        policy.act(row, starts=len(states) % 3 == 0)
        states.append(policy.state["recurrent_state"])
    for number, row in enumerate(rows):
        other.act(row, starts=number % 3 == 0, state={"recurrent_state": states[number - 1]})
        assert torch.equal(other.state["recurrent_state"], states[number])
    policy.act(rows[1], starts=True)
    assert not torch.allclose(policy.state["recurrent_state"], states[1])
    both = load_policy(tmp_path / "a.ckpt", make())
    both.act(rows[[0, 1]])
    assert torch.allclose(both.state["recurrent_state"][:1], states[0])
    both.act(rows[[1, 0]], starts=[False, True])
    assert torch.allclose(both.state["recurrent_state"], torch.cat([states[1], states[0]]))


@pytest.mark.parametrize(
    "make", [TinyActorCritic, lambda: PPOModule(RecurrentNetwork("gru", 4)), lambda: PPOModule(MLPNetwork([4]))]
)
def test_module_of_a_custom_trainer_is_passed(make, tmp_path):
    module, _ = train(tmp_path / "a.ckpt", make())
    policy = load_policy(tmp_path / "a.ckpt", make())
    for name, value in module.policy.state_dict().items():
        assert torch.equal(policy.policy.state_dict()[name], value)
    assert play_episodes("CartPole-v1", policy, 1, seed=0)["episode_length"] > 5


def test_exploring_policy_explores_as_much_as_when_it_was_saved(tmp_path):
    module, run = fit(tmp_path, replay_data(), max_epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    policy = load_policy(tmp_path / "a.ckpt", dqn(seed=9), deterministic=False)
    assert float(policy.policy.amount) == float(module.policy.amount) == pytest.approx(1 - 0.95 * 0.5)
    assert torch.equal(
        load_policy(tmp_path / "a.ckpt", dqn())(observations())["action"], best_actions(module, observations())
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, r"contains no config.*load_policy\(path, module=MyModule"),
        ({"model": {"_target_": "os.system", "command": "true"}}, "model._target_='os.system' is none of the classes"),
        ({"model": {**MODEL, "network": [{"_target_": "torchrl_lightning.cli.train.hydra"}]}}, "cli.train.hydra"),
        ({"model": {"_target_": "torch.nn.Linear"}}, "model._target_=torch.nn.Linear, which is not a LightningModule"),
        (
            {"model": {**MODEL, "network": {**MODEL["network"], "hidden_sizes": [5]}}},
            "the networks differ: .* is \\[4.* and \\[5",
        ),
        (
            {"model": {**MODEL, "network": {**MODEL["network"], "hidden_sizes": [10**7, 10**7]}}},
            "hidden_sizes=10000000 is more",
        ),
        ({"model": {**MODEL, "network": {**MODEL["network"], "hidden_sizes": "x"}}}, "networks cannot be built"),
        ({"config": {}}, "contains no config"),
        ({"state_dict": None}, "no weights"),
        ({"state_dict": {}}, "the networks differ"),
        ({"OnPolicyDataModule": {"specs": None, "normalization": {}}}, "invalid environment specs"),
        ({"OnPolicyDataModule": {}}, "no environment specs"),
    ],
)
def test_checkpoint_that_cannot_be_loaded_raises_the_reason(change, message, tmp_path, stored):
    content = {**stored, CHECKSUMS_KEY: {}, **{key: value for key, value in change.items() if key != "model"}}
    if "model" in change:
        content["config"] = {"model": change["model"]}
    torch.save(content, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path / "b.ckpt")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.full((4, 4), torch.nan), "{} are not finite"),
        (torch.full((4, 4), torch.inf), "{} are not finite"),
        (torch.zeros(4, 4, device="meta"), "a tensor without numbers of its own, state_dict.{}"),
        (torch.zeros(4, 4).to_sparse(), "a tensor without numbers of its own, state_dict.{}"),
    ],
    ids=["nan", "infinite", "meta", "sparse"],
)
def test_weights_with_nan_are_refused(tensor, message, tmp_path, stored):
    name = first_weight(stored)
    torch.save({**stored, CHECKSUMS_KEY: {}, "state_dict": {**stored["state_dict"], name: tensor}}, tmp_path / "b.ckpt")
    for module in (None, PPOModule(MLPNetwork([4]))):
        with pytest.raises(ValueError, match=message.format(name)):
            load_policy(tmp_path / "b.ckpt", module)


def test_changed_bit_is_detected(tmp_path, stored):
    assert set(stored[CHECKSUMS_KEY]) == {"state_dict", "optimizer_states", "OnPolicyDataModule"}
    stored["state_dict"][first_weight(stored)].reshape(-1).view(torch.uint8)[0] ^= 1
    torch.save(stored, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="'state_dict'"):
        load_policy(tmp_path / "b.ckpt")
    # A user's own trainer also detects it.
    data = OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=16, num_mini_batch=1, seed=0)
    again, run = PPOModule(MLPNetwork([4])), trainer(max_epochs=2)
    with pytest.raises(ValueError, match="damaged"):
        run.fit(again, datamodule=data, ckpt_path=tmp_path / "b.ckpt")
    torch.save({key: value for key, value in stored.items() if key != CHECKSUMS_KEY}, tmp_path / "b.ckpt")
    load_policy(tmp_path / "b.ckpt")  # earlier versions stored no checksums


def test_module_without_a_policy_is_named(tmp_path, stored):
    class Without(TinyActorCritic):
        def configure_model(self):
            pass

    torch.save({**stored, CHECKSUMS_KEY: {}, "state_dict": {}}, tmp_path / "b.ckpt")
    with pytest.raises(TypeError, match=r"Without.*`policy`"):
        load_policy(tmp_path / "b.ckpt", Without())


@pytest.mark.parametrize(
    ("wrapper", "is_taken"),
    [
        ("gymnasium.wrappers.TimeAwareObservation", True),
        ("gymnasium.wrappers.stateful_observation.TimeAwareObservation", True),
        ("gymnasium.wrappers.common.TimeAwareObservation", False),
        ("torchrl_lightning.environments.goals.GoalReward", True),
        ("gymnasium.wrappers.RecordVideo", False),
        ("gymnasium.wrappers.rendering.RecordVideo", False),
        ("torchrl.envs.RewardScaling", True),
        ("torchrl.envs.R3MTransform", False),
        ("torchrl.envs.llm.PythonInterpreter", False),
    ],
)
def test_recipe_of_a_checkpoint_may_name_wrappers_but_none_that_writes_or_loads(wrapper, is_taken):
    stored = with_wrapper(wrapper)
    if is_taken:
        assert extract_config(stored, "a.ckpt", "data") == stored[CONFIG]
    else:
        with pytest.raises(ValueError, match=f"'{wrapper}'"):
            extract_config(stored, "a.ckpt", "data")


def with_wrapper(name):
    """Return the content of a checkpoint with this environment wrapper in its config."""
    env = {"_target_": "torchrl_lightning.EnvironmentRecipe", "wrappers": [{"_target_": name}]}
    return {CONFIG: {"data": {"_target_": "torchrl_lightning.OnPolicyDataModule", "env": env}}}


def test_recipe_of_a_checkpoint_may_name_the_wrappers_of_an_extra_where_it_is_installed(monkeypatch):
    missing = "minigrid.wrappers.NoDeath"
    trust._external_class.cache_clear()
    monkeypatch.setitem(sys.modules, "minigrid.wrappers", None)  # as if it were not installed
    with pytest.raises(ValueError, match=rf"wrappers.0..*'{missing}'"):
        extract_config(with_wrapper(missing), "a.ckpt", "data")
    trust._external_class.cache_clear()
    monkeypatch.undo()
    need_extra("minigrid")
    assert extract_config(with_wrapper(missing), "a.ckpt", "data") == with_wrapper(missing)[CONFIG]


class Shifted(gymnasium.ObservationWrapper):
    """A user's own wrapper."""

    def observation(self, observation):
        return observation + 1


@pytest.mark.parametrize(
    ("env", "length"),
    [
        ("CartPole-v1", 4),
        (EnvironmentRecipe("CartPole-v1", time_limit=9, observe=[0, 2]), 2),
        (EnvironmentRecipe("CartPole-v1", wrappers=[gymnasium.wrappers.TimeAwareObservation]), 5),
        (EnvironmentRecipe(GymEnv, {"env_name": "CartPole-v1", "categorical_action_encoding": True}, time_limit=9), 4),
    ],
)
def test_loaded_policy_returns_the_recipe_of_its_environment(env, length, tmp_path):
    train(tmp_path / "a.ckpt", PPOModule(MLPNetwork([4])), env=env)
    policy = load_policy(tmp_path / "a.ckpt", PPOModule(MLPNetwork([4])))
    episodes = play_episodes(policy.recipe(), policy, 2, num_envs=2, seed=3)
    assert (episodes == play_episodes(env, policy, 2, num_envs=2, seed=3)).all()
    assert policy.specs.observation["observation"].shape == (length,)


def test_user_classes_are_named_before_they_are_imported(tmp_path):
    train(tmp_path / "a.ckpt", PPOModule(MLPNetwork([4])), env=EnvironmentRecipe("CartPole-v1", wrappers=[Shifted]))
    policy = load_policy(tmp_path / "a.ckpt", PPOModule(MLPNetwork([4])))
    with pytest.raises(ValueError, match=r"Shifted'.*recipe\(trusted=True\)"):
        policy.recipe()
    assert isinstance(policy.recipe(trusted=True)(), Shifted)
    with pytest.raises(ValueError, match="environment id"):
        LoadedPolicy(policy.policy, policy.specs).recipe()
