"""Validate configs from untrusted files: they may hold only plain values and the names of harmless classes.

An attacker may have written the file. Nothing that it names is imported, built or opened before :func:`check_config`
has validated all of it; a closed table maps names to classes.
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

MODULES = ("ale_py", "gymnasium_robotics", "minigrid")  # modules of our presets, which an environment's id may import
DEPTH, NODES, LENGTH, LARGEST = 32, 20_000, 4096, 1 << 63  # limits of a config; our configs need a tenth

# Classes of other packages that are built from plain values and neither read, write, connect nor take a callable.
_OTHERS = {
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
_COLLECTOR = "torchrl_lightning.collectors.base.CollectorBase"
# Bases of our classes that a file may name: learners, planners, fits, transforms; streams; wrappers; buffers and their
# parts. Allowed classes without one of these bases derive from :class:`ConfigSafe`.
_KINDS = (
    "torch.nn.Module",
    "lightning.LightningDataModule",
    "gymnasium.Wrapper",
    "torchrl.data.ReplayBuffer",
    "torchrl.data.replay_buffers.Storage",
    "torchrl.data.replay_buffers.Sampler",
    "torchrl.data.replay_buffers.Writer",
    _COLLECTOR,
)
_ENVIRONMENTS = ("torchrl.envs.GymEnv", "torchrl.envs.DMControlEnv")
_RECIPE = "torchrl_lightning.EnvironmentRecipe"
# Our functions that a file may name: they build networks from specs and plain values.
_BUILDERS = """
    build_action_critic build_actor build_critic build_deterministic_actor build_distributional_q_network
    build_q_network build_squashed_actor
"""
# Arguments of environments and wrappers that are called or imported, and the only values that a file may give them.
_CALLED = {"eol_attribute": ("unwrapped.ale.lives",), "module": MODULES, "backend": ("gym", "gymnasium")}
_DIRECTIVES: dict[str, Any] = {
    "_target_": lambda value: isinstance(value, str),
    "_partial_": lambda value: isinstance(value, bool),
    "_recursive_": lambda value: isinstance(value, bool),
    "_convert_": lambda value: isinstance(value, str) and value in ("none", "partial", "object", "all"),
    "_args_": lambda value: isinstance(value, list),
}
_WITH_COLON = re.compile(
    rf"(?:{'|'.join(MODULES)}):[\w/.-]+|(?:cpu|cuda|mps|xpu):\d+|minari:\w[\w/-]*|[\d:.]+", re.ASCII
)
# Integers decide how much is built and computed, except seeds and times, which may therefore be larger.
_TIMES = re.compile(r"(?!frames_per_batch).*(seed|steps|time|limit|frames).*")
_CELLS = re.compile(r"((max|min|mini)_)?(batch_)?(size|capacity)|frames_per_batch")
_AROUND = ("gymnasium.wrappers.", "minigrid.wrappers.", "torchrl.envs.")
_WORD = re.compile(r"[\w+-][\w ,.+()-]*|", re.ASCII)  # neither a path nor a module
_FOLDER = re.compile(r"(?:.*_)?(?:dir|dirpath|file|filename|folder|path|root|dataset)")


class ConfigSafe:
    """A part that a file may name: it is built from plain values, and each folder must be an argument of its own."""


def check_config(node: Any, *, where: str, trusted: bool = False, folders: bool = True) -> None:
    """Validate a config from a file before anything that it names is built or imported.

    It must be data: dicts, lists, strings, numbers, booleans and null, without interpolations. An untrusted config may
    name only the classes of :func:`resolve_target`, only our own folders, and only the modules that register the
    environments of our presets.

    Args:
        node: The config, or a part of it.
        where: Its origin, for the message, such as ``"the config in a.ckpt"``.
        trusted: Whether it may name any class, folder and module.
        folders: Whether to validate its folders; False if :func:`without_folders` removes them before the build.

    Raises:
        ValueError: The config is rejected; the one-line message names up to five rejected values.

    Examples:
        >>> check_config({"_target_": "os.system", "command": "true"}, where="the config in a.ckpt")
        Traceback (most recent call last):
            ...
        ValueError: the config in a.ckpt says what a file may not: _target_='os.system' is none of the classes that a \
file may name
    """
    found = _ConfigValidator(trusted, folders).refusals(node)
    first = [refusal for refusal, _ in zip(found, range(5), strict=False)]
    if first:
        more = "; and more" if next(found, None) is not None else ""
        raise ValueError(f"{where} says what a file may not: {'; '.join(first)}{more}")


def resolve_target(name: str) -> Any:
    """Return the allowed class or builder with this name, ours or another package's, or None.

    Examples:
        >>> resolve_target("torchrl_lightning.GoalReward").__name__, resolve_target("os.system")
        ('GoalReward', None)
    """
    package, _, last = name.rpartition(".")
    for known in (_package(), *_OTHERS):
        if package != known and not package.startswith(f"{known}."):
            continue
        target = _ours(last) if known == _package() else _of_others(known, last)
        # Also accept the defining module, as in a saved recipe; a name from the file is never imported.
        if target is not None and name in (f"{known}.{last}", f"{target.__module__}.{target.__qualname__}"):
            return target
    return None


def without_folders(node: Any) -> Any:
    """Return a config without the folders and data sets that our classes read and write.

    Playing a policy does not need them.

    Examples:
        >>> without_folders({"_target_": "torchrl_lightning.RingStorage", "max_size": 9, "scratch_dir": "here"})
        {'_target_': 'torchrl_lightning.RingStorage', 'max_size': 9}
    """
    if isinstance(node, list):
        return [without_folders(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    target = node.get("_target_")
    left_out = _folders_of(_canonical(resolve_target(target))) if isinstance(target, str) else ()
    return {key: without_folders(value) for key, value in node.items() if key not in left_out}


class _ConfigValidator:
    """Validator that walks once over a config and counts its values."""

    def __init__(self, trusted: bool, folders: bool) -> None:
        self.trusted, self.folders, self.left = trusted, folders, NODES

    def refusals(self, node: Any, path: str = "", depth: int = 0, words: bool = False) -> Iterator[str]:
        """Yield each error with its place; ``words`` is True within the settings of an environment."""
        self.left -= 1
        if self.left == 0 or depth > DEPTH:
            yield f"it has more than {NODES} values, or more than {DEPTH} levels"
        if self.left <= 0 or depth > DEPTH:
            self.left = 0
        elif type(node) is dict:
            yield from self._mapping(node, path, depth, words)
        elif type(node) is list:
            for number, entry in enumerate(node):
                yield from self.refusals(entry, f"{path}[{number}]", depth + 1, words)
        elif type(node) is str:
            yield from self._text(node, path, words)
        elif type(node) is int and abs(node) >= LARGEST:
            yield f"{path or 'it'} is a number of more than 63 bits"
        elif node is not None and type(node) not in (bool, int, float):
            yield f"{path or 'it'} is a {type(node).__name__}, no plain value"

    def _text(self, text: str, path: str, words: bool) -> Iterator[str]:
        if "${" in text:
            yield f"{_shown(path, text)} is an interpolation"
        elif len(text) > LENGTH:
            yield f"{path or 'it'} is a text of more than {LENGTH} characters"
        elif self.trusted:
            return
        elif ":" in text and not _WITH_COLON.fullmatch(text):
            yield f"{_shown(path, text)} may import a module other than {', '.join(MODULES)}"
        elif words and not _WORD.fullmatch(text):
            yield f"{_shown(path, text)} may be a path or a module; an environment's settings are plain words"

    def _mapping(self, node: dict[Any, Any], path: str, depth: int, words: bool) -> Iterator[str]:
        target = node.get("_target_")
        named: Any = resolve_target(target) if type(target) is str else None
        canonical = _canonical(named)
        folders = _folders_of(canonical)
        for key, value in node.items():
            if type(key) is not str and (type(key) is not int or abs(key) >= LARGEST):
                yield f"{path or 'it'} has a key that is neither a text nor a number"
                continue
            place = f"{path}.{_short(str(key))}" if path else _short(str(key))
            if type(key) is str and ("${" in key or len(key) > LENGTH):
                yield f"{_short(place)} is no plain name"
                continue
            if type(key) is str and key.startswith("_"):
                allowed = _DIRECTIVES.get(key)
                if allowed is None or not allowed(value):
                    yield f"{_shown(place, value)} is no directive of Hydra's"
                    continue
            if key == "_target_":
                if (named is None and not self.trusted) or "${" in value:
                    yield f"{_shown(place, value)} is {_rejection_reason(value)}"
                continue
            below = words or key == "env_kwargs" or canonical in _ENVIRONMENTS
            if not self.trusted and value is not None:
                yield from self._argument(canonical, key, value, place, below)
            is_id = below and key in ("env_name", "_args_")
            if key not in folders or self.folders:
                yield from self.refusals(value, place, depth + 1, below and not is_id)
        if named is None or self.trusted:
            return
        if canonical == _RECIPE:
            yield from self._recipe(node, path)
        elif _is_kind(named, _COLLECTOR) and node.get("_partial_") is not True:
            yield f"{path or 'it'} builds a collector, which starts processes"

    def _argument(self, canonical: str, key: Any, value: Any, place: str, below: bool) -> Iterator[str]:
        """Yield the errors of an argument of a class, or of a setting ``below`` an environment."""
        around = below or canonical == _RECIPE or canonical.startswith(_AROUND)
        only = _CALLED.get(key) if around else None
        if only and value not in only:
            yield f"{_shown(place, value)} is not {' or '.join(map(repr, only))}"
        is_read = key == "dataset" or str(key).startswith("initial_")
        is_place = self.folders and key in _folders_of(canonical)
        if is_place and not (is_read and type(value) is str and _is_shipped(value)):
            yield f"{_shown(place, value)} is a place on the disk"
        if canonical or below:
            yield from _sizes(str(key), value, place, around)

    def _recipe(self, node: dict[Any, Any], path: str) -> Iterator[str]:
        """Yield an error if ``id`` does not build an environment, and for each of ``wrappers`` of another kind."""
        wrappers = node.get("wrappers")
        parts: list[tuple[str, Any, tuple[str, ...]]] = [("id", node.get("id"), _ENVIRONMENTS)]
        parts += [(f"wrappers[{n}]", each, ()) for n, each in enumerate(wrappers if type(wrappers) is list else ())]
        for place, part, known in parts:
            name = part.get("_target_") if type(part) is dict else None
            target: Any = resolve_target(name) if type(name) is str else None
            if target is None:  # an id, already rejected, or the user's own class
                continue
            wraps = _is_kind(target, "gymnasium.Wrapper", "torchrl.envs.Transform")
            if not (_canonical(target) in known if known else wraps):
                what = "environment" if known else "wrapper"
                yield f"{_shown(f'{path}.{place}' if path else place, name)} makes no {what}"


def _sizes(key: str, value: Any, place: str, around: bool) -> Iterator[str]:
    """Yield an error for the first number of an argument that exceeds its limit."""
    if _TIMES.fullmatch(key):
        return
    cells = not around and _CELLS.fullmatch(key)
    most = file_limits.LENGTH if around else file_limits.COUNT if cells else file_limits.WIDTH
    left = [value]
    for number in left:
        if type(number) is list:
            left += number
        if len(left) > file_limits.LENGTH:
            yield f"{place} has more than {file_limits.LENGTH} numbers"
            return
        if type(number) is list:
            continue
        if abs(number if type(number) is int or (type(number) is float and cells) else 0) > most:
            yield f"{place}={number} is more than {most}"
            return


def _is_shipped(folder: str) -> bool:
    """Return whether a data set is the id of a Minari data set, or one of our shipped demonstrations."""
    if folder.startswith("minari:"):
        return _WITH_COLON.fullmatch(folder) is not None
    return Path(os.path.normpath(folder)).is_relative_to(CONF_DIR / "demonstrations")


def _rejection_reason(name: str) -> str:
    package, _, last = name.rpartition(".")
    if last in _OTHERS.get(package, "").split():
        return f"in no {package.partition('.')[0]} that is installed here"
    return "none of the classes that a file may name"


def _shown(place: str, value: Any) -> str:
    text = _short(repr(value)) if isinstance(value, bool | float | str | None) else f"a {type(value).__name__}"
    return f"{_short(place)}={text}" if place else text


def _short(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _package() -> str:
    return __name__.partition(".")[0]


def _canonical(target: Any) -> str:
    """Return the canonical name of an allowed class or builder; "" for None."""
    if target is None:
        return ""
    name: str = target.__name__
    package = next((known for known in _OTHERS if _of_others(known, name) is target), _package())
    return f"{package}.{name}"


@cache
def _of_others(package: str, name: str) -> type[Any] | None:
    """Return an allowed class of another package; None if it is not allowed or not installed."""
    if name not in _OTHERS[package].split():
        return None
    try:
        target = getattr(import_module(package), name, None)
    except ModuleNotFoundError:  # an optional dependency
        return None
    return target if isinstance(target, type) else None


@cache
def _ours(name: str) -> Any:
    """Return a builder or class of ours that a file may name, or None; the bases decide for a class."""
    package = sys.modules[_package()]
    target = getattr(package, name) if name in package.__all__ else None
    named = name in _BUILDERS.split() or (isinstance(target, type) and issubclass(target, ConfigSafe))
    return target if named or _is_kind(target, *_KINDS) else None


def _is_kind(target: Any, *kinds: str) -> bool:
    return isinstance(target, type) and issubclass(target, _imported(*kinds))


@cache
def _imported(*names: str) -> tuple[type[Any], ...]:
    places = (name.rpartition(".") for name in names)
    return tuple(getattr(import_module(module), last) for module, _, last in places)


@cache
def _folders_of(canonical: str) -> frozenset[str]:
    """Return the arguments of a class of ours that are paths, recognised by annotation or name."""
    target = resolve_target(canonical)
    if target is None or canonical.rpartition(".")[0] != _package():
        return frozenset()
    return frozenset(
        argument.name
        for argument in inspect.signature(target).parameters.values()
        if "Path" in str(argument.annotation) or _FOLDER.fullmatch(argument.name)
    )
