from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from torchrl_lightning import discounted_scan
from torchrl_lightning.kernels.compiled import jitted


def brute_force(x: Tensor, discount: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """Compute the definition one element at a time, with time as the first dimension."""
    y = torch.empty_like(x)
    order = range(x.shape[0])
    previous = initial
    for t in reversed(order) if reverse else order:
        previous = x[t] + discount[t] * previous
        y[t] = previous
    return y


@pytest.mark.parametrize("backend", ["numba", "torch", "auto"])
@pytest.mark.parametrize("reverse", [True, False])
@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(1, 300),
    trailing=st.sampled_from([(), (1,), (5,), (3, 1), (2, 3, 2), (130,)]),
    wide=st.booleans(),
    start=st.sampled_from(["none", "number", "tensor"]),
    seed=st.integers(0, 1000),
)
def test_scan_equals_its_definition(
    backend: str, reverse: bool, steps: int, trailing: tuple[int, ...], wide: bool, start: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, *trailing)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    discount = torch.rand(shape, generator=generator, dtype=torch.float64) if wide else 0.9
    first = torch.randn(trailing, generator=generator, dtype=torch.float64)
    initial = {"none": None, "number": 0.5, "tensor": first}[start]
    y = discounted_scan(x, discount, initial=initial, reverse=reverse, backend=backend)
    full = torch.as_tensor(discount, dtype=torch.float64).expand(shape)
    begin = torch.as_tensor(0.0 if initial is None else initial, dtype=torch.float64).expand(trailing)
    torch.testing.assert_close(y, brute_force(x, full, begin, reverse), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dimension_can_be_time(backend: str, dim: int) -> None:
    x = torch.randn(4, 21, 3)
    discount = torch.rand(4, 21, 3)
    initial = torch.randn(x.select(dim, 0).shape)
    y = discounted_scan(x, discount, initial=initial, dim=dim, backend=backend)
    expected = brute_force(x.movedim(dim, 0), discount.movedim(dim, 0), initial, True).movedim(0, dim)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("reverse", [True, False])
def test_discount_broadcasts(backend: str, reverse: bool) -> None:
    x = torch.randn(40, 3, 2)
    for discount in (torch.tensor(0.7), torch.rand(2), torch.rand(3, 1), torch.rand(40, 1, 1), torch.rand(1, 3, 2)):
        y = discounted_scan(x, discount, reverse=reverse, backend=backend)
        torch.testing.assert_close(y, brute_force(x, discount.expand_as(x), torch.zeros(3, 2), reverse))


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_views_that_are_not_contiguous(backend: str) -> None:
    x, discount = torch.randn(7, 50).t(), torch.rand(50, 14)[:, ::2]
    y = discounted_scan(x, discount, initial=torch.randn(7, 2)[:, 0], backend=backend)
    assert y.shape == (50, 7)
    copy = discounted_scan(x.contiguous(), discount.contiguous(), backend=backend)
    torch.testing.assert_close(discounted_scan(x, discount, backend=backend), copy, rtol=0, atol=0)


def test_half_precision_uses_the_torch_backend() -> None:
    y = discounted_scan(torch.ones(30, 2, dtype=torch.bfloat16), 0.5)
    assert y.dtype == torch.bfloat16
    assert y[0, 0] == 2.0


def test_scan_of_an_empty_tensor_is_empty() -> None:
    assert discounted_scan(torch.empty(0, 3), 0.5).shape == (0, 3)
    assert discounted_scan(torch.empty(4, 0), 0.5, initial=1.0).shape == (4, 0)


@pytest.mark.parametrize(("steps", "reverse"), list(product([1, 5, 19, 50], [True, False])))
def test_scan_gradients_of_all_arguments(steps: int, reverse: bool) -> None:
    def inputs(*shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, c: Tensor, y0: Tensor | None = None) -> Tensor:
        return discounted_scan(x, c, initial=y0, reverse=reverse)

    assert gradcheck(run, (inputs(steps, 2), inputs(steps, 2), inputs(2)))
    assert gradcheck(run, (inputs(steps, 2), inputs()))
    assert gradcheck(run, (inputs(steps, 1), inputs(steps, 1)))
    assert gradcheck(run, (inputs(steps, 2).detach(), inputs(steps, 1), inputs(2).detach()))
    assert gradcheck(run, (inputs(steps, 2).detach(), inputs().detach(), inputs(2)))
    assert gradgradcheck(run, (inputs(min(steps, 19), 2), inputs(min(steps, 19), 2), inputs(2)))


def test_gradient_needs_no_graph_under_no_grad() -> None:
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert not discounted_scan(x, 0.5).requires_grad
        assert discounted_scan(x, 0.5, backend="numba")[0] == 1.875


def test_scan_does_not_change_its_inputs() -> None:
    x, discount, initial = torch.randn(40, 2), torch.rand(40, 2), torch.randn(2)
    before = [tensor.clone() for tensor in (x, discount, initial)]
    for backend in ("numba", "torch"):
        discounted_scan(x, discount, initial=initial, backend=backend)
    for tensor, copy in zip((x, discount, initial), before, strict=True):
        assert torch.equal(tensor, copy)


def test_scan_is_thread_safe() -> None:
    xs = [torch.randn(200, 150) for _ in range(16)]
    expected = [discounted_scan(x, 0.9) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for y, want in zip(pool.map(lambda x: discounted_scan(x, 0.9), xs * 4), expected * 4, strict=True):
            assert torch.equal(y, want)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"x": torch.ones(3, dtype=torch.long)}, TypeError, r"torch\.int64.*x\.float\(\)"),
        ({"x": [1.0, 2.0]}, TypeError, "list"),
        ({"x": torch.tensor(1.0)}, ValueError, "scalar"),
        ({"dim": 2}, ValueError, r"dim .*\(4, 3\)"),
        ({"backend": "cuda"}, ValueError, "'auto', 'numba' or 'torch', got 'cuda'"),
        ({"discount": torch.rand(4)}, ValueError, r"discount has shape \(4,\).*\(4, 3\)"),
        ({"discount": torch.rand(4, 3).double()}, TypeError, "discount has torch.float64, x has torch.float32"),
        ({"initial": torch.rand(4)}, ValueError, r"initial has shape \(4,\).*\(3,\)"),
        ({"discount": torch.rand(4, 3, device="meta")}, ValueError, "discount is on meta"),
        ({"x": torch.ones(4, 3, requires_grad=True), "backend": "numba"}, ValueError, "backend='torch'"),
        ({"x": torch.ones(4, 3).half(), "backend": "numba"}, ValueError, "torch.float16"),
    ],
)
def test_scan_rejects_bad_input(kwargs: dict[str, object], error: type[Exception], match: str) -> None:
    arguments = {"x": torch.ones(4, 3), "discount": 0.5, **kwargs}
    with pytest.raises(error, match=match):
        discounted_scan(arguments.pop("x"), arguments.pop("discount"), **arguments)


def test_numba_is_imported_only_when_needed() -> None:
    code = (
        "import sys, torch; from torchrl_lightning import discounted_scan, gae;"
        "discounted_scan(torch.ones(3), 0.5, backend='torch'); assert 'numba' not in sys.modules;"
        "discounted_scan(torch.ones(3), 0.5); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_kernels_work_without_a_writable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    original = numba.njit

    def no_folder(function: object, **options: object) -> object:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return original(function, **options)

    monkeypatch.setattr(numba, "njit", no_folder)

    def double(x: float) -> float:
        return 2.0 * x

    assert jitted(double)(2.0) == 4.0
