"""Look up the extra that installs a missing package of an environment."""

from __future__ import annotations

# A word in the message about a missing package, and the extra that installs the package.
_EXTRAS = {
    "Box2D": "box2d",
    "MuJoCo": "mujoco",
    "imageio": "mujoco",
    "gymnasium_robotics": "robotics",
    "minigrid": "minigrid",
    "ale_py": "atari",
    "opencv": "atari",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
}
# Prefix of environment names, the module that registers them, and the extra that installs it.
_REGISTERING_MODULES = {
    "ALE/": ("ale_py", "atari"),
    "MiniGrid-": ("minigrid", "minigrid"),
    "BabyAI-": ("minigrid", "minigrid"),
    **dict.fromkeys(
        ("Fetch", "HandReach", "HandManipulate", "AntMaze", "PointMaze", "AdroitHand", "FrankaKitchen"),
        ("gymnasium_robotics", "robotics"),
    ),
}


def install_hint(error: BaseException) -> str:
    """Return a space and a sentence that names the extra for a missing package; ``""`` if the extra is unknown.

    Examples:
        >>> install_hint(ModuleNotFoundError("No module named 'minigrid'"))
        " Install the extra 'minigrid': pip install 'torchrl-lightning[minigrid]'."
    """
    extra = next((extra for package, extra in _EXTRAS.items() if package in str(error)), None)
    return "" if extra is None else f" Install the extra {extra!r}: pip install 'torchrl-lightning[{extra}]'."


def registration_hint(name: str) -> str | None:
    """Return a sentence with the module that registers an environment and its extra; None if the module is unknown.

    Examples:
        >>> registration_hint("ALE/Pong-v5")
        "Use the id 'ale_py:ALE/Pong-v5', and install the extra 'atari': pip install 'torchrl-lightning[atari]'."
    """
    entry = next((entry for prefix, entry in _REGISTERING_MODULES.items() if name.startswith(prefix)), None)
    if entry is None:
        return None
    module, extra = entry
    return f"Use the id '{module}:{name}', and install the extra {extra!r}: pip install 'torchrl-lightning[{extra}]'."
