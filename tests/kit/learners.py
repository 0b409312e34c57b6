"""Small agents of each kind, and data for their training."""

from __future__ import annotations

from typing import Any

import torch

from kit.fake_data import FakeData, FakeReplay
from kit.specs import BOX, DISCRETE, TWO_CHOICES
from torchrl_lightning.agents import (
    A2CModule,
    DQNModule,
    MLPNetwork,
    PPOModule,
    RecurrentNetwork,
    ReinforceModule,
    SACModule,
    TD3Module,
    VTraceModule,
)

ON_POLICY: dict[str, Any] = {"ppo": PPOModule, "a2c": A2CModule, "reinforce": ReinforceModule, "vtrace": VTraceModule}
OFF_POLICY: dict[str, Any] = {"dqn": DQNModule, "sac": SACModule, "td3": TD3Module}
SPECS = {**dict.fromkeys(ON_POLICY, TWO_CHOICES), "dqn": DISCRETE, "sac": BOX, "td3": BOX}
NETWORKS = {"mlp": MLPNetwork([8], "relu"), "gru": RecurrentNetwork("gru", 6), "lstm": RecurrentNetwork("lstm", 6, 2)}


def learner(case: str, network: Any = "mlp", **settings: Any) -> Any:
    """Build an agent, always with the same weights."""
    torch.manual_seed(0)
    kind = {**ON_POLICY, **OFF_POLICY}[case]
    return kind(NETWORKS[network] if isinstance(network, str) else network, **settings).build(SPECS[case])


def data_of(case: str, batches: int = 3, **settings: Any) -> Any:
    """Build the data for an agent's training."""
    return (FakeData if case in ON_POLICY else FakeReplay)(batches, specs=SPECS[case], **settings)
