"""Batches of real steps and of imagined branches: fits, first states, lengths, and stored branches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.replay import dqn, fit, replay_data
from kit.runs import trainer
from kit.seeds import generator
from torchrl_lightning import BranchedReplay, MBPOModule
from torchrl_lightning.agents import MLPNetwork, WorldModelFit
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


class Dreamer:
    """A world model that adds 1000 in each step, and records its arguments."""

    def __init__(self) -> None:
        self.fits: list[tuple[list[float], list[float]]] = []
        self.starts: list[list[float]] = []

    def fit_dynamics(self, training: TensorDict, validation: TensorDict) -> None:
        self.fits.append((training["a"].tolist(), validation["a"].tolist()))

    def imagine(self, start: TensorDict, length: int) -> TensorDict:
        self.starts.append(start["a"].tolist())
        return torch.cat([real(start["a"] + 1000.0 * (step + 1)) for step in range(length)])


def real(a: torch.Tensor) -> TensorDict:
    done = torch.zeros(len(a), 1, dtype=torch.bool)
    return TensorDict({"a": a, "next": {"a": a + 1.0, "done": done}}, [len(a)])


def filled(rows: int = 40, **kwargs: Any) -> BranchedReplay:
    buffer = ExperienceBuffer(storage=RingStorage(100), generator=generator())
    if rows:
        buffer.extend(real(torch.arange(float(rows))))
    return BranchedReplay(buffer, **({"branches_per_fit": 30, "frames_per_fit": 10, "real_ratio": 0.25} | kwargs))


def test_batches_contain_real_and_imagined_rows_in_their_shares() -> None:
    source, dreamer = filled(), Dreamer()
    source.prepare(dreamer)
    batch = source.draw(8)
    assert batch["source"].tolist() == [0, 0, *[1] * 6]
    assert (batch["a"] >= 1000).tolist() == [False, False, *[True] * 6]
    training, validation = dreamer.fits[0]
    assert sorted(training + validation) == list(range(40))
    assert len(dreamer.starts[0]) == 30
    assert len(set(dreamer.starts[0])) > 10  # rows are drawn uniformly
    source.update_tensordict_priority(batch)
    batch["a"] = batch["a"] + 0.5
    source.write_back(batch, ["a"])
    assert (source.imagined[:]["a"] % 1 == 0.5).any()


def test_fits_come_when_enough_rows_were_written_and_no_row_changes_sides() -> None:
    source, dreamer = filled(), Dreamer()
    for rows, fits in ((0, 1), (0, 1), (9, 1), (1, 2), (25, 3), (0, 3)):
        source.buffer.extend(real(torch.full((rows,), 50.0)))
        source.prepare(dreamer)
        assert (len(dreamer.fits), source.fits) == (fits, fits)
    assert {row for row in dreamer.fits[2][1] if row < 40} == set(dreamer.fits[0][1])


def test_branches_grow_and_the_branches_of_the_last_fits_are_kept() -> None:
    source, dreamer = filled(fits_kept=2, last_length=3, lengthened_between=(50, 60)), Dreamer()
    sizes = []
    for _ in range(5):
        source.prepare(dreamer)
        sizes.append((source.imagined.storage.max_size, len(source.imagined)))
        source.buffer.extend(real(torch.full((10,), 50.0)))
    assert sizes == [(60, 30), (60, 60), (180, 120), (180, 180), (180, 180)]


@pytest.mark.parametrize("fits_kept", [1, 2, 3])
def test_branches_of_the_last_fits_are_kept_if_branches_end_early(fits_kept: int) -> None:
    class Ending(Dreamer):
        def imagine(self, start: TensorDict, length: int) -> TensorDict:
            rows = 5 + 7 * (len(self.fits) % 3)  # fewer than the 60 possible rows
            return real(torch.full((rows,), 1000.0 * len(self.fits)))

    source, dreamer = filled(fits_kept=fits_kept, first_length=2, last_length=2), Ending()
    for number in range(1, 8):
        if number == 4:  # as in a resumed run
            other = filled(fits_kept=fits_kept, first_length=2, last_length=2)
            other.buffer.load_state_dict(source.buffer.state_dict())
            other.load_state_dict(source.state_dict())
            source = other
        source.prepare(dreamer)
        expected = {1000.0 * each for each in range(max(1, number - fits_kept + 1), number + 1)}
        held = source.imagined.storage.get(source.imagined.writer.rings.filled_cells())["a"]
        assert set(held.tolist()) == expected
        assert len(held) == sum(5 + 7 * (int(each) // 1000 % 3) for each in expected)
        assert set(source.draw(400)["a"].tolist()) - expected <= set(range(100))
        source.buffer.extend(real(torch.full((10,), 50.0)))


def test_shorter_length_keeps_the_newest() -> None:
    source, dreamer = filled(fits_kept=1, first_length=3, lengthened_between=(0, 50)), Dreamer()
    for _ in range(2):
        source.prepare(dreamer)
        source.buffer.extend(real(torch.full((10,), 50.0)))
    assert len(source.imagined) == 30
    expected = torch.tensor(dreamer.starts[1]) + 1000.0
    held = source.imagined.storage.get(source.imagined.writer.rings.filled_cells())["a"]
    assert held.sort().values.tolist() == expected.sort().values.tolist()


def test_branches_have_the_dtypes_of_real_rows_also_after_loading_other_dtypes() -> None:
    def counted(rows: int = 40) -> BranchedReplay:
        source = filled(0)
        source.buffer.extend(real(torch.arange(rows, dtype=torch.uint8)))
        return source

    def floating(source: BranchedReplay) -> ExperienceBuffer:
        held = source.imagined.storage.get(source.imagined.writer.rings.filled_cells())
        kept = ExperienceBuffer(storage=RingStorage(source.imagined.storage.max_size), generator=generator())
        kept.extend(held.apply(lambda leaf: leaf if leaf.dtype is torch.bool else leaf.float() + 0.4))
        return kept

    source, dreamer = counted(), Dreamer()
    source.prepare(dreamer)
    batch = source.draw(8)
    assert batch["a"].dtype is torch.uint8
    assert batch["a"][2:].unique().tolist() == [255]
    state = source.state_dict()
    state["mixed"]["others"] = [floating(source).state_dict()]
    restored = counted()
    restored.load_state_dict(state)
    restored.buffer.extend(source.buffer[:10].exclude("index"))
    restored.prepare(dreamer)
    assert len(restored.imagined) == 60
    assert restored.draw(8)["a"].dtype is torch.uint8


def test_entries_that_the_world_model_does_not_generate_are_refused() -> None:
    with pytest.raises(ValueError, match="leave none of 0 rows"):
        filled(0).prepare(Dreamer())
    with pytest.raises(RuntimeError, match="is empty"):
        filled().draw(8)
    source = filled(0)
    source.buffer.extend(real(torch.arange(40.0)).set("colour", torch.zeros(40)))
    with pytest.raises(ValueError, match="'colour'"):
        source.prepare(Dreamer())


# ---------------------------------------------------------------------- with the agent


def test_agent_without_a_world_model_is_refused_and_one_without_branches_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"BranchedReplay.*fit_dynamics.*DQNModule"):
        fit(tmp_path, replay_data(source=partial(BranchedReplay, branches_per_fit=8)), dqn())
    with pytest.raises(ValueError, match="data=branched"):
        fit(tmp_path, replay_data(env="Pendulum-v1"), MBPOModule())


def test_normalised_observations_are_refused(tmp_path: Path) -> None:
    data = replay_data(env="Pendulum-v1", source=BranchedReplay, normalize_observation=True)
    with pytest.raises(ValueError, match=r"normalize_observation must .* BranchedReplay"):
        fit(tmp_path, data, MBPOModule())


@pytest.mark.parametrize("split", [{"validation_fraction": 1e-4}, {"validation_fraction": 0.9999}])
def test_first_fit_without_rows_on_one_side_is_refused_before_anything_is_collected(split: dict[str, float]) -> None:
    agent = MBPOModule(MLPNetwork([8]), dynamics=WorldModelFit([4], num_members=2, num_elites=2, max_epochs=1))
    data = replay_data(env="Pendulum-v1", source=partial(BranchedReplay, branches_per_fit=8, **split))
    side = "validation" if split["validation_fraction"] < 0.5 else "training"
    with pytest.raises(ValueError, match=rf"40.*{side}") as refusal:
        trainer(max_epochs=1).fit(agent, datamodule=data)
    assert (data.frames, "\n" in str(refusal.value)) == (0, False)


def test_first_fit_is_foreseen_exactly() -> None:
    def side_without_rows(call: Any, *args: Any) -> str:
        try:
            call(*args)
        except ValueError as error:
            return str(error).partition(" rows for ")[2].split()[0].rstrip(";.")
        return ""

    sides = []
    for seed in range(20):
        buffer = ExperienceBuffer(storage=RingStorage(60), generator=generator(seed))
        buffer.extend(real(torch.arange(4.0)))
        source = BranchedReplay(buffer, branches_per_fit=5, validation_fraction=0.5)
        sides.append(side_without_rows(source.check_first_fit, 4, seed))
        assert sides[-1] == side_without_rows(source.prepare, Dreamer())
    assert set(sides) == {"", "training", "validation"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("first_length", {"first_length": 3}),
        ("first_length", {"first_length": 3, "last_length": 5}),
        ("first_length", {"first_length": 2, "last_length": 1, "lengthened_between": (0, 0)}),
        ("lengthened_between", {"lengthened_between": (0, 50)}),
        ("lengthened_between", {"first_length": 3, "last_length": 3, "lengthened_between": [5, 50]}),
    ],
)
def test_length_without_effect_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}") as refusal:
        filled(**settings)
    assert "\n" not in str(refusal.value)


def test_branches_may_have_their_last_length_from_the_first_fit_on() -> None:
    assert filled(last_length=5).length(0) == 5
    assert filled(last_length=5, first_length=5, lengthened_between=[0, 0]).length(0) == 5


def test_branches_grow_in_one_step() -> None:
    source = filled(last_length=5, lengthened_between=(10, 10))
    assert [source.length(written) for written in (0, 9, 10, 11)] == [1, 1, 5, 5]


@pytest.mark.parametrize("between", [(1, 2, 3), (5,), 7])
def test_lengthened_between_is_a_pair(between: Any) -> None:
    with pytest.raises(ValueError, match="lengthened_between"):
        filled(lengthened_between=between)
