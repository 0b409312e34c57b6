"""Settings of demonstrations that another one leaves without effect are refused in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from torchrl_lightning import DemonstrationSampler, DemonstrationStorage, DemonstrationWriter, PPODBuffer

TARGET = {"target_agent_demos_dir": "nowhere"}
HUMAN = {"initial_human_demos_dir": "nowhere"}
NOTHING = {"rho": 0.0, "phi": 0.0}


def writer(capacity: int = 4, phi: float | None = None, **settings: Any) -> DemonstrationWriter:
    sampler = None if phi is None else DemonstrationSampler(0.1, phi)
    return DemonstrationWriter(DemonstrationStorage(capacity), sampler=sampler, **settings)


def attached(**settings: Any) -> PPODBuffer:
    buffer = PPODBuffer(8, **settings)
    buffer.attach("CartPole-v1", 2)
    return buffer


ppod = partial(PPODBuffer, 8)
REFUSED: list[tuple[str, str, Callable[..., Any], dict[str, Any]]] = [
    ("num_agent_demos_to_save", "target_agent_demos_dir", ppod, {"num_agent_demos_to_save": 3}),
    ("num_agent_demos_to_save", "target_agent_demos_dir", ppod, {"num_agent_demos_to_save": 0}),
    ("save_demos_every", "target_agent_demos_dir", ppod, {"save_demos_every": 1}),
    ("save_value_demos", "target_agent_demos_dir", ppod, {"save_value_demos": True}),
    ("demo_dtypes", "target_agent_demos_dir", attached, {"demo_dtypes": {"Action": torch.int8}}),
    ("target_agent_demos_dir", "num_agent_demos_to_save", ppod, {**TARGET, "num_agent_demos_to_save": 0}),
    ("alpha", "phi", ppod, {"phi": 0.0, "alpha": 2.0}),
    ("alpha", "total_buffer_demo_capacity", ppod, {"alpha": 0.0, "total_buffer_demo_capacity": 2}),
    ("alpha", "total_buffer_demo_capacity", ppod, {"alpha": 1.0, "total_buffer_demo_capacity": 1}),
    ("annealing", "phi", ppod, {"phi": 0.0, "annealing": "current"}),
    ("annealing", "total_buffer_demo_capacity", ppod, {"total_buffer_demo_capacity": 1, "annealing": "current"}),
    ("save_value_demos", "phi", ppod, {**TARGET, "phi": 0.0, "save_value_demos": True}),
    (
        "save_value_demos",
        "total_buffer_demo_capacity",
        ppod,
        {**TARGET, "total_buffer_demo_capacity": 1, "save_value_demos": True},
    ),
    ("human_share", "rho or phi", ppod, {**NOTHING, **HUMAN, "human_share": 0.5}),
    (
        "human_share",
        "total_buffer_demo_capacity",
        ppod,
        {**HUMAN, "human_share": 1.0, "total_buffer_demo_capacity": 1},
    ),
    ("ends", "rho or phi", ppod, {**NOTHING, "ends": "truncated"}),
    ("log_prob", "rho or phi", ppod, {**NOTHING, "log_prob": "current"}),
    ("alpha", "phi", DemonstrationSampler, {"phi": 0.0, "alpha": 2}),
    ("human_share", "rho or phi", DemonstrationSampler, {**NOTHING, "human_share": 0.5}),
    ("annealing", "phi", writer, {"phi": 0.0, "annealing": "current"}),
    ("annealing", "value_capacity", writer, {"annealing": "current", "value_capacity": 0}),
    ("annealing", "value_capacity", writer, {"annealing": "current", "capacity": 1}),
    ("value_capacity", "phi", writer, {"phi": 0.0, "value_capacity": 2}),
]


@pytest.mark.parametrize(("name", "needs", "make", "settings"), REFUSED)
def test_a_setting_without_effect_is_refused(
    name: str, needs: str, make: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}.*{needs}") as refusal:
        make(**settings)
    assert "\n" not in str(refusal.value)


TAKEN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (ppod, {}),
    (ppod, {"total_buffer_demo_capacity": 1}),
    (ppod, {"total_buffer_demo_capacity": 1, "alpha": 10, "annealing": "linear", "human_share": 0.0}),
    (ppod, NOTHING),
    (ppod, {**NOTHING, **TARGET, "save_demos_every": 1, "num_agent_demos_to_save": 1}),
    (ppod, {"rho": 0.0, "phi": 0.5, **HUMAN, "human_share": 0.5, "ends": "truncated", "log_prob": "current"}),
    (ppod, {"rho": 0.5, "phi": 0.0, "ends": "terminated", "log_prob": "current", "total_buffer_demo_capacity": 1}),
    (ppod, {"alpha": 0.0, "total_buffer_demo_capacity": 3, "annealing": "current"}),
    (ppod, {"annealing": "current", "total_buffer_demo_capacity": 2}),
    (ppod, {**TARGET, "save_value_demos": True, "demo_dtypes": {}}),
    (attached, {"demo_dtypes": {}, "num_agent_demos_to_save": 10, "save_demos_every": 10, "save_value_demos": False}),
    (DemonstrationSampler, {"rho": 1.0, "phi": 0.0, "human_share": 1.0}),
    (DemonstrationSampler, {**NOTHING, "alpha": 10}),
    (writer, {"phi": 0.0, "value_capacity": None}),
    (writer, {"value_capacity": 0}),
    (writer, {"phi": 0.2, "value_capacity": 100, "annealing": "current"}),
]


@pytest.mark.parametrize(("make", "settings"), TAKEN)
def test_a_setting_with_an_effect_is_taken(make: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert make(**settings) is not None


def test_an_infinite_threshold_is_refused_by_its_name() -> None:
    for value in (float("inf"), float("nan"), "high"):
        with pytest.raises(ValueError, match=r"^initial_reward_threshold"):
            PPODBuffer(8, initial_reward_threshold=value)
        with pytest.raises(ValueError, match=r"^reward_threshold"):
            DemonstrationWriter(DemonstrationStorage(), reward_threshold=value)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_human_demonstrations_that_are_not_there_is_announced(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        PPODBuffer(8, human_share=share, initial_reward_threshold=1.0).attach("CartPole-v1", 2)
    assert ["human_share=0.5 has no effect" in record.getMessage() for record in caplog.records] == [True] * bool(share)
