"""Validate configs from untrusted files: they may hold only plain values and the names of harmless classes.

An attacker may have written the file. The objects named in the file are imported, built or opened only after
:func:`check_config` has validated the whole config. A fixed table maps the allowed names to classes.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torchrl_lightning._core import file_limits
from torchrl_lightning._hydra.paths import CONF_DIR

MODULES = ("ale_py", "gymnasium_robotics", "minigrid")  # modules of our presets; an environment's id may import them
DEPTH, NODES, LENGTH, LARGEST = 32, 20_000, 4096, 1 << 63  # limits of a config; our configs need a tenth of them

# Classes of other packages that are built from plain values. They use no files, connections or callables.
_EXTERNAL_CLASSES = {
    "torch.optim": """
        ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD SparseAdam
    """,
    "torch.nn": """
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d
        AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss
        BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d
        CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d
        ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss Dropout Dropout1d Dropout2d Dropout3d ELU
        Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU
        GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss
        Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell
        LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d
        LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear
        LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d MaxPool2d
        MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish ModuleDict ModuleList MultiLabelMarginLoss
        MultiLabelSoftMarginLoss MultiMarginLoss MultiheadAttention NLLLoss PReLU PairwiseDistance PixelShuffle
        PixelUnshuffle PoissonNLLLoss RMSNorm RNN RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d
        ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU Sigmoid SmoothL1Loss
        SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold
        TripletMarginLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d
        ZeroPad3d
    """,
    "gymnasium.wrappers": """
        AddRenderObservation AddWhiteNoise AtariPreprocessing Autoreset ClipAction ClipReward DelayObservation
        DiscretizeAction DiscretizeObservation DtypeObservation FilterObservation FlattenObservation
        FrameStackObservation GrayscaleObservation MaxAndSkipObservation NormalizeObservation NormalizeReward
        ObstructView OrderEnforcing PassiveEnvChecker RenderCollection RepeatAction RescaleAction RescaleObservation
        ReshapeObservation ResizeObservation StickyAction TimeAwareObservation TimeLimit
    """,
    "minigrid.wrappers": """
        ActionBonus DictObservationSpaceWrapper DirectionObsWrapper FlatObsWrapper FullyObsWrapper ImgObsWrapper NoDeath
        OneHotPartialObsWrapper PositionBonus RGBImgObsWrapper RGBImgPartialObsWrapper ReseedWrapper
        StochasticActionWrapper SymbolicObsWrapper ViewSizeWrapper
    """,
    "torchrl.objectives": """
        BCLoss CQLLoss CrossQLoss DiscreteCQLLoss DiscreteIQLLoss DiscreteSACLoss DQNLoss DistributionalDQNLoss
        HardUpdate IQLLoss REDQLoss SACLoss SoftUpdate TD3BCLoss TD3Loss TQCLoss
    """,
    "torchrl.envs": """
        ActionMask BinarizeReward CatFrames CatTensors CenterCrop ClipTransform Crop DMControlEnv DTypeCastTransform
        DiscreteActionProjection DoubleToFloat EndOfLifeTransform ExcludeTransform FlattenObservation GrayScale GymEnv
        NoopResetEnv ObservationNorm PermuteTransform RenameTransform Resize RewardClipping RewardScaling RewardSum
        SelectTransform SignTransform SqueezeTransform StepCounter TimeMaxPool ToTensorImage UnsqueezeTransform
    """,
}
# A file may name our classes with these bases: learners, planners, fits, transforms, streams, wrappers, buffers and
# parts of buffers. All other allowed classes derive from :class:`ConfigSafe`.
_ALLOWED_BASES = (
    "torch.nn.Module",
    "lightning.LightningDataModule",
    "gymnasium.Wrapper",
    "torchrl.data.ReplayBuffer",
    "torchrl.data.replay_buffers.Storage",
    "torchrl.data.replay_buffers.Sampler",
    "torchrl.data.replay_buffers.Writer",
)
_ENVIRONMENTS = ("torchrl.envs.GymEnv", "torchrl.envs.DMControlEnv")
_RECIPE = "torchrl_lightning.EnvironmentRecipe"
# Our functions that a file may name: they build networks from specs and plain values.
_BUILDERS = """
    build_action_critic build_actor build_critic build_deterministic_actor build_distributional_q_network
    build_q_network build_squashed_actor
"""
# Environments and wrappers call or import these arguments, so a file may give them only these values.
_CALLED_ARGUMENTS = {"eol_attribute": ("unwrapped.ale.lives",), "module": MODULES, "backend": ("gym", "gymnasium")}
_DIRECTIVES: dict[str, Any] = {
    "_target_": lambda value: isinstance(value, str),
    "_partial_": lambda value: isinstance(value, bool),
    "_recursive_": lambda value: isinstance(value, bool),
    "_convert_": lambda value: isinstance(value, str) and value in ("none", "partial", "object", "all"),
    "_args_": lambda value: isinstance(value, list),
}
_COLON_TEXT = re.compile(
    rf"(?:{'|'.join(MODULES)}):[\w/.-]+|(?:cpu|cuda|mps|xpu):\d+|minari:\w[\w/-]*|[\d:.]+", re.ASCII
)
# Most integers determine the amount of memory and computation. Seeds and times do not, so they may be larger.
_TIME_ARGUMENT = re.compile(r"(?!frames_per_batch).*(seed|steps|time|limit|frames).*")
_CAPACITY_ARGUMENT = re.compile(r"((max|min|mini)_)?(batch_)?(size|capacity)|frames_per_batch")
_ENVIRONMENT_PACKAGES = ("gymnasium.wrappers.", "minigrid.wrappers.", "torchrl.envs.")
_PLAIN_WORD = re.compile(r"[\w+-][\w ,.+()-]*|", re.ASCII)  # neither a path nor a module
_FOLDER_ARGUMENT = re.compile(r"(?:.*_)?(?:dir|dirpath|file|filename|folder|path|root|dataset)")


class ConfigSafe:
    """Base of parts that a file may name. They are built from plain values, and each folder is a separate argument."""


class StartsProcesses:
    """A part that a file may name only as a partial, because building it starts processes."""


def check_config(node: Any, *, where: str, trusted: bool = False, folders: bool = True) -> None:
    """Validate a config from a file before the objects named in the config are built or imported.

    The config must be data without interpolations: dicts, lists, strings, numbers, booleans and null. An untrusted
    config may name only the classes of :func:`resolve_target`, our own folders, and the modules that register the
    environments of our presets.

    Args:
        node: The config, or a part of it.
        where: The origin of the config for the message, such as ``"the config in a.ckpt"``.
        trusted: Whether the config may name any class, folder and module.
        folders: Whether to validate the folders; False if :func:`without_folders` removes them before the build.

    Raises:
        ValueError: The config is rejected; the one-line message names up to five rejected values.

    Examples:
        >>> check_config({"_target_": "os.system", "command": "true"}, where="the config in a.ckpt")
        Traceback (most recent call last):
            ...
        ValueError: the config in a.ckpt has settings that a file must not have: _target_='os.system' is none of the \
classes that a file may name
    """
    errors = _ConfigValidator(trusted, folders).errors(node)
    first_errors = [error for error, _ in zip(errors, range(5), strict=False)]
    if first_errors:
        more = "; and more" if next(errors, None) is not None else ""
        raise ValueError(f"{where} has settings that a file must not have: {'; '.join(first_errors)}{more}")


def resolve_target(name: str) -> Any:
    """Return the class or builder with this name, from this or another package; None if it is not allowed.

    Examples:
        >>> resolve_target("torchrl_lightning.GoalReward").__name__, resolve_target("os.system")
        ('GoalReward', None)
    """
    module, _, name_in_package = name.rpartition(".")
    for allowed_package in (_package_name(), *_EXTERNAL_CLASSES):
        if module != allowed_package and not module.startswith(f"{allowed_package}."):
            continue
        target = (
            _package_target(name_in_package)
            if allowed_package == _package_name()
            else _external_class(allowed_package, name_in_package)
        )
        # Also accept the defining module, as in a saved recipe; a name from the file is never imported.
        if target is not None and name in (
            f"{allowed_package}.{name_in_package}",
            f"{target.__module__}.{target.__qualname__}",
        ):
            return target
    return None


def without_folders(node: Any) -> Any:
    """Return a config without the folders and data sets that our classes read and write.

    A policy runs without these folders and data sets.

    Examples:
        >>> without_folders({"_target_": "torchrl_lightning.RingStorage", "max_size": 9, "scratch_dir": "here"})
        {'_target_': 'torchrl_lightning.RingStorage', 'max_size': 9}
    """
    if isinstance(node, list):
        return [without_folders(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    target = node.get("_target_")
    folder_arguments = _folders_of(_canonical_name(resolve_target(target))) if isinstance(target, str) else ()
    return {key: without_folders(value) for key, value in node.items() if key not in folder_arguments}


class _ConfigValidator:
    """Validator that walks once over a config and counts its values."""

    def __init__(self, trusted: bool, folders: bool) -> None:
        self.trusted, self.folders, self.remaining = trusted, folders, NODES

    def errors(self, node: Any, path: str = "", depth: int = 0, plain_words: bool = False) -> Iterator[str]:
        """Yield each error with its path; ``plain_words`` is True within the settings of an environment."""
        self.remaining -= 1
        if self.remaining == 0 or depth > DEPTH:
            yield f"it has more than {NODES} values, or more than {DEPTH} levels"
        if self.remaining <= 0 or depth > DEPTH:
            self.remaining = 0
        elif type(node) is dict:
            yield from self._mapping_errors(node, path, depth, plain_words)
        elif type(node) is list:
            for number, entry in enumerate(node):
                yield from self.errors(entry, f"{path}[{number}]", depth + 1, plain_words)
        elif type(node) is str:
            yield from self._text_errors(node, path, plain_words)
        elif type(node) is int and abs(node) >= LARGEST:
            yield f"{path or 'it'} is a number of more than 63 bits"
        elif node is not None and type(node) not in (bool, int, float):
            yield f"{path or 'it'} is a {type(node).__name__}, not a plain value"

    def _text_errors(self, text: str, path: str, plain_words: bool) -> Iterator[str]:
        if "${" in text:
            yield f"{_format_setting(path, text)} is an interpolation"
        elif len(text) > LENGTH:
            yield f"{path or 'it'} is a string of more than {LENGTH} characters"
        elif self.trusted:
            return
        elif ":" in text and not _COLON_TEXT.fullmatch(text):
            yield f"{_format_setting(path, text)} may import a module other than {', '.join(MODULES)}"
        elif plain_words and not _PLAIN_WORD.fullmatch(text):
            yield f"{_format_setting(path, text)} may be a path or a module; an environment's settings are plain words"

    def _mapping_errors(self, node: dict[Any, Any], path: str, depth: int, plain_words: bool) -> Iterator[str]:
        target = node.get("_target_")
        target_object: Any = resolve_target(target) if type(target) is str else None
        canonical = _canonical_name(target_object)
        folders = _folders_of(canonical)
        for key, value in node.items():
            if type(key) is not str and (type(key) is not int or abs(key) >= LARGEST):
                yield f"{path or 'it'} has a key that is neither a string nor a number"
                continue
            entry_path = f"{path}.{_truncated(str(key))}" if path else _truncated(str(key))
            if type(key) is str and ("${" in key or len(key) > LENGTH):
                yield f"{_truncated(entry_path)} is not a plain name"
                continue
            if type(key) is str and key.startswith("_"):
                is_valid = _DIRECTIVES.get(key)
                if is_valid is None or not is_valid(value):
                    yield f"{_format_setting(entry_path, value)} is not a directive of Hydra"
                    continue
            if key == "_target_":
                if (target_object is None and not self.trusted) or "${" in value:
                    yield f"{_format_setting(entry_path, value)} is {_rejection_reason(value)}"
                continue
            in_environment = plain_words or key == "env_kwargs" or canonical in _ENVIRONMENTS
            if not self.trusted and value is not None:
                yield from self._argument_errors(canonical, key, value, entry_path, in_environment)
            is_id = in_environment and key in ("env_name", "_args_")
            if key not in folders or self.folders:
                yield from self.errors(value, entry_path, depth + 1, in_environment and not is_id)
        if target_object is None or self.trusted:
            return
        if canonical == _RECIPE:
            yield from self._recipe_errors(node, path)
        elif (
            isinstance(target_object, type)
            and issubclass(target_object, StartsProcesses)
            and node.get("_partial_") is not True
        ):
            yield f"{path or 'it'} builds a collector, which starts processes"

    def _argument_errors(self, canonical: str, key: Any, value: Any, path: str, in_environment: bool) -> Iterator[str]:
        """Yield the errors of an argument of a class, or of a setting of an environment."""
        is_environment_setting = in_environment or canonical == _RECIPE or canonical.startswith(_ENVIRONMENT_PACKAGES)
        allowed = _CALLED_ARGUMENTS.get(key) if is_environment_setting else None
        if allowed and value not in allowed:
            yield f"{_format_setting(path, value)} is not {' or '.join(map(repr, allowed))}"
        is_read = key == "dataset" or str(key).startswith("initial_")
        is_folder = self.folders and key in _folders_of(canonical)
        if is_folder and not (is_read and type(value) is str and _is_shipped(value)):
            yield f"{_format_setting(path, value)} is a path on the disk"
        if canonical or in_environment:
            yield from _size_errors(str(key), value, path, is_environment_setting)

    def _recipe_errors(self, node: dict[Any, Any], path: str) -> Iterator[str]:
        """Yield errors: ``id`` must be an environment, and each item of ``wrappers`` must be a wrapper."""
        wrappers = node.get("wrappers")
        components: list[tuple[str, Any, tuple[str, ...]]] = [("id", node.get("id"), _ENVIRONMENTS)]
        components += [
            (f"wrappers[{number}]", wrapper, ())
            for number, wrapper in enumerate(wrappers if type(wrappers) is list else ())
        ]
        for name_in_recipe, component, allowed_targets in components:
            target_name = component.get("_target_") if type(component) is dict else None
            target: Any = resolve_target(target_name) if type(target_name) is str else None
            if target is None:  # an environment's id, a name that was already rejected, or the user's own class
                continue
            is_wrapper = _is_subclass(target, "gymnasium.Wrapper", "torchrl.envs.Transform")
            if not (_canonical_name(target) in allowed_targets if allowed_targets else is_wrapper):
                kind = "an environment" if allowed_targets else "a wrapper"
                setting = f"{path}.{name_in_recipe}" if path else name_in_recipe
                yield f"{_format_setting(setting, target_name)} does not build {kind}"


def _size_errors(key: str, value: Any, path: str, is_environment_setting: bool) -> Iterator[str]:
    """Yield an error for the first number in an argument that is larger than the argument's limit."""
    if _TIME_ARGUMENT.fullmatch(key):
        return
    is_capacity = not is_environment_setting and _CAPACITY_ARGUMENT.fullmatch(key)
    limit = file_limits.LENGTH if is_environment_setting else file_limits.COUNT if is_capacity else file_limits.WIDTH
    remaining = [value]
    for number in remaining:
        if type(number) is list:
            remaining += number
        if len(remaining) > file_limits.LENGTH:
            yield f"{path} has more than {file_limits.LENGTH} numbers"
            return
        if type(number) is list:
            continue
        if abs(number if type(number) is int or (type(number) is float and is_capacity) else 0) > limit:
            yield f"{path}={number} is more than {limit}"
            return


def _is_shipped(folder: str) -> bool:
    """Return whether ``folder`` is the id of a Minari data set, or one of our shipped demonstrations."""
    if folder.startswith("minari:"):
        return _COLON_TEXT.fullmatch(folder) is not None
    return Path(os.path.normpath(folder)).is_relative_to(CONF_DIR / "demonstrations")


def _rejection_reason(name: str) -> str:
    module, _, class_name = name.rpartition(".")
    if class_name in _EXTERNAL_CLASSES.get(module, "").split():
        return f"not in the installed version of {module.partition('.')[0]}"
    return "none of the classes that a file may name"


def _format_setting(path: str, value: Any) -> str:
    text = _truncated(repr(value)) if isinstance(value, bool | float | str | None) else f"a {type(value).__name__}"
    return f"{_truncated(path)}={text}" if path else text


def _truncated(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _package_name() -> str:
    return __name__.partition(".")[0]


def _canonical_name(target: Any) -> str:
    """Return the canonical name of an allowed class or builder; "" for None."""
    if target is None:
        return ""
    name: str = target.__name__
    package = next(
        (external for external in _EXTERNAL_CLASSES if _external_class(external, name) is target), _package_name()
    )
    return f"{package}.{name}"


@cache
def _external_class(package: str, name: str) -> type[Any] | None:
    """Return an allowed class of another package; None if it is not allowed or not installed."""
    if name not in _EXTERNAL_CLASSES[package].split():
        return None
    try:
        target = getattr(import_module(package), name, None)
    except ModuleNotFoundError:  # an optional dependency
        return None
    return target if isinstance(target, type) else None


@cache
def _package_target(name: str) -> Any:
    """Return our builder or class with this name, or None if files must not name it. A class needs an allowed base."""
    package = sys.modules[_package_name()]
    target = getattr(package, name) if name in package.__all__ else None
    is_named = name in _BUILDERS.split() or (
        isinstance(target, type) and issubclass(target, (ConfigSafe, StartsProcesses))
    )
    return target if is_named or _is_subclass(target, *_ALLOWED_BASES) else None


def _is_subclass(target: Any, *bases: str) -> bool:
    return isinstance(target, type) and issubclass(target, _import_classes(*bases))


@cache
def _import_classes(*names: str) -> tuple[type[Any], ...]:
    paths = (name.rpartition(".") for name in names)
    return tuple(getattr(import_module(module), name) for module, _, name in paths)


@cache
def _folders_of(canonical: str) -> frozenset[str]:
    """Return the arguments of our class that are paths, recognised by annotation or name."""
    target = resolve_target(canonical)
    if target is None or canonical.rpartition(".")[0] != _package_name():
        return frozenset()
    return frozenset(
        argument.name
        for argument in inspect.signature(target).parameters.values()
        if "Path" in str(argument.annotation) or _FOLDER_ARGUMENT.fullmatch(argument.name)
    )
