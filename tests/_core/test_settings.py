"""Settings are class fields that are inherited, validated before a build, and printed."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from dataclasses import InitVar
from typing import Annotated

import pytest
from torch import Tensor, nn, tensor

import torchrl_lightning
from torchrl_lightning._core.settings import (
    Fraction,
    Positive,
    PositiveInt,
    Settings,
    choices,
    computed,
    default_factory,
    setting,
)


class Rated(Settings, nn.Module):
    learning_rate: Positive = 3e-4
    most: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = True


class Part(Rated):
    network: nn.Module | None = setting(default=None, kw_only=False)
    names: Annotated[list[str], default_factory(list)] = setting(default=None)
    kind: Annotated[str, choices("a", "b")] = "a"
    double_q: bool = setting(default=True, alias="double")
    learning_rate: Positive = 1e-3
    weight: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("weight", tensor(1.0))


class Needing(Settings):
    size: PositiveInt = setting(kw_only=False)


def test_settings_are_inherited_after_own_settings():
    parameters = inspect.signature(Part).parameters
    assert list(parameters) == ["network", "names", "kind", "double", "learning_rate", "most"]
    assert [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] + 5 * [
        inspect.Parameter.KEYWORD_ONLY
    ]
    assert (parameters["learning_rate"].default, inspect.signature(Rated).parameters["learning_rate"].default) == (
        1e-3,
        3e-4,
    )
    assert inspect.signature(Part.__init__).parameters["most"] == parameters["most"]
    assert typing.get_type_hints(Part.__init__)["learning_rate"] is float  # for tools that ignore validators


def test_arguments_and_defaults_are_stored():
    layer = nn.Linear(1, 1)
    part, other = Part(layer, double=False, most=3), Part()
    assert part.network is layer
    assert list(part.state_dict()) == ["weight", "network.weight", "network.bias"]
    assert (part.kind, part.double_q, part.most, part.learning_rate, part.began) == ("a", False, 3, 1e-3, True)
    assert (other.network, other.names, other.double_q, other.most) == (None, [], True, None)
    assert other.names is not part.names
    assert part.double().weight.dtype.itemsize == 8  # the method of the module, not the setting


@pytest.mark.parametrize(
    ("cls", "arguments", "error", "message"),
    [
        pytest.param(Part, {"learning_rate": 0}, ValueError, "learning_rate must be above 0, got 0", id="range"),
        pytest.param(Part, {"most": 0}, ValueError, "most must be a positive integer, got 0", id="optional"),
        pytest.param(Part, {"kind": "c"}, ValueError, "kind must be one of 'a', 'b', got 'c'", id="choice"),
        pytest.param(Part, {"lr": 1}, TypeError, "Part has no setting 'lr'; known are double, kind, learn", id="name"),
        pytest.param(Part, {"double_q": True}, TypeError, "'double_q'", id="attribute"),
        pytest.param(Part, {"weight": 1}, TypeError, "'weight'", id="derived"),
        pytest.param(Needing, {}, TypeError, "Needing: missing a required argument: 'size'", id="required"),
    ],
)
def test_invalid_setting_raises_with_its_name(cls, arguments, error, message):
    with pytest.raises(error, match=message):
        cls(**arguments)


def test_check_may_convert_the_stored_value():
    class Listed(Settings):
        sizes: Annotated[list[int], lambda value, name: list(value)] = setting(default=(1, 2))

    assert Listed().sizes == [1, 2]
    assert Listed(sizes=(3,)).sizes == [3]


def test_all_settings_are_checked_before_construction():
    begun = []

    class Base:
        def __init__(self) -> None:
            begun.append(self)

    class Late(Settings, Base):
        first: PositiveInt = 1
        last: PositiveInt = 1

    with pytest.raises(ValueError, match="last"):
        Late(last=0)
    assert begun == []
    late = Late()
    assert begun == [late]


def test_subclass_may_define_its_own_constructor():
    class Own(Part):
        bonus: float = 0.5

        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(width, width), double=False)

    class Further(Own):
        pass

    for cls in (Own, Further):
        assert list(inspect.signature(cls).parameters) == ["width"]
        part = cls(2)
        assert (part.network.in_features, part.double_q, part.bonus, part.began) == (2, False, 0.5, True)


def test_settings_of_two_bases_are_combined():
    class Other(Settings):
        patience: PositiveInt = 5

    class Both(Other, Rated):
        most: PositiveInt | None = 9

    both = Both(patience=2)
    assert (both.patience, both.most, both.learning_rate, both.began) == (2, 9, 3e-4, True)


@pytest.mark.parametrize(
    "renewed", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))], ids=["copy", "pickle"]
)
def test_copies_have_the_same_settings(renewed):
    part = renewed(Part(nn.Linear(1, 1), kind="b"))
    assert (part.kind, part.double_q, part.network.in_features, float(part.weight)) == ("b", True, 1, 1.0)


class Layered(Settings):
    layers: Annotated[list[int], default_factory(lambda: [8])] = setting(default=None, kw_only=False)
    rate: Positive = 0.1


class Fixed(Layered):
    rate: Positive = computed()


def test_none_is_replaced_by_a_new_default():
    assert Layered().layers == Layered(None).layers == [8]
    assert Layered().layers is not Layered().layers
    assert Layered([2]).layers == [2]
    assert Layered.__init__.__annotations__["layers"] == list[int] | None


def test_computed_attribute_of_a_subclass_is_no_setting():
    assert list(inspect.signature(Fixed).parameters) == ["layers"]
    with pytest.raises(TypeError, match="rate"):
        Fixed(rate=1.0)


class Sized:
    def __init__(self, size: int, unit: str = "row") -> None:
        self.text = f"{size} {unit}"


class Held(Settings, Sized):
    size: InitVar[PositiveInt] = setting(kw_only=False)
    unit: InitVar[str] = "step"
    rate: Positive = setting(default=1.0, kw_only=False)


class Ranked(Held):
    rank: PositiveInt = setting(default=1, kw_only=False)
    rate: Positive = setting(default=2.0, kw_only=False)


class Doubled(Held):
    def _init_bases(self, *, size, unit):
        super()._init_bases(size=2 * size, unit=unit)


def test_init_bases_translates_the_arguments_of_a_base():
    assert str(inspect.signature(Doubled)) == str(inspect.signature(Held))
    assert Doubled(3).text == "6 step"


def test_init_variables_go_to_the_constructor_of_the_other_bases():
    assert str(inspect.signature(Held)) == "(size: 'PositiveInt', rate: 'Positive' = 1.0, *, unit: 'str' = 'step')"
    assert Held(3).text == "3 step"
    assert vars(Held(3, unit="cell")) == {"text": "3 cell", "rate": 1.0}
    with pytest.raises(ValueError, match=r"size.*0"):
        Held(0)


def test_positional_settings_follow_inherited_ones_unless_redeclared():
    assert list(inspect.signature(Ranked).parameters) == ["size", "rank", "rate", "unit"]
    assert (Ranked(3, 4, 5.0).rank, Ranked(3, 4, 5.0).rate) == (4, 5.0)


class Discounted(Settings):
    note: str = ""
    _cache: int = 0
    _gamma: Fraction | None = setting(default=None, alias="gamma")

    @property
    def gamma(self) -> float:
        return 0.99 if self._gamma is None else self._gamma

    @gamma.setter
    def gamma(self, gamma: float | None) -> None:
        self._gamma = gamma


def test_alias_names_the_argument_of_a_private_setting():
    assert list(inspect.signature(Discounted).parameters) == ["note", "gamma"]
    discounted = Discounted(gamma=0.5)
    assert (discounted.gamma, Discounted().gamma, discounted._cache) == (0.5, 0.99, 0)
    with pytest.raises(ValueError, match=r"^gamma.*0.*1.*2\.$"):
        discounted.gamma = 2
    assert discounted.gamma == 0.5
    with pytest.raises(TypeError, match="'_gamma'"):
        Discounted(_gamma=0.5)


OTHER_NAMES = {
    "double": "double_q",  # a method of torch's modules
    "compile": "compiled",  # a method of torch's modules
    "buffer": "make_buffer",  # ``buffer`` is the built buffer
    "source": "make_source",  # ``source`` is the built source
    "collector": "make_collector",  # ``collector`` is the built collector
    "policy": "acting",  # ``policy`` is a property of each agent
    "lam": "gae_lambda",  # a second documented name of the same setting
}


def test_argument_keeps_its_name_inside_the_class():
    exported = [getattr(torchrl_lightning, name) for name in torchrl_lightning.__all__]
    classes = [
        class_setting
        for class_setting in exported
        if isinstance(class_setting, type) and issubclass(class_setting, Settings)
    ]
    assert len(classes) > 30
    for cls in classes:
        for name, class_setting in cls.settings_of_class.items():
            assert class_setting.attribute.removeprefix("_") in ("", name, OTHER_NAMES.get(name)), cls
