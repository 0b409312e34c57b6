"""A state with unusual numbers, types or names is displayed, or raises an error of one line."""

from __future__ import annotations

import copy
import math
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import (
    Demonstration,
    DemonstrationStorage,
    ExperienceBuffer,
    FrameStorage,
    PrioritizedSampler,
    RingStorage,
    inspect_buffer,
    write_demonstration,
)
from torchrl_lightning._core.files import MANIFEST, read_state_folder, write_state_folder
from torchrl_lightning.cli.inspect import inspect_path, main
from torchrl_lightning.inspection.report import Inspection, inspect_state

COUNT = 150


def state_of(reward=None, name="x", **storage):
    buffer = ExperienceBuffer(storage=RingStorage(200), **storage)
    done = torch.zeros(COUNT, 1, dtype=torch.bool)
    done[::10] = True
    steps = TensorDict({name: torch.rand(COUNT, 1), "next": {"done": done}}, [COUNT])
    steps["next", "reward"] = torch.ones(COUNT, 1) if reward is None else reward
    buffer.extend(steps)
    return copy.deepcopy(buffer.state_dict())


def stacked_buffer(steps=40, size=24):
    """Build a buffer of two episodes with a moving line in stacks of three frames; return it and the stacks."""
    frames = torch.zeros(steps + 3, size, size, dtype=torch.uint8)
    for number in range(steps + 3):
        frames[number, number % size, :] = 255
    stacks = frames.unfold(0, 3, 1).permute(0, 3, 1, 2).contiguous()
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[steps // 2 - 1] = True
    buffer = ExperienceBuffer(storage=FrameStorage(64, 3))
    data = TensorDict({"observation": stacks[:steps]}, [steps])
    data["next"] = TensorDict(
        {"observation": stacks[1 : steps + 1], "reward": torch.rand(steps, 1), "done": done, "terminated": done},
        [steps],
    )
    buffer.extend(data)
    return buffer, stacks[:steps]


def demonstrated():
    steps = TensorDict({"observation": torch.rand(5, 2), "action": torch.rand(5, 1)}, [5])
    steps["next", "reward"] = torch.rand(5, 1)
    storage = DemonstrationStorage()
    storage.replace([Demonstration(steps, terminated=True, truncated=False)], [])
    return storage


def show(inspection: Inspection) -> str:
    """Check that the terminal text and the page are complete, and return both as one string."""
    text, page = str(inspection), inspection._repr_html_()
    assert all(line.isprintable() for line in text.splitlines())
    assert all(line.isprintable() for line in page.splitlines())
    assert page.count("<div") == page.count("</div>")
    return text + page


REWARDS = {
    "huge": torch.full((COUNT, 1), 1e30),
    "huge and small": torch.tensor([1e30, -1e30, 0.5]).repeat(50)[:, None],
    "whole and huge": torch.arange(COUNT)[:, None] * 1e17,
    "of float64": torch.tensor([1.7e308, -1.7e308]).double().repeat(75)[:, None],
    "the largest of float64": torch.full((COUNT, 1), 1.7e308, dtype=torch.float64),
    "infinite": torch.full((COUNT, 1), math.inf),
    "infinite both ways": torch.tensor([math.inf, -math.inf]).repeat(75)[:, None],
    "not a number": torch.full((COUNT, 1), math.nan),
    "partly not a number": torch.tensor([math.nan, 1.0]).repeat(75)[:, None],
    "minus zero": torch.full((COUNT, 1), -0.0),
    "constant": torch.full((COUNT, 1), 3.25),
    "tiny": torch.full((COUNT, 1), 1e-45),
    "bool": torch.arange(COUNT)[:, None] % 2 == 0,
    "bytes": torch.arange(COUNT)[:, None].to(torch.uint8),
    "int64": torch.tensor([2**63 - 1, -(2**63)]).repeat(75)[:, None],
    "int8": torch.arange(COUNT)[:, None].to(torch.int8),
    "half": torch.full((COUNT, 1), 6e4, dtype=torch.float16),
    "bfloat16": torch.full((COUNT, 1), 3e38, dtype=torch.bfloat16),
    "complex": torch.full((COUNT, 1), 1 + 2j),
    "complex and infinite": torch.full((COUNT, 1), complex(math.inf, math.nan)),
    "without numbers": torch.empty(COUNT, 0),
    "without a column": torch.rand(COUNT),
    "of many columns": torch.rand(COUNT, 100),
}


@pytest.mark.parametrize("name", REWARDS)
def test_page_accepts_any_rewards(name):
    for sampler in ({}, {"sampler": PrioritizedSampler(200)}):
        inspection = inspect_state(state_of(REWARDS[name], **sampler), "it")
        assert f"{COUNT} of 200 cells" in show(inspection)
        assert inspection.unreadable == ()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int64, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2), (70,)])
def test_page_accepts_columns_of_any_dtype_and_shape(dtype, shape):
    state = state_of()
    state["storage"]["data"]["x"] = torch.ones(COUNT, *shape).to(dtype)
    assert "next.reward" in show(inspect_state(state, "it"))


@pytest.mark.parametrize("values", [[math.inf], [math.nan], [-1.0], [0.0], [1e30], [1e-44], [1e30, 1e-30, 0.0]])
def test_page_accepts_any_priorities(values):
    state = state_of(sampler=PrioritizedSampler(200))
    leaves = state["sampler"]["leaves"]
    state["sampler"]["leaves"] = torch.tensor(values).repeat(len(leaves))[: len(leaves)].to(leaves.dtype)
    assert "next.reward" in show(inspect_state(state, "it"))


WRONG = {
    "none": None,
    "a text": "\x1b[31m<b>\n",
    "minus one": -1,
    "zero": 0,
    "a huge number": 10**30,
    "many": 10**15,
    "a fraction": 1.5,
    "not a number": math.nan,
    "a bool": True,
    "a list": [1],
    "a dict": {"x": 1},
    "a number as a tensor": torch.tensor(3),
    "an empty tensor": torch.empty(0),
    "a vector": torch.tensor([1, 2, 3]),
    "a vector of huge numbers": torch.tensor([2**62]),
    "complex numbers": torch.ones(COUNT, 1) * 1j,
    "rows without numbers": torch.empty(10**9, 0),
}
KINDS = {
    "prioritized": lambda: state_of(sampler=PrioritizedSampler(200)),
    "frames": lambda: copy.deepcopy(stacked_buffer(12)[0].state_dict()),
    "demonstrations": lambda: copy.deepcopy(demonstrated().state_dict()),
    "a storage": lambda: state_of()["storage"],
}


def paths_in(node, path=()):
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, entry in list(entries):
        yield (*path, key)
        yield from paths_in(entry, (*path, key))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_type_is_shown_or_reported_in_one_line(kind):
    valid_state = KINDS[kind]()
    began = time.process_time()
    count = 0
    for number, path in enumerate(paths_in(valid_state)):
        for name, value in list(WRONG.items())[number % 3 :: 3]:  # all combinations would take a minute
            state = copy.copy(valid_state)
            level = state
            for key in path[:-1]:
                level[key] = copy.copy(level[key])
                level = level[key]
            level[path[-1]] = value
            count += 1
            message = None
            try:
                inspection = inspect_state(state, "it")
            except ValueError as error:
                message = str(error)
            if message is None:
                assert str(inspection) if count % 8 else show(inspection)
            else:
                assert message.isprintable(), (path, name)
    assert count > 40
    assert time.process_time() - began < 0.2 * count


def test_zero_lengths_are_reported_in_one_line():
    state = state_of()
    state["writer"]["length"] = 0
    with pytest.raises(ValueError, match="length must be an integer of at least 1, got 0"):
        inspect_state(state, "it")


@pytest.mark.parametrize("buffer", [ExperienceBuffer(), ExperienceBuffer(storage=RingStorage(8), num_envs=4)])
def test_empty_buffers_are_shown(buffer):
    assert "nothing is stored yet" in show(inspect_buffer(buffer))


def test_readable_buffers_are_shown_beside_unreadable_ones(tmp_path):
    torn = state_of()
    torn["writer"]["positions"] = "x"
    inspection = inspect_state({"ranks": [state_of(), torn, state_of()]}, "it")
    assert len(inspection.summaries) == 2
    assert re.fullmatch(
        r"it\[1\] cannot be shown: positions must be torch\.int64 .* got str .*", *inspection.unreadable
    )
    assert show(inspection).count("it[1] cannot be shown") == 2
    inspection.write_html(tmp_path / "page.html")
    assert "it[1] cannot be shown" in (tmp_path / "page.html").read_text()


def test_missing_rank_buffer_and_torn_demonstration_are_reported_beside_others(tmp_path):
    buffer = ExperienceBuffer(storage=RingStorage(8))
    buffer.extend(TensorDict({"x": torch.rand(3, 1)}, [3]))
    buffer.dumps(tmp_path / "buffer" / "0123abcd" / "rank_0" / "after_1_0000000a")
    references = [{"run": "0123abcd", "name": f"after_1_0000000{name}", "folder": "/nowhere/rank_0"} for name in "ab"]
    (tmp_path / "checkpoints").mkdir()
    torch.save(
        {"ReplayDataModule": {"ranks": [{"snapshot": reference} for reference in references]}},
        tmp_path / "checkpoints/a.ckpt",
    )
    inspection = inspect_path(tmp_path)
    assert len(inspection.summaries) == 1
    assert [line.partition(" cannot")[0] for line in inspection.unreadable] == ["the buffer of rank 1"]

    demos = tmp_path / "demos"
    demos.mkdir()
    steps = TensorDict({"observation": torch.rand(5, 2), "action": torch.rand(5, 1)}, [5])
    steps["next", "reward"] = torch.rand(5, 1)
    write_demonstration(demos / "a.safetensors", Demonstration(steps, terminated=True, truncated=False))
    (demos / "b\x1b[31m.safetensors").write_bytes(b"x")
    inspection = inspect_path(demos)
    assert len(inspection.summaries) == len(inspection.unreadable) == 1
    assert r"b\x1b[31m.safetensors was refused" in show(inspection)


NAMES = [
    "\x1b[31mred",
    "a\nb",
    "\u202eright",
    "<script>alert(1)</script>",
    "&amp;",
    "[bold]x[/bold]",
    "x" * 5000,
    "\ud800",
    r"$\frac{1}$",
    "\u6f22\u5b57",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_escaped_on_terminal_and_page(name):
    state = state_of(name=name)
    output = show(inspect_state({"a": {name: state}}, f"file {name}"))
    assert "<script>" not in inspect_state(state, "it")._repr_html_()
    assert "\x1b" not in output
    assert "next.reward" in output


def test_too_many_buffers_are_reported_in_one_line():
    inspection = inspect_state([state_of()] * 200, "it")
    assert len(inspection.summaries) == 64
    assert inspection.unreadable == ("it has more than 64 buffers; the others are skipped",)


@pytest.mark.parametrize("saved", [False, True])
def test_deduplicated_frames_are_shown_and_diagnosed_as_images(tmp_path, saved):
    buffer, stacks = stacked_buffer(600, 64)
    state = copy.deepcopy(buffer.state_dict())
    if saved:
        write_state_folder(tmp_path / "state", state)
        state = read_state_folder(tmp_path / "state", streamed=True)
    inspection = inspect_state(state, "it")
    (summary,) = inspection.summaries
    entry = summary.entry("observation")
    assert entry.shape == (3, 64, 64)
    assert entry.dtype == "uint8"
    assert (entry.low, entry.high) == (0, 255)
    stored = stacks[-summary.view.count :]
    assert entry.mean == pytest.approx(float(stored.double().mean()))
    leaf = summary.view.leaves["observation",]
    first = int(summary.view.first[0]) % summary.view.length
    assert torch.equal(leaf[:][first], stored[0])
    assert inspection._repr_html_().count("data:image/png") > 10
    assert "same image" not in " ".join(inspection.findings)


def test_constant_frames_are_diagnosed():
    buffer = ExperienceBuffer(storage=FrameStorage(200, 2))
    images = torch.full((150, 2, 20, 20), 7, dtype=torch.uint8)
    data = TensorDict({"observation": images, "next": {"observation": images, "reward": torch.rand(150, 1)}}, [150])
    buffer.extend(data)
    assert (
        "observation is the same image in every step: a network cannot learn from it" in inspect_buffer(buffer).findings
    )


def test_manifest_with_too_many_values_raises_before_parsing(tmp_path):
    write_state_folder(tmp_path / "state", state_of())
    (tmp_path / "state" / MANIFEST).write_text("[" + "[]," * 1_000_000 + "[]]")
    with pytest.raises(ValueError, match=r"at most .* values, got"):
        read_state_folder(tmp_path / "state")
    with pytest.raises(ValueError, match="can be read again"):
        write_state_folder(tmp_path / "other", {"x": [0] * 1_000_001})
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["huge", "zero"])
def test_inspect_command_shows_or_rejects_a_saved_state(tmp_path, capsys, kind):
    state = state_of(REWARDS["huge"] if kind == "huge" else None)
    if kind == "zero":
        state["writer"]["length"] = 0
    write_state_folder(tmp_path / "state", state)
    page = tmp_path / "page.html"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "huge":
            assert main([str(tmp_path / "state"), "--html", str(page)]) == 0
            assert page.is_file()
        else:
            with pytest.raises(SystemExit, match=r"^error: .* cannot be shown: length must be") as end:
                main([str(tmp_path / "state"), "--html", str(page)])
            assert "\n" not in str(end.value)
            assert not page.exists()
    assert Path(page).exists() == (kind == "huge")
