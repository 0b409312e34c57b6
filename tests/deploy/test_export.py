"""The exported program of a policy returns the policy's actions. The tests of the command check the written files."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded

from kit.learners import OFF_POLICY, ON_POLICY, SPECS, learner
from kit.specs import BOX, ONE_HOT, specs_of
from kit.torchrl_losses import iql, loss_agent
from kit.world_models import world_model
from torchrl_lightning import CrossEntropyPlanner, EnvironmentSpecs, LoadedPolicy, RandomShootingPlanner
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.agents import CNNNetwork, DQNModule, PPOModule, WorldModelEnvironment
from torchrl_lightning.deploy.export import PolicyProgram, check_program, export_policy
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer

MIXED = {
    "pixels": Bounded(0, 255, (12, 12, 3), dtype=torch.uint8),
    "bits": Binary(3),
    "choices": MultiCategorical([2, 3]),
    "hand": Composite(force=Unbounded(()), touch=Bounded(-1.0, 1.0, (2,))),
}
STARTING_AT_ONE = EnvironmentSpecs(Composite(observation=Unbounded(4)), Categorical(3), 1, action_start=1)
BUILT: dict[str, tuple[Any, EnvironmentSpecs]] = {
    "several choices": (PPOModule, specs_of(MultiCategorical([2, 3]))),
    "one-hot": (DQNModule, ONE_HOT),
    "unbounded": (PPOModule, specs_of(Unbounded(2))),
    "clipped": (PPOModule, BOX),
    "squashed": (partial(PPOModule, distribution="tanh_normal"), BOX),
    "mixed": (partial(PPOModule, CNNNetwork([4], [4], [2], [8])), specs_of(Categorical(3), **MIXED)),
    "actions from one on": (partial(DQNModule, dueling=True), STARTING_AT_ONE),
    "masked": (PPOModule, specs_of(MultiCategorical([2, 3]), observation=Unbounded(4), action_mask=Binary(5))),
    "masked values": (DQNModule, specs_of(Categorical(3), observation=Unbounded(4), action_mask=Binary(3))),
    "a loss of TorchRL's": (partial(loss_agent, iql), BOX),
}
NAMES = (*(f"{case}, {network}" for case in (*ON_POLICY, *OFF_POLICY) for network in ("mlp", "gru", "lstm")), *BUILT)


def agent(name: str) -> tuple[Any, EnvironmentSpecs]:
    if name in BUILT:
        make, specs = BUILT[name]
        return make().build(specs).policy, specs
    case, _, network = name.partition(", ")
    return learner(case, network).policy, SPECS[case]


def normalised(policy: Any, specs: EnvironmentSpecs) -> LoadedPolicy:
    """Return the policy with a normaliser that has different moments for each entry."""
    normalizer = ObservationNormalizer(specs, True, 3.0)
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1.0, 10.0, 100.0]) + 7
    normalizer.advance({"observation": Moments.from_samples(rows)})
    return LoadedPolicy(NormalizedPolicy(policy, normalizer), specs)


def check(policy: LoadedPolicy, program: PolicyProgram) -> None:
    def run(inputs: list[torch.Tensor]) -> Any:
        outputs = program(*inputs)
        return outputs if program.initial_states else (outputs,)

    with torch.no_grad():
        check_program(policy, program, run, "it")


@pytest.mark.parametrize("name", NAMES)
def test_exported_program_equals_the_policy(name: str) -> None:
    policy, specs = agent(name)
    loaded = LoadedPolicy(policy, specs)
    program = PolicyProgram(loaded)
    check(loaded, program)
    states = {"gru": 1, "lstm": 2}.get(name.partition(", ")[2], 0)
    assert len(program.inputs) == len(specs.keys) + states
    assert len(program.outputs) == 1 + states
    if specs.keys == ["observation"]:
        check(normalised(policy, specs), PolicyProgram(normalised(policy, specs)))


def test_random_inputs_are_within_the_observation_specs() -> None:
    policy, specs = agent("mixed")
    inputs = PolicyProgram(LoadedPolicy(policy, specs)).random_inputs(50)
    assert all(specs.observation[key].is_in(inputs[key]) for key in specs.keys)
    assert inputs["hand", "touch"].min() < -0.8
    mean = PolicyProgram(normalised(*agent("clipped"))).random_inputs(5000)["observation"].mean(0)
    assert mean[0] == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("planner", [CrossEntropyPlanner, RandomShootingPlanner])
def test_planner_export_raises_with_the_reason(planner: Any, tmp_path: Any) -> None:
    env = WorldModelEnvironment(world_model())
    specs = EnvironmentSpecs(env.observation_spec, env.action_spec, 1)
    with pytest.raises(ValueError, match=rf"{planner.__name__}.*load_policy$"):
        export_policy(LoadedPolicy(planner(env), specs), tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir())
