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

from kit.lines import Line, actor_of, imitator
from torchrl_lightning import DemonstrationActor, RecurrentNetwork, make_vector_env
from torchrl_lightning.collectors._policy import bare_call, recurrent_primers
from torchrl_lightning.learn import MLPNetwork

MASK = torch.tensor([[False], [True], [True]])


def step(*batch: int, replayed: bool = True) -> TensorDict:
    """Observations 1, 2, 3, ...; of three environments two replay."""
    size = batch or (1,)
    entries: dict[str, Any] = {
        "observation": torch.arange(1.0, size[0] + 1)[:, None],
        "is_init": torch.zeros(*size, 1).bool(),
    }
    if replayed:
        mask = MASK[-size[0] :]
        entries["demo"] = {"mask": mask, "action": torch.full((*size, 1), 9.0) * mask}
    made = TensorDict(entries, list(size), names=None)
    return made if batch else made[0]


def theirs(key: str = "sample_log_prob") -> ProbabilisticActor:
    """TorchRL's own actor, which writes its log-probability under a name of its own."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=Normal,
        return_log_prob=True,
        log_prob_key=key,
        default_interaction_type=InteractionType.RANDOM,
    )


@pytest.fixture(params=["ours", "recurrent", "theirs"])
def policy(request: pytest.FixtureRequest) -> Any:
    if request.param == "theirs":
        return theirs()
    network = MLPNetwork((8,)) if request.param == "ours" else RecurrentNetwork(hidden_size=4)
    return actor_of(make_vector_env(Line, 3), network)


def given(policy: Any, *batch: int, replayed: bool = True) -> TensorDictBase:
    made = step(*batch, replayed=replayed)
    for primer in recurrent_primers(policy):
        for key, spec in primer.primers.items(True, True):
            made[key] = torch.full((*made.batch_size, *spec.shape), 0.5)
    return made


@pytest.mark.parametrize("batch", [(3,), ()])
@pytest.mark.parametrize("log_prob", ["deterministic", "current"])
def test_actions_and_log_probabilities(policy: Any, log_prob: Any, batch: tuple[int, ...]) -> None:
    where = MASK.squeeze(-1) if batch else torch.tensor(True)
    with torch.no_grad():
        torch.manual_seed(1)
        sampled = policy(given(policy, *batch))
        torch.manual_seed(1)
        written = DemonstrationActor(policy, log_prob)(given(policy, *batch))
        key = next(key for key in policy.out_keys if "log_prob" in key)
        expected = policy.get_dist(given(policy, *batch)).log_prob(torch.full_like(sampled["action"], 9.0))
    assert (written["action"][where] == 9).all()
    torch.testing.assert_close(written["action"][~where], sampled["action"][~where])
    torch.testing.assert_close(written[key][~where], sampled[key][~where])
    torch.testing.assert_close(written[key][where], expected[where] * (log_prob == "current"))
    # All else that the policy writes, such as the next recurrent state, is what it makes of what it sees.
    for other in {*policy.out_keys} - {"action", key}:
        assert torch.equal(written[other], sampled[other])


@pytest.mark.parametrize("replayed", [None, False])
def test_where_nothing_is_replayed_it_is_the_policy_itself(policy: Any, replayed: bool | None) -> None:
    def made() -> TensorDictBase:
        one = given(policy, 3, replayed=replayed is not None)
        return one if replayed is None else one.set(("demo", "mask"), torch.zeros(3, 1, dtype=torch.bool))

    for kind in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
        with torch.no_grad(), set_interaction_type(kind):
            torch.manual_seed(1)
            expected = policy(made())
            torch.manual_seed(1)
            assert (DemonstrationActor(policy, "current")(made()) == expected).all()


def test_it_passes_through_what_the_policy_has(policy: Any) -> None:
    actor = DemonstrationActor(policy)
    assert (actor.in_keys, actor.out_keys) == (policy.in_keys, policy.out_keys)
    found, wanted = recurrent_primers(actor), recurrent_primers(policy)
    assert [list(each.primers.keys()) for each in found] == [list(each.primers.keys()) for each in wanted]
    actor.eval()
    assert not any(part.training for part in policy.modules())
    assert list(actor.parameters()) == list(policy.parameters())
    torch.testing.assert_close(actor.get_dist(given(policy, 3)).mean, policy.get_dist(given(policy, 3)).mean)


def test_a_bare_policy_is_not_called_in_its_place() -> None:
    actor = DemonstrationActor(actor_of(make_vector_env(Line, 3)))
    act_on = bare_call(actor)
    assert act_on is not None
    read = step(3)
    assert act_on(read)["action"][1:].flatten().tolist() == [9, 9]
    assert set(read.keys()) == {"observation", "is_init", "demo"}


def test_a_policy_without_log_probabilities() -> None:
    still = TensorDictModule(lambda x: 0 * x, ["observation"], ["action"])
    assert DemonstrationActor(still)(step(3))["action"].flatten().tolist() == [0, 9, 9]


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"must offer get_dist.*TensorDictModule; give log_prob='deterministic'"):
        DemonstrationActor(imitator(), "current")
    with pytest.raises(ValueError, match="log_prob must be one of"):
        DemonstrationActor(imitator(), "none")  # type: ignore[arg-type]
    assert not hasattr(DemonstrationActor(imitator()), "get_dist")
