"""The actor-critic of IMPALA."""

from __future__ import annotations

from torchrl_lightning.learn.a2c import A2CModule


class VTraceModule(A2CModule):
    """Policy gradient and value regression on V-trace targets (IMPALA, Espeholt et al., 2018).

    ``VTraceBuffer`` provides ``advantage`` and ``value_target``, corrected for the difference between the policy that
    acted and the current one; the losses are then those of A2C. Logs ``train/ratio_deviation``, the mean of
    |pi / mu - 1|.

    Example:
        >>> from types import SimpleNamespace
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)), action=Categorical(2))
        >>> VTraceModule(entropy_coeff=0.01).build(specs).policy.out_keys
        ['action', 'action_log_prob']
    """
