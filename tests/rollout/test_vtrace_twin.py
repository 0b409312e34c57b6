"""V-trace of the buffer equals a loop over single steps."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.rollouts import estimated, linear_actor, make_critic, make_rollout
from torchrl_lightning import VTraceBuffer

THRESHOLDS = st.sampled_from([0.5, 1.0, 2.0])


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 12),
    envs=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lmbda=st.sampled_from([0.0, 0.7, 1.0]),
    rho=THRESHOLDS,
    c=THRESHOLDS,
    pg_rho=st.one_of(st.none(), THRESHOLDS),
)
def test_vtrace_buffer_equals_a_loop_with_truncations(
    steps: int, envs: int, seed: int, gamma: float, lmbda: float, rho: float, c: float, pg_rho: float | None
) -> None:
    data, actor = make_rollout(steps, envs, seed), linear_actor()
    buffer = VTraceBuffer(
        steps,
        actor=actor,
        critic=make_critic(),
        gamma=gamma,
        lmbda=lmbda,
        clip_rho_thres=rho,
        clip_c_thres=c,
        clip_pg_rho_thres=pg_rho,
        standardize_advantages=False,
    )
    estimated(buffer, data)
    advantage, target = brute_vtrace(data, actor, gamma, lmbda, rho, c, rho if pg_rho is None else pg_rho)
    torch.testing.assert_close(buffer.rollout["value_target"][..., 0].double(), target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(buffer.rollout["advantage"][..., 0].double(), advantage, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def brute_vtrace(data, actor, gamma, lmbda, rho_clip, c_clip, pg_rho_clip):
    """Return the advantages and targets of each step from the equations.

    The value is a tenth of the observation.
    """
    major = data.transpose(0, 1)
    steps, envs = major.shape
    log_pi = actor.get_dist(major.select("observation").clone()).log_prob(major["action"])
    target, advantage = torch.zeros(steps, envs, dtype=torch.float64), torch.zeros(steps, envs, dtype=torch.float64)
    for n in range(envs):
        correction, next_target = 0.0, 0.0
        for t in reversed(range(steps)):
            row = major[t, n]
            ratio = float((log_pi[t, n] - row["action_log_prob"]).exp())
            reward, value = float(row["next", "reward"]), 0.1 * float(row["observation"])
            next_value = 0.0 if row["next", "terminated"] else 0.1 * float(row["next", "observation"])
            last = bool(row["next", "done"]) or t == steps - 1
            if not last:
                next_value = 0.1 * float(major[t + 1, n]["observation"])
            next_estimate = next_value if last else next_target
            delta = min(rho_clip, ratio) * (reward + gamma * next_value - value)
            correction = delta + (0.0 if last else gamma * lmbda * min(c_clip, ratio) * correction)
            advantage[t, n] = min(pg_rho_clip, ratio) * (reward + gamma * next_estimate - value)
            target[t, n] = next_target = value + correction
    return advantage, target


def test_random_rollouts_contain_truncations() -> None:
    """Check that the rollouts above contain truncated, terminated and cut-off rows.

    Without these rows, the comparison would prove little.
    """
    data = make_rollout(12, 5, 0)
    flags = data["next", "truncated"].sum(), data["next", "terminated"].sum(), (~data["next", "done"][:, -1]).sum()
    assert min(flags) > 0
