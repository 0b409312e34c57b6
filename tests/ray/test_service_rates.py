"""A rate limiter with another ratio than its snapshot, and threads that would wait for themselves."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.fake_ray import FakeRay
from kit.service import service_arrays, service_buffer, service_rows, shard_of, stored_times
from torchrl_lightning import ReplayService
from torchrl_lightning.ray.cluster import ServiceFault
from torchrl_lightning.ray.rate_limiter import RateLimiter

ONE_BY_ONE: dict[str, Any] = {"batches_per_call": 1, "calls_in_flight": 1}


def limited(folder: Path | None = None, ratio: float | None = None, error: float | None = None, **settings: Any) -> Any:
    limits: dict[str, Any] = {"samples_per_insert": ratio, "error_buffer": error}
    return ReplayService(service_buffer(), name="it", folder=folder, **limits, **{**ONE_BY_ONE, **settings})


def rate_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about changed ratios so far, and forget them."""
    lines = [record.getMessage() for record in caplog.records if "counts from now on" in record.getMessage()]
    caplog.clear()
    return lines


def counts(ray: FakeRay, number: int = 0) -> tuple[int, int]:
    """Return the numbers of rows that were written to a shard and drawn from it."""
    _, inserted, drawn = ray.get(shard_of(ray, number).status.remote())
    return inserted, drawn


def write_and_draw(service: ReplayService, numbers: range, draws: float) -> None:
    """Write rollouts of eight rows, and draw batches of eight rows, in one thread."""
    drawn = 0
    for done, number in enumerate(numbers, start=1):
        service.extend(service_rows(number))
        while drawn + 1 <= done * draws:
            service.draw(8)
            drawn += 1


def repeat(count: int, call: Callable[..., Any], *args: Any) -> None:
    """Call a function several times."""
    for _ in range(count):
        call(*args)


# ---------------------------------------------------------------------- another ratio


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ((8.0, 80.0), (0.5, 40.0), r"samples_per_insert=0\.5 counts from now on, .* with samples_per_insert=8\."),
        ((0.5, 40.0), (8.0, 80.0), r"samples_per_insert=8 counts from now on, .* with samples_per_insert=0\.5\."),
        ((None, None), (1.0, 40.0), r"samples_per_insert=1 counts from now on, .* without samples_per_insert\."),
        ((8.0, 80.0), (None, None), None),
        ((8.0, 80.0), (8.0, 80.0), None),
    ],
)
def test_changed_ratio_counts_from_the_change(
    before: Any, after: Any, line: str | None, shards: int, ray: FakeRay, tmp_path: Path, caplog: Any
) -> None:
    first = limited(tmp_path / "first", *before, shards=shards)
    write_and_draw(first, range(20), before[0] or 8.0)
    state = first.state_dict()
    first.shutdown()
    caplog.clear()
    second = limited(tmp_path / "second", *after, shards=shards)
    second.load_state_dict(state)
    second.writer("nobody")
    lines = rate_lines(caplog)
    assert [re.match(line or "", text) is not None for text in lines] == ([] if line is None else [True])
    start = [counts(ray, number) for number in range(shards)]
    write_and_draw(second, range(20, 60), after[0] or 8.0)
    second.state_dict()
    for number in range(shards):
        inserted, drawn = (now - then for now, then in zip(counts(ray, number), start[number], strict=True))
        assert line is None or abs(after[0] * inserted - drawn) <= after[1]
    shard_of(ray).die()  # its snapshot has the present ratio
    write_and_draw(second, range(60, 70), after[0] or 8.0)
    assert rate_lines(caplog) == []
    second.shutdown()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1.0, 900.0, 1), (1.0, 20.0, 1)),  # a smaller bound than the present deviation
        ((1.0, 40.0, 1), (1.0, 40.0, 300)),  # more rows before the first draw
        ((1.0, 40.0, 150), (1.0, 40.0, 1)),
    ],
)
def test_other_changed_limits_block_nobody(before: Any, after: Any, ray: FakeRay, tmp_path: Path) -> None:
    first = limited(tmp_path, *before[:2], min_size=before[2])
    write_and_draw(first, range(20), 1.0 if before == (1.0, 40.0, 1) else 0.0)
    state = first.state_dict()
    first.shutdown()
    second = limited(tmp_path, *after[:2], min_size=after[2])
    second.load_state_dict(state)
    write_and_draw(second, range(20, 40), 0.0 if after[2] == 300 else 1.0)
    write_and_draw(second, range(40, 60), 1.0)
    assert counts(ray)[0] >= 59 * 8


def test_snapshot_without_its_limits_blocks_nobody(ray: FakeRay, tmp_path: Path) -> None:
    limiter = RateLimiter(0.5, 40.0)
    assert limiter.restore(160, 1280) is None
    assert limiter.admits_draw(8)
    assert limiter.admits_insert(8)
    limiter = RateLimiter(0.5, 40.0)
    limiter.restore(160, 60)  # within the bound
    assert limiter.admits_draw(8)
    limiter.drawn += 8
    limiter.drawn += 50
    assert not limiter.admits_draw(8)


RATIOS = st.sampled_from([0.25, 1.0, 3.0, 1 / 3])


@settings(max_examples=50)
@given(
    ratios=st.lists(RATIOS, min_size=2, max_size=4),
    insert=st.integers(1, 16),
    draw=st.integers(1, 16),
    min_size=st.integers(1, 40),
    coin=st.randoms(use_true_random=False),
    lives=st.booleans(),
)
def test_each_ratio_is_kept_within_its_bound_from_its_change(
    ratios: list[float], insert: int, draw: int, min_size: int, coin: Any, lives: bool
) -> None:
    limiter = RateLimiter(ratios[0], 1000.0, min_size)
    for ratio in ratios:
        bound = max(ratio * insert, draw) + 1.0
        if lives:  # the ratio of the same limiter is changed
            limiter.samples_per_insert = ratio
            limiter.error_buffer = bound
        else:
            restored = RateLimiter(ratio, bound, min_size)
            restored.restore(limiter.inserted, limiter.drawn, limiter.state)
            limiter = restored
        first = max(limiter.inserted, min_size), limiter.drawn
        for _ in range(60):
            may_insert, may_draw = limiter.admits_insert(insert), limiter.admits_draw(draw)
            assert may_insert or may_draw
            if may_insert and (not may_draw or coin.random() < 0.5):
                limiter.inserted += insert
            else:
                limiter.drawn += draw
            surplus = ratio * (limiter.inserted - first[0]) - (limiter.drawn - first[1])
            if len(set(ratios)) == len(ratios) and limiter.inserted >= min_size:
                assert -bound - 1e-6 <= surplus <= bound + ratio * insert + 1e-6


def test_setting_another_ratio_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    limiter = RateLimiter(4.0, error_buffer=100.0)
    limiter.samples_per_insert = 3.0  # nothing is written yet
    limiter.inserted, limiter.drawn = 1000, 3000
    limiter.samples_per_insert = 3.0
    assert rate_lines(caplog) == []
    limiter.samples_per_insert = 0.5
    assert rate_lines(caplog) == [
        "samples_per_insert=0.5 counts from now on, after 1000 written and 3000 drawn rows with samples_per_insert=3."
    ]
    with pytest.raises(ValueError, match="samples_per_insert must be"):
        limiter.samples_per_insert = -1.0
    assert limiter.admits_draw(100)
    assert not limiter.admits_draw(101)


# ---------------------------------------------------------------------- a thread that waits for itself


@pytest.mark.parametrize("how", ["service", "writer", "joined"])
def test_thread_that_waits_for_its_own_rows_gets_an_error(how: str, ray: FakeRay) -> None:
    limits: dict[str, Any] = {"ratio": 0.5, "error": 16.0}
    service = limited(**limits)
    if how == "writer":
        writer = service.writer("mine")

        def write(number: int) -> None:
            writer.write(service_arrays(number, [0, 1, 2, 3]), [0, 1, 2, 3])
    else:
        service.writer("nobody")
        write_to = service if how == "service" else limited(join=True, **limits)

        def write(number: int) -> None:
            write_to.extend(service_rows(number))

    for number in range(2):
        write(number)
    with pytest.raises(ServiceFault) as raised:
        repeat(8, service.draw, 8)
    message = str(raised.value)
    assert "samples_per_insert=0.5, error_buffer=16 and min_size=1 a draw of 8 rows waits for " in message
    assert "cluster" not in message
    assert "\n" not in message
    missing = int(re.findall(r"waits for (\d+) more written rows", message)[0])
    before = counts(ray)
    for number in range(2, 2 + -(-missing // 8)):  # the named rows are enough
        write(number)
    assert service.draw(8).shape == (8,)
    assert counts(ray)[1] == before[1] + 8


def test_thread_that_waits_for_its_own_draws_gets_an_error(ray: FakeRay) -> None:
    service = limited(ratio=1.0, error=16.0)
    write_and_draw(service, range(4), 1.0)
    with pytest.raises(ServiceFault, match=r"an insert of 8 rows waits for \d+ more drawn rows, .*samples_per_insert"):
        write_and_draw(service, range(4, 12), 0.0)
    written = counts(ray)[0] // 8
    for _ in range(12):
        try:
            service.draw(8)
        except ServiceFault:
            break
    service._writer.wait_until_written()
    assert counts(ray)[0] // 8 > written
    assert sorted(stored_times(ray)[0]) == list(range(len(stored_times(ray)[0])))


@pytest.mark.parametrize("error", [20.0, math.inf])
def test_error_names_the_missing_first_rows(error: float, ray: FakeRay) -> None:
    service = limited(ratio=1.0, error=error, min_size=50)
    service.extend(service_rows(0))
    with pytest.raises(ServiceFault, match="min_size=50 a draw of 8 rows waits for 42 more written rows"):
        service.draw(8)


def test_thread_waits_for_rows_of_another_thread(ray: FakeRay) -> None:
    limits: dict[str, Any] = {"ratio": 1.0, "error": 16.0}
    batches: list[Any] = []
    service = limited(**limits)
    service.extend(service_rows(0))
    other = limited(join=True, **limits)
    other_thread = threading.Thread(target=other.extend, args=(service_rows(0),))
    other_thread.start()
    other_thread.join()
    while shard_of(ray).instance._row_counts()[0] < 16:
        time.sleep(0.01)
    drawing = threading.Thread(target=lambda: batches.extend(service.draw(8) for _ in range(6)), daemon=True)
    drawing.start()
    while counts(ray) != (16, 24) or not shard_of(ray).instance._waiting:  # the fourth draw waits
        time.sleep(0.01)
    shard_of(ray).die()  # the new shard does not know the other thread
    time.sleep(0.1)
    for number in range(1, 4):  # never waits: the error admits 16 rows before a draw
        other.extend(service_rows(number))
    drawing.join(20)
    assert len(batches) == 6


@pytest.mark.parametrize("is_noticed_by", ["draw", "writer"])
def test_death_does_not_let_a_thread_wait_for_draws_that_are_forgotten(
    is_noticed_by: str, ray: FakeRay, tmp_path: Path
) -> None:
    service = limited(tmp_path, ratio=1.0, error=16.0)
    service.extend(service_rows(0))
    service.draw(8)
    service.state_dict()
    write_and_draw(service, range(1, 20), 1.0)  # no snapshot contains these rows and draws
    shard_of(ray).die()
    if is_noticed_by == "writer":  # the new shard does not know yet that this thread draws
        service._writer.wait_until_written()
    write_and_draw(service, range(20, 40), 1.0)
    service._writer.wait_until_written()
    assert stored_times(ray)[0] == list(range(80))


@pytest.mark.parametrize("is_draw", [True, False])
def test_wait_for_the_first_call_of_another_thread_is_logged(
    is_draw: bool, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    service = limited(ratio=1.0, error=16.0)
    calls = [partial(service.draw, 8)] if is_draw else [partial(service.extend, service_rows(n)) for n in range(6)]
    thread = threading.Thread(target=lambda: [call() for call in calls], daemon=True)
    thread.start()
    expected = "but no thread has written yet" if is_draw else "more drawn rows, but no thread has drawn yet"
    deadline = time.monotonic() + 20
    while expected not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    other = limited(join=True, ratio=1.0, error=16.0)
    for number in range(4):
        if is_draw:
            other.extend(service_rows(number)[:, :1])
        else:
            other.draw(8)
    thread.join(20)
    assert not thread.is_alive()
    assert caplog.text.count(expected) == 1
    assert "samples_per_insert=1, error_buffer=16 and min_size=1" in caplog.text
