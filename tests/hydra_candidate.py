"""Run our commands with Hydra's release candidate in a separate environment, with warnings as errors.

    python tests/hydra_candidate.py [--version 1.4.0rc3]

All other packages come from the interpreter that runs the script. It needs a package index and is not a test of the
suite.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

PROJECT = Path(__file__).parents[1]
STRICT = """
import os, sys, warnings
warnings.simplefilter("error")
for each in os.environ["IGNORED"].splitlines():
    action, message, *kind = each.split(":")
    warnings.filterwarnings(action, message, {"": Warning, **vars(__import__("builtins"))}[kind[0] if kind else ""])
import hydra
assert hydra.__version__ == os.environ["CANDIDATE"], hydra.__version__
from torchrl_lightning.cli import train, evaluate
{"train": train, "evaluate": evaluate}[sys.argv.pop(1)].main()
"""
SHORT = ("data.total_frames=2048", "data.eval_episodes=2", "eval_episodes=2", "trainer.check_val_every_n_epoch=1")
RUNS = (
    ("train", *SHORT),
    ("train", "--multirun", "seed=0,1", *SHORT),
    ("train", "experiment=sac_pendulum", "data.total_frames=1100", *SHORT[1:]),
    ("train", "ckpt_path=auto", *SHORT),
    ("evaluate", "episodes=2", "ckpt_path={checkpoint}"),
)
REFUSED = "data.eval_env={_target_: shutil.rmtree, path: kept}"  # Hydra's list rejects it; ours must not overrule that


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default="1.4.0rc3")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        python = environment(folder / "venv", version)
        (folder / "kept").mkdir()
        for arguments in RUNS:
            found = {"checkpoint": str(next(folder.glob("logs/**/best.ckpt"), ""))}
            done = run(python, version, folder, *(each.format_map(Given(found)) for each in arguments))
            sys.stdout.write(f"{' '.join(arguments)}: {done.stdout.splitlines()[-1] if done.stdout else ''}\n")
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
        done = run(python, version, folder, "train", *SHORT, REFUSED)
        if not done.returncode or not (folder / "kept").is_dir():
            sys.exit(f"not refused: {REFUSED}")
        sys.stdout.write(f"refused: {done.stderr.splitlines()[-1][:200]}\n")


class Given(dict[str, str]):
    """Leaves the braces of an override unchanged."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def environment(root: Path, version: str) -> Path:
    """Make a venv with the candidate and access to the packages of this interpreter; return its Python."""
    venv.create(root, with_pip=False, symlinks=os.name != "nt")
    python = root / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", f"hydra-core=={version}"]
    subprocess.run(pip, check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(own, "of_the_interpreter.pth").write_text("\n".join(packages) + "\n")
    return python


def run(python: Path, version: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ignored = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["filterwarnings"]
    known = {
        "PYTHONPATH": str(PROJECT / "plugin"),
        "OMP_NUM_THREADS": "1",
        "CANDIDATE": version,
        "IGNORED": "\n".join(each for each in ignored if each != "error"),
    }
    command = [str(python), "-c", STRICT, *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, **known}, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    main()
