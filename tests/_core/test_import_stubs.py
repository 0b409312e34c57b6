"""After the imports, every name that was bound to a stub refers to the real module."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, new_class

import pytest
import torch
import torch._dynamo

from torchrl_lightning._core.import_stubs import DeferredCompilerCalls, StubModule, stub_modules

HEAVY = """
class Thing:
    size = 2

def made():
    return Thing()
"""
LIGHT = """
import heavy_one
import heavy_one.below
from heavy_one import Thing, made, tell

Given = Thing | None if isinstance(Thing, type) else Thing

@tell
def told():
    return 1

def fits(value):
    return isinstance(value, Thing)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "heavy_one").mkdir()
    (tmp_path / "heavy_one" / "__init__.py").write_text(HEAVY)
    (tmp_path / "heavy_one" / "below.py").write_text("value = 3")
    (tmp_path / "light_one.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield tmp_path
    assert sys.meta_path == before
    for name in ("heavy_one", "heavy_one.below", "light_one"):
        sys.modules.pop(name, None)


@pytest.fixture
def light(folder: Path) -> ModuleType:
    with stub_modules({"heavy_one": {"tell": lambda function: function}}):
        return import_module("light_one")


def heavy() -> list[str]:
    return [name for name in sys.modules if name.startswith("heavy_one")]


def test_stubs_import_nothing_before_use_and_are_removed(light: ModuleType) -> None:
    assert heavy() == []
    assert light.told() == 1
    assert not light.fits(1)
    assert heavy() == []


def test_import_after_the_context_loads_the_real_module(light: ModuleType) -> None:
    module = import_module("heavy_one.below")
    assert (module.value, type(module), type(sys.modules["heavy_one"])) == (3, ModuleType, ModuleType)


def test_lazy_attributes_resolve_to_the_real_module_on_use(light: ModuleType) -> None:
    instance = light.made()
    module = import_module("heavy_one")
    assert not isinstance(module, StubModule)
    assert type(instance) is module.Thing
    assert light.fits(instance)
    assert not light.fits(1)
    assert light.Thing.size == light.heavy_one.Thing.size == 2
    assert light.heavy_one.below.value == 3
    assert issubclass(new_class("Own", (light.Thing,)), module.Thing)


def test_module_used_within_the_context_is_imported(folder: Path) -> None:
    with stub_modules({"heavy_one": {"tell": lambda function: function}}):
        light = import_module("light_one")
        assert light.made().size == 2
        assert not isinstance(import_module("heavy_one"), StubModule)


def test_package_keeps_the_stub_of_its_module_which_is_imported_on_use(folder: Path) -> None:
    with stub_modules({"heavy_one.below": {}}):
        package = import_module("heavy_one")
        import_module("heavy_one.below")
    assert "heavy_one.below" not in sys.modules
    assert package.below.value == 3
    assert package.below is sys.modules["heavy_one.below"]


def test_missing_and_imported_modules_have_no_stub(folder: Path) -> None:
    module = import_module("heavy_one")
    with stub_modules({"heavy_one": {}, "not_there_at_all": {}}):
        assert import_module("heavy_one") is module
        with pytest.raises(ModuleNotFoundError):
            import_module("not_there_at_all")


def test_calls_of_the_compiler_are_repeated_when_it_is_imported() -> None:
    calls, compiling = DeferredCompilerCalls(), []

    @calls.disable
    def recording(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    @calls.disable()
    def idle() -> None: ...

    @calls.assume_constant_result
    def constant() -> int:
        return 2

    assert recording(torch.ones(())) == 2
    assert not hasattr(recording, "_torchdynamo_disable")
    calls.repeat_on_import()
    assert recording._torchdynamo_disable
    assert idle._torchdynamo_disable
    assert constant._dynamo_marked_constant

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return recording(x * constant())

    assert compiled(torch.ones(())) == 3
    assert compiling == [False, False]


def test_import_libraries_defers_scipy_and_compiled_kernels_need_none_of_it() -> None:
    program = """
import sys
from torchrl_lightning._core.import_stubs import import_libraries

def loaded():
    return sorted({name for name in sys.modules if name in ("scipy.linalg", "matplotlib", "torch._dynamo", "ray")})

import_libraries()
print(loaded())
from torchrl_lightning.kernels.compiled import jitted

def double(x):
    return 2 * x

jitted(double)(1.5)
print(loaded())
import scipy.linalg
print(scipy.linalg.norm([3.0, 4.0]))
import torch
import torchmetrics

class Own(torchmetrics.MeanSquaredError):
    pass

print(isinstance(Own(), torchmetrics.MeanSquaredError), isinstance(1, torchmetrics.PeakSignalNoiseRatio))
print(torchmetrics.Accuracy(task="binary")(torch.tensor([1, 0]), torch.tensor([1, 1])).item())
print(torchmetrics.functional.regression.mean_squared_error(torch.ones(2), torch.zeros(2)).item())
print(torchmetrics.retrieval.RetrievalMRR.__name__)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout.split("\n") == ["[]", "[]", "5.0", "True False", "0.5", "1.0", "RetrievalMRR", ""], (
        result.stderr
    )
