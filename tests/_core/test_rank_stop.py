"""Ranks agree to stop; this process simulates the other rank."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from torchrl_lightning._core import rank_stop as module
from torchrl_lightning._core.rank_stop import RankStop

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


class Ranks:
    """This rank and its simulated peer, with the values ``peer``: priority, not done, elapsed seconds."""

    def __init__(self) -> None:
        self.stop, self.peer, self.reductions = RankStop(), [0.0, 1.0, 0.5], 0
        self.stop.begin(self, SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu"), launcher=None)))

    def reduce(self, values: torch.Tensor, operation: Any) -> None:
        self.reductions += 1
        values.copy_(torch.maximum(values, torch.tensor(self.peer)))


def check_often(check: Callable[[], None]) -> None:
    for _ in range(100):
        check()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module, "this_rank", lambda: 1)
    created = Ranks()
    monkeypatch.setattr(module.dist, "all_reduce", created.reduce)
    before = signal.getsignal(signal.SIGTERM)
    yield created
    created.stop.end(created)
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SIGTERMException), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_to_this_rank_raises_in_the_next_agreement(ranks: Ranks, number: int, error: type) -> None:
    ranks.stop.check()
    ranks.stop._note(number)
    with pytest.raises(error):
        check_often(ranks.stop.check)
    assert ranks.stop.agreed == number


def test_signal_to_the_peer_raises_here(ranks: Ranks) -> None:
    ranks.peer[0] = 2.0
    with pytest.raises(SIGTERMException) as raised:
        ranks.stop.check()
    assert raised.value.code == 143


def test_interval_grows_while_agreements_are_fast_and_an_agreement_can_be_made_now(ranks: Ranks) -> None:
    ranks.peer[2] = 1e-3
    for _ in range(1000):
        ranks.stop.check()
    fast = ranks.reductions
    assert fast < 20
    ranks.peer[0] = 1.0
    with pytest.raises(KeyboardInterrupt):
        ranks.stop.check(now=True)
    assert ranks.reductions == fast + 1


def test_evaluation_waits_until_the_peer_has_completed_it(ranks: Ranks) -> None:
    def reduce(values: torch.Tensor, operation: Any) -> None:
        ranks.reduce(values, operation)
        ranks.peer[1] = float(ranks.reductions < 3)

    module.dist.all_reduce = reduce
    with ranks.stop.evaluating():
        ranks.stop.check_evaluation()
    assert ranks.reductions == 4


def test_evaluation_stops_after_a_signal_to_the_peer(ranks: Ranks) -> None:
    ranks.peer[0] = 1.0
    with pytest.raises(KeyboardInterrupt), ranks.stop.evaluating():
        check_often(ranks.stop.check_evaluation)


def test_second_signal_ends_the_process_and_repeated_deliveries_do_not(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    killed: list[str] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    ranks.stop._launched.append(SimpleNamespace(kill=lambda: killed.append("rank 1")))  # the rank may be suspended
    clock = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(module, "monotonic", lambda: next(clock))
    ranks.stop._note(signal.SIGTERM)
    ranks.stop._note(signal.SIGTERM)
    assert ended == killed == []
    ranks.stop._note(signal.SIGINT)
    assert ended == [130]
    assert killed == ["rank 1"]
    monkeypatch.undo()


def test_end_restores_no_handler_that_the_trainer_has_replaced(ranks: Ranks) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning restores its handlers first at the end of a fit
    ranks.stop.end(ranks)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SIGTERMException), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_after_the_last_agreement_raises_after_the_run(ranks: Ranks, number: int, error: type) -> None:
    ranks.stop.check(now=True)
    ranks.stop.raise_pending()
    ranks.stop._note(number)
    ranks.stop.end(ranks)
    with pytest.raises(error):
        ranks.stop.raise_pending()
    ranks.stop.raise_pending()  # a second call does not raise


def test_single_rank_keeps_its_handlers() -> None:
    stop, before = RankStop(), signal.getsignal(signal.SIGTERM)
    stop.begin(object(), None)
    assert not stop.is_active
    assert signal.getsignal(signal.SIGTERM) is before
