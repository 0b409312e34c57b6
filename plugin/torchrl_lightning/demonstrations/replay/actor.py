"""A policy that repeats the actions of demonstrations while they are replayed."""

from __future__ import annotations

from typing import Any, get_args

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from torchrl_lightning._core.keys import ACTION, DEMO_ACTION, REPLAYED
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.validators import one_of
from torchrl_lightning.demonstrations.replay.collector_replay import LogProb
from torchrl_lightning.environments.policy_calls import Outputs, Policy, fast_call, policy_outputs


class DemonstrationActor(TensorDictModuleBase):
    """Wrap a policy so that it repeats the demonstration's action in each environment that replays a demonstration.

    The policy first samples actions for all environments. The demonstrations' actions (``("demo", "action")``) then
    replace the rows of the mask ``("demo", "mask")``. :class:`DemonstrationReplayTransform` writes both entries. If a
    step lacks these entries, for example in an evaluation, the policy's actions stay unchanged.

    Args:
        policy: A policy that reads a TensorDict ``[N]`` and writes ``action``.
        log_prob: The log-probability of the demonstrations' actions, if the policy writes a log-probability.
            ``deterministic`` writes 0: the demonstrator chose each action with probability 1. ``current`` writes the
            log-probability under the policy and requires ``get_dist``.

    Raises:
        ValueError: ``log_prob`` is another value.
        TypeError: ``log_prob`` is ``current``, but the policy does not have ``get_dist``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> still = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
        >>> step = TensorDict({"observation": torch.zeros(2, 4)}, [2])
        >>> step["demo"] = {"mask": torch.tensor([[False], [True]]), "action": torch.tensor([0, 3])}
        >>> DemonstrationActor(still)(step)["action"].tolist()
        [0, 3]
    """

    def __init__(self, policy: Policy, log_prob: LogProb = "deterministic") -> None:
        super().__init__()
        self.log_prob: LogProb = one_of(log_prob, "log_prob", get_args(LogProb))
        policy_api = PolicyApi.of(policy)
        if log_prob == "current" and policy_api.get_dist is None:
            raise TypeError(
                "The policy must have get_dist(td), like TorchRL's ProbabilisticActor, to compute log-probabilities of "
                f"replayed actions, got {type(policy).__name__}. Or set log_prob='deterministic'."
            )
        self.policy = policy
        self.in_keys: list[NestedKey] = list(policy_api.in_keys)
        self.out_keys: list[NestedKey] = list(policy_api.out_keys or ())

    def compute_step(self, step: TensorDictBase) -> Outputs:
        """Return the action and the policy's other outputs for a step, without writing into the step."""
        compute_outputs = fast_call(self.policy)
        outputs = policy_outputs(self.policy, step.copy()) if compute_outputs is None else compute_outputs(step)
        mask = step.get(REPLAYED, None)
        if mask is None or not mask.any():
            return outputs
        replayed, replaced = mask.view(step.batch_size), dict(outputs)
        action = outputs[ACTION]
        expanded_mask = mask.view(*step.batch_size, *[1] * (action.ndim - step.ndim))
        action = replaced[ACTION] = step.get(DEMO_ACTION).to(action).where(expanded_mask, action)
        for key in outputs:
            if path_of(key)[-1].endswith("log_prob"):
                log_prob = replaced[key] = outputs[key].clone()
                uses_policy = self.log_prob == "current"
                log_prob[replayed] = self.get_dist(step[replayed]).log_prob(action[replayed]) if uses_policy else 0.0
        return replaced

    @property
    def get_dist(self) -> Any:
        """The policy's ``get_dist``, which returns the distribution of the actions for a TensorDict ``[N]``."""
        return self.policy.get_dist  # type: ignore[attr-defined]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the policy's other outputs into a TensorDict ``[N]``."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict
