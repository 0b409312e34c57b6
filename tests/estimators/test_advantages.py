from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

from kit.golden import assert_near, cases, load
from kit.rollouts import brute_gae, brute_returns
from torchrl_lightning import discount_cumsum, discounted_returns, gae, vtrace

Estimates = Callable[..., object]
Rollout = dict[str, Tensor]


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["numba", "torch"])
def graph(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the backend: inputs that need gradients use torch, all others numba."""
    return (lambda x: x) if request.param == "numba" else (lambda x: x.clone().requires_grad_())


def rollout(steps: int, *trailing: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, *trailing)
    names = ("reward", "value", "next_value", "log_pi", "log_mu")
    data = {name: torch.randn(shape, generator=generator, dtype=dtype) for name in names}
    done = torch.rand(shape, generator=generator) < 0.2
    data["terminated"] = done & (torch.rand(shape, generator=generator) < 0.5)
    data["done"] = done
    return data


def arguments(data: Rollout, *names: str) -> Iterator[Tensor]:
    return (data[name] for name in (*names, "terminated", "done"))


def run_gae(data: Rollout, gamma: float = 0.9, lmbda: float = 0.8) -> tuple[Tensor, Tensor]:
    return gae(*arguments(data, "reward", "value", "next_value"), gamma, lmbda)


def run_vtrace(data: Rollout, gamma: float = 0.9, **kwargs: float) -> tuple[Tensor, Tensor]:
    return vtrace(*arguments(data, "log_pi", "log_mu", "reward", "value", "next_value"), gamma, **kwargs)


def run_returns(data: Rollout, gamma: float = 0.9) -> tuple[Tensor]:
    return (discounted_returns(*arguments(data, "reward", "next_value"), gamma),)


ESTIMATORS = pytest.mark.parametrize("estimator", [run_gae, run_vtrace, run_returns])


def test_gae_and_returns_equal_golden_values_with_done_only(
    dtype: torch.dtype, graph: Callable[[Tensor], Tensor]
) -> None:
    for case in cases("returns_gae_done_only", dtype):
        done = case["done"].bool()
        reward, value = graph(case["reward"]), case["value"]
        gamma, lmbda = float(case["gamma"]), float(case["lmbda"])
        advantage, target = gae(reward, value[:-1], value[1:], done, done, gamma, lmbda)
        assert_near(advantage, case["gae_advantage"])
        assert_near(target, case["gae_value_target"])
        assert_near(discounted_returns(reward, value[1:], done, done, gamma), case["return"])


def test_gae_and_returns_equal_golden_values_with_truncation(
    dtype: torch.dtype, graph: Callable[[Tensor], Tensor]
) -> None:
    for case in cases("gae_terminated_truncated", dtype):
        terminated, truncated = case["terminated"].bool(), case["truncated"].bool()
        flags = (terminated, terminated | truncated, float(case["gamma"]))
        reward, value, following = graph(case["reward"]), case["value"], case["next_value"]
        advantage, target = gae(reward, value, following, *flags, float(case["lmbda"]))
        assert_near(advantage, case["advantage"])
        assert_near(target, case["value_target"])
        assert_near(discounted_returns(reward, following, *flags), case["return"])


def test_vtrace_equals_golden_values(dtype: torch.dtype, graph: Callable[[Tensor], Tensor]) -> None:
    for case in cases("vtrace", dtype):
        gamma, rho, c, pg_rho, lmbda = case["hyper_gamma_rho_c_pgrho_lambda"].tolist()
        if dtype == torch.float32:  # the recorded thresholds are rounded to float32
            gamma, rho, c, pg_rho, lmbda = (round(number, 6) for number in (gamma, rho, c, pg_rho, lmbda))
        data = {**case, "terminated": case["terminated"].bool(), "reward": graph(case["reward"])}
        data["done"] = data["terminated"] | case["truncated"].bool()
        advantage, target = run_vtrace(data, gamma, lmbda=lmbda, rho_clip=rho, c_clip=c, pg_rho_clip=pg_rho)
        assert_near(advantage, case["pg_advantage"])
        assert_near(target, case["vs"])


def test_vtrace_does_not_bootstrap_across_the_end_of_an_episode(graph: Callable[[Tensor], Tensor]) -> None:
    case = load("vtrace_pytorchrl_bug")
    done = case["done"].bool()
    value = graph(case["value"])
    log_pi, log_mu, reward = case["log_pi"], case["log_mu"], case["reward"]
    advantage, target = vtrace(log_pi, log_mu, reward, value[:-1], value[1:], done, done, float(case["gamma"]))
    assert_near(target, case["vs_textbook"])
    assert_near(advantage, case["adv_textbook"])


@settings(deadline=None, max_examples=50)
@given(
    steps=st.integers(1, 40),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lmbda=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_estimates_equal_scalar_loops(steps: int, gamma: float, lmbda: float, seed: int) -> None:
    data = rollout(steps, seed=seed)
    advantage = brute_gae(*arguments(data, "reward", "value", "next_value"), gamma, lmbda)
    returns = brute_returns(*arguments(data, "reward", "next_value"), gamma)
    for tensors in (data, {**data, "reward": data["reward"].clone().requires_grad_()}):
        estimate, target = run_gae(tensors, gamma, lmbda)
        torch.testing.assert_close(estimate, advantage, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target, estimate + data["value"], rtol=0, atol=1e-12)
        torch.testing.assert_close(run_returns(tensors, gamma)[0], returns, rtol=1e-5, atol=1e-5)


@ESTIMATORS
@pytest.mark.parametrize("gamma", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (30,), (30, 1), (30, 3), (30, 3, 1), (20, 2, 3, 2), (5, 300)])
def test_backends_agree_in_every_shape(estimator: Estimates, gamma: float, shape: tuple[int, ...]) -> None:
    data = rollout(*shape)
    if shape == (5, 300):
        data["reward"][:, 200:] *= 3  # beyond the first tile
    numba = estimator(data, gamma)
    torch_path = estimator({**data, "reward": data["reward"].clone().requires_grad_()}, gamma)
    for fast, slow in zip(numba, torch_path, strict=True):
        assert fast.shape == shape
        assert fast.is_contiguous()
        torch.testing.assert_close(fast, slow.detach(), rtol=1e-12, atol=1e-12)


@ESTIMATORS
def test_estimates_accept_views_of_environment_major_data(estimator: Estimates) -> None:
    data = rollout(12, 5, 1, dtype=torch.float32)
    views = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in data.items()}
    assert not views["reward"].is_contiguous()
    for from_view, from_copy in zip(estimator(views), estimator(data), strict=True):
        assert torch.equal(from_view, from_copy)
    sliced = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in data.items()}
    for from_view, from_copy in zip(estimator(sliced), estimator(data), strict=True):
        assert torch.equal(from_view, from_copy)


@ESTIMATORS
def test_gradients_flow_through_the_torch_path(estimator: Estimates) -> None:
    data = rollout(6, 2)
    names = ["reward", "value", "next_value"] if estimator is run_gae else ["reward", "next_value"]
    leaves = [data[name].clone().requires_grad_() for name in names]
    run = lambda *tensors: estimator({**data, **dict(zip(names, tensors, strict=True))})  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves)


@ESTIMATORS
def test_terminated_step_counts_as_done(estimator: Estimates) -> None:
    data = rollout(30, 3)
    careless = {**data, "done": data["done"] & ~data["terminated"]}
    assert not torch.equal(careless["done"], data["done"])
    for graph in (False, True):
        careless["reward"] = data["reward"].clone().requires_grad_(graph)
        for one, other in zip(estimator(careless), estimator(data), strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(steps=st.integers(1, 30), seed=st.integers(0, 1000))
def test_estimates_equal_torchrl(steps: int, seed: int) -> None:
    data = rollout(steps, 3, 1, seed=seed)
    batch = {name: tensor.transpose(0, 1) for name, tensor in data.items()}  # TorchRL takes [N, T, 1]
    tensors = [batch[name] for name in ("value", "next_value", "reward", "done", "terminated")]
    gamma = torch.tensor(0.9, dtype=torch.float64)
    theirs = generalized_advantage_estimate(gamma, 0.8, *tensors)
    for ours, other in zip(run_gae(data, 0.9, 0.8), theirs, strict=True):
        torch.testing.assert_close(ours.transpose(0, 1), other, rtol=1e-6, atol=1e-6)
    one = torch.tensor(1.0, dtype=torch.float64)
    theirs = vtrace_advantage_estimate(gamma, batch["log_pi"], batch["log_mu"], *tensors, one, one)
    for ours, other in zip(run_vtrace(data, 0.9), theirs, strict=True):
        torch.testing.assert_close(ours.transpose(0, 1), other, rtol=1e-6, atol=1e-6)


def test_vtrace_on_policy_equals_td_lambda() -> None:
    data = rollout(40, 3)
    data["log_pi"] = data["log_mu"]
    advantage, target = run_vtrace(data, 0.9, lmbda=0.7)
    torch.testing.assert_close(target, run_gae(data, 0.9, 0.7)[1], rtol=0, atol=1e-12)
    assert not torch.equal(advantage, target - data["value"])


def test_vtrace_accepts_impossible_actions_and_infinite_clips() -> None:
    data = rollout(10, 2)
    data["log_pi"][3, 0] = -torch.inf  # the current policy would never act so
    data["log_mu"][5, 1] = -torch.inf
    advantage, target = run_vtrace(data)
    assert torch.isfinite(advantage).all()
    assert advantage[3, 0] == 0.0
    assert target[3, 0] == data["value"][3, 0]
    with pytest.raises(ValueError, match=r"log_pi - log_mu.*\[3, 0\]"):
        run_vtrace({**data, "log_mu": data["log_pi"]})
    plain = rollout(10, 2)
    free = run_vtrace(plain, rho_clip=float("inf"), c_clip=float("inf"))
    wide = run_vtrace(plain, rho_clip=1e9, c_clip=1e9)
    assert torch.equal(free[0], wide[0])


@ESTIMATORS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_infinite_input_is_rejected_with_its_index(estimator: Estimates, value: float, requires_grad: bool) -> None:
    names = ["reward", "next_value"] if estimator is run_returns else ["reward", "value", "next_value"]
    for name in names:
        for gamma in (0.0, 0.9):
            for index in [(0, 0), (17, 2), (39, 1)]:
                data = rollout(40, 3)
                data["done"][5:8] = data["terminated"][5:8] = True  # the trace ends between the element and row 0
                data[name][index] = value
                data["reward"].requires_grad_(requires_grad)
                with pytest.raises(ValueError, match=rf"{name}.*-?(nan|inf).*\[{index[0]}, {index[1]}\]"):
                    estimator(data, gamma)


@ESTIMATORS
def test_overflow_of_finite_inputs_is_accepted(estimator: Estimates) -> None:
    data = rollout(4, 2, dtype=torch.float32)
    for name in ("terminated", "done"):
        data[name] = torch.zeros(4, 2, dtype=torch.bool)
    data["reward"] = torch.full((4, 2), 3e38)
    data["log_pi"] = data["log_mu"]
    assert torch.isinf(estimator(data, 1.0)[-1][0]).all()


@ESTIMATORS
@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("terminated", lambda x: None, ValueError, "terminated is missing; .*never inferred from `done`"),
        ("done", lambda x: None, ValueError, r"done is missing; .*terminated \| truncated"),
        ("done", lambda x: x.float(), TypeError, r"done must be a bool tensor, got torch.float32; call done.bool"),
        ("terminated", lambda x: x[:-1], ValueError, r"terminated has shape \(5, 2\), but reward has \(6, 2\)"),
        ("next_value", lambda x: x[..., None], ValueError, r"next_value has shape \(6, 2, 1\)"),
        ("next_value", lambda x: x.float(), TypeError, "next_value has torch.float32, but reward has torch.float64"),
        ("next_value", lambda x: None, ValueError, "next_value is missing"),
        ("next_value", lambda x: x.tolist(), TypeError, "next_value must be a torch.Tensor, got list"),
        ("reward", lambda x: x.long(), TypeError, "reward must be floating point, got torch.int64"),
        ("reward", lambda x: x[0, 0], ValueError, "reward is a scalar"),
        ("reward", lambda x: x.to("meta"), ValueError, "is on cpu, but reward is on meta"),
    ],
)
def test_invalid_input_is_rejected(
    estimator: Estimates, name: str, change: Callable[[Tensor], object], error: type[Exception], match: str
) -> None:
    data = rollout(6, 2)
    data[name] = change(data[name])
    with pytest.raises(error, match=match):
        estimator(data)


def test_factors_out_of_range_are_rejected() -> None:
    data = rollout(6, 2)
    for estimator in (run_gae, run_vtrace, run_returns):
        with pytest.raises(ValueError, match=r"gamma.*0.*1.*1\.5"):
            estimator(data, 1.5)
        with pytest.raises(ValueError, match=r"gamma.*0.*1.*tensor\(\["):
            estimator(data, torch.rand(2))
        assert torch.equal(estimator(data, torch.tensor(0.5))[0], estimator(data, 0.5)[0])
    for estimator in (run_gae, run_vtrace):
        with pytest.raises(ValueError, match=r"lmbda.*0.*1"):
            estimator(data, 0.9, lmbda=float("nan"))
    for name in ("rho_clip", "c_clip", "pg_rho_clip"):
        with pytest.raises(ValueError, match=rf"{name}.*0"):
            run_vtrace(data, 0.9, **{name: 0.0})


@ESTIMATORS
def test_empty_rollouts_give_empty_estimates(estimator: Estimates) -> None:
    for shape in ((0, 3), (4, 0)):
        assert all(tensor.shape == shape for tensor in estimator(rollout(*shape)))


def test_estimates_are_thread_safe() -> None:
    streams = [rollout(100, 150, seed=seed, dtype=torch.float32) for seed in range(8)]
    expected = [(*run_gae(data), *run_vtrace(data)) for data in streams]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda data: (*run_gae(data), *run_vtrace(data)), streams * 4))
    for result, want in zip(results, expected * 4, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(result, want, strict=True))


def test_discount_cumsum_keeps_time_first() -> None:
    x = torch.randn(9, 2, dtype=torch.float64)
    expected = torch.stack([sum(0.9 ** (k - t) * x[k] for k in range(t, 9)) for t in range(9)])
    torch.testing.assert_close(discount_cumsum(x, 0.9), expected)
    assert torch.equal(discount_cumsum(x, 0.0), x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_discount_cumsum_of_an_array_returns_an_array(dtype: str) -> None:
    x = np.array([[1, 2], [3, 4], [5, 6]]).astype(dtype)[::-1]  # l2r-lab calls this function with reversed views
    original = x.copy()
    for discount, expected in (
        (0.5, [[6.75, 8.5], [3.5, 5.0], [1.0, 2.0]]),
        (np.array([0.5, 1.0]), [[6.75, 12.0], [3.5, 6.0], [1.0, 2.0]]),
    ):
        result = discount_cumsum(x, discount)
        assert isinstance(result, np.ndarray)
        assert result.tolist() == expected
        assert result.dtype == (np.float64 if dtype == "int64" else dtype)
    assert (x == original).all()
    with pytest.raises(TypeError, match="x must hold numbers"):
        discount_cumsum(np.array(["a"]), 0.5)
