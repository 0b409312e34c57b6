"""Settings as fields: written once, inherited, checked before anything is built, and shown."""

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
    Count,
    Fraction,
    Positive,
    Settings,
    choices,
    computed,
    default_factory,
    setting,
)


class Rated(Settings, nn.Module):
    learning_rate: Positive = 3e-4
    most: Count | None = None

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
    size: Count = setting(kw_only=False)


def test_settings_are_inherited_and_the_own_ones_come_first():
    shown = inspect.signature(Part).parameters
    assert list(shown) == ["network", "names", "kind", "double", "learning_rate", "most"]
    assert [each.kind for each in shown.values()] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] + 5 * [
        inspect.Parameter.KEYWORD_ONLY
    ]
    assert (shown["learning_rate"].default, inspect.signature(Rated).parameters["learning_rate"].default) == (
        1e-3,
        3e-4,
    )
    assert inspect.signature(Part.__init__).parameters["most"] == shown["most"]
    assert typing.get_type_hints(Part.__init__)["learning_rate"] is float  # for readers that know no checks


def test_what_is_given_is_kept_beside_the_defaults():
    layer = nn.Linear(1, 1)
    part, other = Part(layer, double=False, most=3), Part()
    assert part.network is layer
    assert list(part.state_dict()) == ["weight", "network.weight", "network.bias"]
    assert (part.kind, part.double_q, part.most, part.learning_rate, part.began) == ("a", False, 3, 1e-3, True)
    assert (other.network, other.names, other.double_q, other.most) == (None, [], True, None)
    assert other.names is not part.names
    assert part.double().weight.dtype.itemsize == 8  # the module's own method of this name


@pytest.mark.parametrize(
    ("cls", "given", "error", "says"),
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
def test_what_makes_no_sense_is_refused_by_name(cls, given, error, says):
    with pytest.raises(error, match=says):
        cls(**given)


def test_check_may_turn_a_value_into_what_is_kept():
    class Listed(Settings):
        sizes: Annotated[list[int], lambda value, name: list(value)] = setting(default=(1, 2))

    assert Listed().sizes == [1, 2]
    assert Listed(sizes=(3,)).sizes == [3]


def test_nothing_begins_before_all_settings_are_right():
    begun = []

    class Base:
        def __init__(self) -> None:
            begun.append(self)

    class Late(Settings, Base):
        first: Count = 1
        last: Count = 1

    with pytest.raises(ValueError, match="last"):
        Late(last=0)
    assert begun == []
    late = Late()
    assert begun == [late]


def test_subclass_may_have_a_constructor_of_its_own():
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


def test_two_lines_of_settings_meet():
    class Other(Settings):
        patience: Count = 5

    class Both(Other, Rated):
        most: Count | None = 9

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


def test_none_stands_for_what_is_made_anew():
    assert Layered().layers == Layered(None).layers == [8]
    assert Layered().layers is not Layered().layers
    assert Layered([2]).layers == [2]
    assert Layered.__init__.__annotations__["layers"] == list[int] | None


def test_setting_that_a_subclass_derives_is_none_of_its_own_any_more():
    assert list(inspect.signature(Fixed).parameters) == ["layers"]
    with pytest.raises(TypeError, match="rate"):
        Fixed(rate=1.0)


class Sized:
    def __init__(self, size: int, unit: str = "row") -> None:
        self.text = f"{size} {unit}"


class Held(Settings, Sized):
    size: InitVar[Count] = setting(kw_only=False)
    unit: InitVar[str] = "step"
    rate: Positive = setting(default=1.0, kw_only=False)


class Ranked(Held):
    rank: Count = setting(default=1, kw_only=False)
    rate: Positive = setting(default=2.0, kw_only=False)


class Doubled(Held):
    def _init_bases(self, *, size, unit):
        super()._init_bases(size=2 * size, unit=unit)


def test_class_translates_the_arguments_of_its_base():
    assert str(inspect.signature(Doubled)) == str(inspect.signature(Held))
    assert Doubled(3).text == "6 step"


def test_init_variables_go_to_the_constructor_of_the_other_bases():
    assert str(inspect.signature(Held)) == "(size: 'Count', rate: 'Positive' = 1.0, *, unit: 'str' = 'step')"
    assert Held(3).text == "3 step"
    assert vars(Held(3, unit="cell")) == {"text": "3 cell", "rate": 1.0}
    with pytest.raises(ValueError, match=r"size.*0"):
        Held(0)


def test_settings_by_place_come_after_those_of_the_bases_unless_declared_again():
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


def test_private_setting_stands_behind_a_property_with_the_argument_s_name():
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
    "compile": "compiled",  # likewise
    "buffer": "make_buffer",  # ``buffer`` is the one that was built
    "source": "make_source",  # likewise
    "collector": "make_collector",  # likewise
    "policy": "acting",  # ``policy`` is a property of each agent
    "lam": "gae_lambda",  # another documented name of one setting
}


def test_argument_keeps_its_name_inside_the_class():
    exported = [getattr(torchrl_lightning, name) for name in torchrl_lightning.__all__]
    classes = [each for each in exported if isinstance(each, type) and issubclass(each, Settings)]
    assert len(classes) > 30
    for cls in classes:
        for name, each in cls.settings_of_class.items():
            assert each.attribute.removeprefix("_") in ("", name, OTHER_NAMES.get(name)), cls
