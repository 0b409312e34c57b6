"""Policies and critics that compute under the autocast of the training step, in any process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.distributions import Distribution

from torchrl_lightning._core.keys import ACTION, LOG_PROB
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning.environments.policy_calls import Outputs, fast_call, policy_device, policy_outputs

HALF = (torch.bfloat16, torch.float16)


class AutocastModule(TensorDictModuleBase):
    """A policy or critic under autocast on the device of its parameters. It writes float32 instead of half precision.

    Only this module computes in half precision: autocast does not affect an environment that computes with torch.

    Args:
        module: Reads and writes a TensorDict ``[*B]``.
        dtype: The dtype of the autocast.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype
        abilities = PolicyApi.of(module)
        self.in_keys: list[NestedKey] = list(abilities.in_keys)
        self.out_keys: list[NestedKey] = list(abilities.out_keys or ())

    def compute_step(self, step: TensorDictBase) -> Outputs:
        """Return the entries that the module writes into a step ``[*B]``, and write nothing."""
        with self.autocast():
            call = fast_call(self.module)
            outputs = policy_outputs(self.module, step.copy()) if call is None else call(step)
            written = {key: to_single(value) for key, value in outputs.items()}
            action = outputs.get(ACTION)
            get_dist = getattr(self, "get_dist", None)
            if action is not None and action.dtype in HALF and LOG_PROB in outputs and get_dist is not None:
                # Like the learner, evaluate the stored action: its dtype sets the precision of the distribution.
                written[LOG_PROB] = to_single(get_dist(step.copy()).log_prob(written[ACTION]))
        return written

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the module's entries into a TensorDict ``[*B]``."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict

    @property
    def get_dist(self) -> Callable[[TensorDictBase], Distribution]:
        """The policy's ``get_dist`` under autocast; raises AttributeError if the policy does not define it."""
        get_dist: Callable[[TensorDictBase], Distribution] = self.module.get_dist

        def under_autocast(tensordict: TensorDictBase) -> Distribution:
            with self.autocast():
                return get_dist(tensordict)

        return under_autocast

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the module."""
        return torch.autocast(policy_device(self.module).type, dtype=self.dtype, cache_enabled=False)


def to_single(value: Tensor) -> Tensor:
    """Convert half precision to float32, which is exact; return other tensors unchanged."""
    return value.float() if value.dtype in HALF else value


def with_autocast(module: Any, dtype: torch.dtype | None) -> Any:
    """Wrap a module in autocast; return it unchanged if it is None or already wrapped, or if ``dtype`` is None."""
    if module is None or dtype is None:
        return module
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return module if any(isinstance(part, AutocastModule) for part in parts) else AutocastModule(module, dtype)
