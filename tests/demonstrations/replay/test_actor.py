"""Where a demonstration is replayed, a policy does what the demonstration did; elsewhere it is the policy itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn
from torch.distributions import Normal
from torchrl.modules import NormalParamExtractor, ProbabilisticActor
from torchrl.modules.utils import get_primers_from_module

from kit.lines import Line, actor_of
from torchrl_lightning import DemonstrationActor, RecurrentNetwork, make_vector_env
from torchrl_lightning.agents import MLPNetwork

MASK = torch.tensor([[False], [True], [True]])


def theirs() -> ProbabilisticActor:
    """TorchRL's own actor, which writes its log-probability under a name of its own."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=Normal,
        return_log_prob=True,
        log_prob_key="sample_log_prob",
        default_interaction_type=InteractionType.RANDOM,
    )


@pytest.fixture(params=["ours", "recurrent", "theirs"])
def policy(request: pytest.FixtureRequest) -> Any:
    if request.param == "theirs":
        return theirs()
    network = MLPNetwork((8,)) if request.param == "ours" else RecurrentNetwork(hidden_size=4)
    return actor_of(make_vector_env(Line, 3), network)


def given(policy: Any, mask: torch.Tensor | None = MASK) -> TensorDictBase:
    """Three observations; where the mask says, the demonstration acts 9."""
    entries = {"observation": torch.arange(1.0, 4.0)[:, None], "is_init": torch.zeros(3, 1, dtype=torch.bool)}
    if "recurrent_state" in policy.in_keys:
        entries["recurrent_state"] = torch.full((3, 1, 4), 0.5)
    made = TensorDict(entries, [3])
    return made if mask is None else made.set("demo", TensorDict({"mask": mask, "action": 9.0 * mask}, [3]))


@pytest.mark.parametrize("rows", [slice(None), 1], ids=["batch", "row"])
@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_actions_and_log_probabilities(policy: Any, log_prob: Any, rows: Any) -> None:
    where = MASK[rows, 0]
    with torch.no_grad():
        torch.manual_seed(1)
        sampled = policy(given(policy)[rows])
        torch.manual_seed(1)
        written = DemonstrationActor(policy, log_prob)(given(policy)[rows])
        key = next(key for key in policy.out_keys if "log_prob" in key)
        expected = policy.get_dist(given(policy)[rows]).log_prob(torch.full_like(sampled["action"], 9.0))
    assert (written["action"][where] == 9).all()
    torch.testing.assert_close(written["action"][~where], sampled["action"][~where])
    torch.testing.assert_close(written[key][~where], sampled[key][~where])
    torch.testing.assert_close(written[key][where], expected[where] * (log_prob == "current"))
    # All else that the policy writes, such as the next recurrent state, is what it makes of what it sees.
    for other in {*policy.out_keys} - {"action", key}:
        assert torch.equal(written[other], sampled[other])


@pytest.mark.parametrize("mask", [None, torch.zeros_like(MASK)], ids=["unknown", "nowhere"])
@pytest.mark.parametrize("kind", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
def test_actor_equals_the_policy_without_a_replay(policy: Any, kind: Any, mask: Any) -> None:
    with torch.no_grad(), set_interaction_type(kind):
        torch.manual_seed(1)
        expected = policy(given(policy, mask))
        torch.manual_seed(1)
        assert (DemonstrationActor(policy, "current")(given(policy, mask)) == expected).all()


def test_actor_has_the_keys_and_distribution_of_the_policy(policy: Any) -> None:
    actor = DemonstrationActor(policy)
    assert (actor.in_keys, actor.out_keys) == (policy.in_keys, policy.out_keys)
    primers = [get_primers_from_module(each, warn=False) for each in (actor, policy)]
    assert repr(primers[0]) == repr(primers[1])
    actor.eval()
    assert not any(part.training for part in policy.modules())
    assert list(actor.parameters()) == list(policy.parameters())
    torch.testing.assert_close(actor.get_dist(given(policy)).mean, policy.get_dist(given(policy)).mean)


def test_compute_step_returns_outputs_without_writing_them(policy: Any) -> None:
    read = given(policy)
    before = read.clone()
    assert DemonstrationActor(policy).compute_step(read)["action"][1:].flatten().tolist() == [9, 9]
    assert {*read.keys(True)} == {*before.keys(True)}
    assert (read == before).all()


def test_policy_without_log_probabilities() -> None:
    still = TensorDictModule(lambda x: 0 * x, ["observation"], ["action"])
    actor = DemonstrationActor(still)
    assert actor(given(still))["action"].flatten().tolist() == [0, 9, 9]
    assert not hasattr(actor, "get_dist")
