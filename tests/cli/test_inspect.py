"""The output and the errors of ``torchrl-lightning-inspect`` for stored runs, buffers and demonstrations."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lightning import Demonstration, ExperienceBuffer, RingStorage, write_demonstration
from torchrl_lightning.cli.inspect import main


def _steps(count):
    steps = TensorDict({"observation": torch.rand(count, 2), "action": torch.arange(count) % 2}, [count])
    steps["next", "reward"] = torch.rand(count, 1)
    return steps


@pytest.fixture
def run(tmp_path):
    """Return a run that is still writing: the buffer of its last checkpoint and the buffer of its next one."""
    for name in ("after_1_0000000a", "after_2_0000000b"):
        buffer = ExperienceBuffer(storage=RingStorage(8))
        buffer.extend(_steps(int(name[6]) * 3))
        buffer.dumps(tmp_path / "buffer" / "0123abcd" / "rank_0" / name)
    return tmp_path


def _checkpoint(run, **own):
    folder = run / "checkpoints"
    folder.mkdir(exist_ok=True)
    torch.save({"ReplayDataModule": {"ranks": [own]}, "state_dict": {}}, folder / "last.ckpt")


def test_run_without_a_checkpoint_shows_the_newest_buffer(run, capsys):
    page = run / "page.html"
    assert main([str(run), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "6 of 8 cells (75%)" in " ".join(out.split())
    assert out.endswith(f"page: {page}\n")
    assert page.is_file()


def test_run_shows_the_buffer_of_its_checkpoint_in_any_folder(run, capsys):
    _checkpoint(run, snapshot={"folder": "/nowhere/rank_0", "run": "0123abcd", "name": "after_1_0000000a"})
    assert main([str(run)]) == 0
    assert "3 of 8 cells (38%)" in " ".join(capsys.readouterr().out.split())


def test_directory_of_demonstrations(tmp_path, capsys):
    for number in range(2):
        write_demonstration(
            tmp_path / f"{number}.safetensors", Demonstration(_steps(3), terminated=True, truncated=False)
        )
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 demonstrations, 6 steps" in " ".join(out.split())
    assert "2: 2 terminated" in out


def _tear(run):
    data = next((run / "buffer").glob("*/*/after_2*/*.bin"))
    data.write_bytes(data.read_bytes()[:-1])


def _foreign(run):
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").write_bytes(b"no checkpoint")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_tear, "missing or truncated; name a run"),
        (_foreign, "is not a complete checkpoint of plain data"),
        (lambda run: _checkpoint(run), "contains no buffer; train with data.checkpoint_buffer=inside"),
        (
            lambda run: _checkpoint(run, snapshot={"folder": "/x", "run": "../..", "name": "after_1_0000000a"}),
            "reference to a replay buffer is invalid",
        ),
    ],
)
def test_damaged_foreign_or_empty_source_exits_with_one_line_and_a_remedy(run, change, told):
    change(run)
    with pytest.raises(SystemExit) as error:
        main([str(run)])
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_path_and_empty_folder_are_refused(tmp_path):
    for path, told in (
        (tmp_path / "none", "none does not exist"),
        (tmp_path, "contains no checkpoint, no saved buffer"),
    ):
        with pytest.raises(SystemExit, match=told):
            main([str(path)])
