"""Which extra brings the package that an environment misses."""

from __future__ import annotations

# What the message about a missing package names, and the extra that brings it.
_EXTRAS = {
    "Box2D": "box2d",
    "MuJoCo": "mujoco",
    "imageio": "mujoco",
    "gymnasium_robotics": "robotics",
    "minigrid": "minigrid",
    "ale_py": "atari",
    "opencv": "atari",
}


def extra_for(error: BaseException) -> str:
    """Return a sentence, behind a blank, that names the extra which mends an error; nothing where none does.

    Example:
        >>> extra_for(ModuleNotFoundError("No module named 'minigrid'"))
        " Here the extra 'minigrid' brings it: torchrl-lightning[minigrid]."
    """
    extra = next((extra for package, extra in _EXTRAS.items() if package in str(error)), None)
    return "" if extra is None else f" Here the extra {extra!r} brings it: torchrl-lightning[{extra}]."
