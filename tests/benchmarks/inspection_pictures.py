"""Pictures of inspection pages: train a short run, write the page of its buffer, and photograph it with Chromium."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.run_logs import TRAIN, ResultsError, command

INSPECT = "from torchrl_lightning.cli.inspect import main; main()"


@dataclass(frozen=True)
class Page:
    """The page of a run: arguments of the command, height in pixels, and the text before the episode to unfold."""

    arguments: tuple[str, ...]
    height: int
    unfold: str

    def source(self) -> bytes:
        """Return the settings of the picture."""
        return repr(self).encode()

    def draw(self, output: Path) -> None:
        """Train, inspect and photograph; raise ResultsError without Chromium."""
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        if chromium is None:
            raise ResultsError(f"{output.name} needs Chromium. Install it, or name other pictures.")
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            command(TRAIN, *self.arguments, "callbacks=inspect", "seed=0", f"hydra.run.dir={run}")
            page = run / "inspect.html"
            page.write_text(unfolded(page.read_text(), self.unfold))
            browser = [chromium, "--headless", "--no-sandbox", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
            browser += [f"--user-data-dir={folder}/profile", f"--window-size=640,{self.height}"]
            subprocess.run([*browser, f"--screenshot={output}", page.as_uri()], check=True, capture_output=True)


def unfolded(html: str, text: str) -> str:
    """Return a page whose first episode with a text in its caption is unfolded."""
    before, caption, after = html.partition(f"<summary>{text}")
    if not caption:
        raise ResultsError(f"unfold must be the begin of an episode's caption, got {text!r}.")
    return before.removesuffix("<details>") + "<details open>" + caption + after


LANDER = ("experiment=dqn_prioritized_lunarlander", "data.total_frames=12000")
PONG = ("experiment=dqn_pong", "data.num_envs=2", "data.warmup_frames=2000", "data.total_frames=3000")
PONG += ("data.updates_per_epoch=125", "data.eval_episodes=1", "data.eval_num_envs=1")
CORRIDOR = ("experiment=ppod_minigrid_keycorridor", "data.total_frames=102400")
PAGES = {
    "inspect.png": Page(LANDER, 1560, "running"),
    "inspect_pong.png": Page(PONG, 1700, "terminated"),
    "inspect_keycorridor.png": Page(CORRIDOR, 1900, "running"),
}
