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
    """Act as a policy does, but repeat the demonstration's action in environments that replay one.

    It samples for all environments, then writes the demonstrations' actions (``("demo", "action")``) into the rows of
    the mask ``("demo", "mask")``. :class:`DemonstrationReplayTransform` writes both entries. Without them, for example
    in an evaluation, it acts as the policy.

    Args:
        policy: Reads a TensorDict ``[N]`` and writes ``action``.
        log_prob: The log-probability of the demonstrations' actions, if the policy writes one. ``deterministic`` is 0,
            as for a demonstrator without randomness; ``current`` is the policy's own and needs ``get_dist``.

    Raises:
        ValueError: ``log_prob`` is not one of these values.
        TypeError: The policy does not have ``get_dist`` for ``current``.

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
        """Return the entries to write into a step, without writing them."""
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
        """The policy's ``get_dist``: its distribution over actions in a TensorDict ``[N]``."""
        return self.policy.get_dist  # type: ignore[attr-defined]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action and the policy's other outputs into a TensorDict ``[N]``."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict
