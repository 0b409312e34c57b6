"""The buffer of PPO with demonstrations: what it reads, mines, saves, and how its documented verbs behave."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from kit.demonstrations import CARTPOLE, episode, names, saved
from kit.files import through_file
from torchrl_lightning import (
    EnvironmentRecipe,
    PPODBuffer,
    make_vector_env,
    read_demonstration,
    write_demonstration,
)
from torchrl_lightning._core.rank_metrics import Mean, reduce_metrics
from torchrl_lightning.cli.error_messages import exit_with_one_line

ENVS = 2


def attached(size: int = 8, **options: Any) -> PPODBuffer:
    """A buffer whose critic reads the first entry of the observation."""
    critic = TensorDictModule(lambda x: x[..., :1].clone(), in_keys=["observation"], out_keys=["state_value"])
    buffer = PPODBuffer(size, **{"critic": critic, **options})
    buffer.attach("CartPole-v1", ENVS)
    return buffer


def rollout(*steps: tuple[float, bool], value: float = 0.0, begins: bool = True) -> TensorDictBase:
    """A rollout with these rewards and ends, and this value in one environment and 1 more in the other."""
    length = len(steps)
    rewards, ends = (torch.tensor(each).expand(ENVS, length)[..., None].clone() for each in zip(*steps, strict=True))
    seen = torch.arange(4.0 * (length + 1)).view(length + 1, 4).repeat(ENVS, 1, 1)
    seen[..., 0] = value + torch.arange(ENVS)[:, None]
    following = {"observation": seen[:, 1:], "reward": rewards.float(), "done": ends, "terminated": ends.clone()}
    entries = {
        "observation": seen[:, :-1],
        "action": torch.zeros(ENVS, length, dtype=torch.int64),
        "is_init": torch.cat([torch.full((ENVS, 1, 1), begins), ends[:, :-1]], 1),
        "next": {**following, "truncated": torch.zeros_like(ends)},
    }
    return TensorDict(entries, [ENVS, length], names=[None, "time"])


def learned_from(buffer: PPODBuffer, data: TensorDictBase) -> None:
    buffer.insert_data_slice(data)
    buffer.before_gradients()
    buffer.after_gradients(None, None)


def mined(buffer: PPODBuffer) -> list[tuple[int, float]]:
    return [(each.length, each.value) for each in buffer.value_demos]


def test_initial_demonstrations_are_sorted_human_first(tmp_path: Path) -> None:
    buffer = attached(
        initial_human_demos_dir=saved(tmp_path / "human", episode(total=2.0), episode()),
        initial_agent_demos_dir=saved(tmp_path / "agent", episode(total=3.0, is_human=True)),
    )
    assert [Path(name).parent.name for name in names(buffer.reward_demos)] == ["human", "human", "agent"]
    assert [each.is_human for each in buffer.reward_demos] == [True, True, False]
    assert buffer.reward_threshold == 1.0
    assert buffer.value_demos == ()
    buffer.load_initial_demos()
    assert len(buffer.reward_demos) == 3


def test_demonstration_is_read_and_checked(tmp_path: Path) -> None:
    buffer = attached(frame_skip=2)
    saved(tmp_path, episode(frame_skip=2), episode(frame_skip=3))
    assert buffer.load_demo(tmp_path / "0.safetensors").total_reward == 1.0
    with pytest.raises(ValueError, match=r"1\.safetensors'.*frame_skip=3.*frame_skip=2"):
        buffer.load_demo(tmp_path / "1.safetensors")
    with pytest.raises(RuntimeError, match=r"attach\(env, num_envs\)"):
        PPODBuffer(3).load_demo(tmp_path / "0.safetensors")


def test_start_without_usable_demonstrations_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.safetensors").write_bytes(b"no tensors")
    human, agent = saved(tmp_path / "human", episode()), saved(tmp_path / "agent", episode(), episode())
    many = {"initial_human_demos_dir": human, "initial_agent_demos_dir": agent, "total_buffer_demo_capacity": 2}
    for options, says in (
        ({"initial_human_demos_dir": f"{tmp_path}/none"}, "initial_human_demos_dir=.*none: .*none is not a directory"),
        ({"initial_human_demos_dir": f"{tmp_path}/broken"}, ".*broken contains no usable demonstration"),
        (many, "total_buffer_demo_capacity must be .*1 human and 2 of the agent, got 2"),
        (
            {"demo_dtypes": {"Observation": torch.uint8}},
            r"demo_dtypes must have a float dtype for Observation.*got torch\.uint8",
        ),
    ):
        with pytest.raises(SystemExit, match=f"^error: {says}"), exit_with_one_line():
            attached(**options)


def test_finished_episodes_become_demonstrations_once(tmp_path: Path) -> None:
    human = saved(tmp_path, episode(2))
    buffer = attached(initial_human_demos_dir=human, total_buffer_demo_capacity=4, rho=0.2, phi=0.3)
    learned_from(buffer, rollout((0.0, False), (1.0, False), (0.0, True), (0.0, True), value=2.0))
    # Two successes, cut behind their rewards, and two episodes without one.
    assert [each.length for each in buffer.reward_demos] == [2, 2, 2]
    assert mined(buffer) == [(1, 3.0)]
    assert (buffer.rho, buffer.phi) == (pytest.approx(0.2 + 0.3 * 2 / 3), pytest.approx(0.3 / 3))
    figures = buffer.metrics()
    assert (figures["demos/D_R"], figures["demos/D_V"], figures["demos/threshold"]) == (3.0, 1.0, 1.0)
    assert figures["demos/success"] == 0.5
    assert "demos/replayed" not in figures
    buffer.before_gradients()  # again over the same rollout
    assert len(buffer.reward_demos) == 3


@pytest.mark.parametrize(("is_shared", "stored"), [(False, 6.0), (True, 3.0)])
def test_ranks_add_their_demonstrations_unless_they_share_them(is_shared: bool, stored: float, tmp_path: Path) -> None:
    human = saved(tmp_path, episode(2))
    buffer = attached(initial_human_demos_dir=human, total_buffer_demo_capacity=4, shared_demos=is_shared)
    learned_from(buffer, rollout((0.0, False), (1.0, False), (0.0, True), (0.0, True), value=2.0))
    figures = buffer.metrics()
    success = figures["demos/success"]
    assert success.weight == 4  # type: ignore[attr-defined]
    both = reduce_metrics([figures, {**figures, "demos/success": Mean(1.0, 12)}])
    assert both["demos/D_R"] == stored
    assert both["demos/D_V"] == stored / 3
    assert both["demos/success"] == (0.5 * 4 + 1.0 * 12) / 16
    assert both["demos/threshold"] == figures["demos/threshold"]


def test_episode_goes_on_over_rollouts_and_keeps_its_largest_value() -> None:
    buffer = attached(2, initial_reward_threshold=9.0)
    learned_from(buffer, rollout((0.0, False), (0.0, False), value=5.0))
    assert mined(buffer) == []
    learned_from(buffer, rollout((0.0, False), (0.0, True), value=1.0, begins=False))
    assert mined(buffer) == [(4, 5.0), (4, 6.0)]
    assert buffer.metrics()["demos/success"] == 0.0


def test_documented_transitions_are_mined() -> None:
    buffer, ones = attached(4, initial_reward_threshold=9.0), torch.ones(ENVS, 1)
    for step in range(4):
        seen = ones * torch.arange(4.0) + step
        sample = {"Observation": seen, "NextObservation": seen + 1, "Action": torch.zeros(ENVS, dtype=torch.int64)}
        flags = {"Done": ones * (step % 2 == 0), "NextDone": ones * (step % 2 == 1)}
        buffer.insert_transition({**sample, "Reward": ones, **flags})
    buffer.before_gradients()
    assert mined(buffer) == [(2, 1.0), (2, 1.0), (2, 3.0), (2, 3.0)]


def test_collected_rollout_is_mined_instead_of_the_stored_one() -> None:
    buffer, raw = attached(4), rollout((0.0, False), (1.0, True))
    buffer.insert_data_slice(raw.clone().apply_(lambda leaf: leaf.zero_() if leaf.is_floating_point() else leaf))
    buffer.hooks.on_collected(raw)
    buffer.before_gradients()
    found = buffer.reward_demos[0]
    assert found.total_reward == 1.0
    assert torch.equal(found.steps["observation"], raw[0, :2]["observation"])
    assert found.value == 0.0  # as estimated over what is stored


def test_several_critics_value_an_episode_by_their_mean() -> None:
    keys = [("state_value", "a"), ("state_value", "b")]
    critic = TensorDictModule(lambda x: (x[..., :1].clone(), x[..., :1] + 4), in_keys=["observation"], out_keys=keys)
    buffer = attached(initial_reward_threshold=9.0, critic=critic)
    learned_from(buffer, rollout((0.0, False), (0.0, True), value=1.0))
    assert mined(buffer) == [(2, 3.0), (2, 4.0)]


def test_workers_have_separate_miners() -> None:
    buffer = attached(2, initial_reward_threshold=9.0)
    for worker, ends in ((0, False), (1, False), (0, True), (1, True)):
        data = rollout((0.0, False), (0.0, ends), value=float(worker), begins=not ends)
        data["collector", "env_ids"] = (torch.arange(ENVS) + ENVS * worker)[:, None].repeat(1, 2)
        learned_from(buffer, data)
    assert mined(buffer) == [(4, 0.0), (4, 1.0), (4, 1.0), (4, 2.0)]


def test_demonstrations_may_come_while_training_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # whatever a run before has left
    late, human = tmp_path / "late", saved(tmp_path / "human", episode())
    options = {"initial_human_demos_dir": human, "supplementary_demos_dir": str(late), "total_buffer_demo_capacity": 2}
    buffer, step = attached(2, **options), rollout((0.0, False), (0.0, False))
    write_demonstration(late / "low.safetensors", episode(total=0.5))
    (late / "half.safetensors").write_bytes(b"still being written")
    learned_from(buffer, step)
    assert len(buffer.reward_demos) == 1
    write_demonstration(late / "half.safetensors", episode(total=2.0))
    learned_from(buffer, step)
    state = through_file(buffer.state_dict())
    buffer = attached(2, **options)  # a resumed run takes none again that was taken
    buffer.load_state_dict(state)
    learned_from(buffer, step)
    assert [Path(name).name for name in names(buffer.reward_demos)][1:] == ["half.safetensors"]
    assert not caplog.records
    for number in range(2):
        write_demonstration(late / f"human{number}.safetensors", episode(2 - number, 3.0, is_human=True))
    learned_from(buffer, step)
    # What a person gave later gives way, too; what was there at start stays.
    assert [each.is_human for each in buffer.reward_demos] == [True, False]
    assert Path(names(buffer.reward_demos)[1]).name == "human1.safetensors"
    assert not caplog.records


def test_late_demonstration_whose_return_equals_the_threshold_is_taken(tmp_path: Path) -> None:
    totals = [0.07, 0.35, 0.7, 0.99, -0.3, 123.4]
    for number, total in enumerate(totals):
        late = tmp_path / str(number)
        buffer = attached(2, supplementary_demos_dir=str(late), initial_reward_threshold=total)
        write_demonstration(late / "equal.safetensors", episode(total=total))
        write_demonstration(late / "lower.safetensors", episode(total=total - 1e-3))
        learned_from(buffer, rollout((0.0, False), (0.0, False)))
        assert [Path(name).name for name in names(buffer.reward_demos)] == ["equal.safetensors"], total


def test_episodes_whose_return_equals_the_threshold_anneal() -> None:
    for threshold in (0.07, 0.35, 0.7, -0.3):
        buffer = attached(2, initial_reward_threshold=threshold, rho=0.1, phi=0.4)
        learned_from(buffer, rollout((0.0, False), (threshold, True)))
        assert buffer.demonstrations.successes == ENVS, threshold
        assert buffer.metrics()["demos/success"] == 1.0
        assert buffer.metrics()["demos/phi"] < 0.4


def test_late_demonstration_above_the_capacity_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    human = saved(tmp_path / "human", episode())
    options = {"initial_human_demos_dir": human, "supplementary_demos_dir": str(tmp_path / "late")}
    buffer = attached(2, **options, total_buffer_demo_capacity=1)
    write_demonstration(tmp_path / "late" / "late.safetensors", episode())
    learned_from(buffer, rollout((0.0, False), (0.0, False)))
    assert [record.getMessage().partition(": ")[2][:20] for record in caplog.records] == ["1 new demonstrations"]
    assert len(buffer.reward_demos) == 1


def test_best_demonstrations_are_saved_at_intervals(tmp_path: Path) -> None:
    target = tmp_path / "best"
    buffer = attached(
        2,
        initial_human_demos_dir=saved(tmp_path / "human", episode(total=9.0)),
        target_agent_demos_dir=str(target),
        num_agent_demos_to_save=2,
        save_demos_every=2,
        save_value_demos=True,
        demo_dtypes={"Action": np.int8, "Observation": torch.float16, "Reward": np.dtype("float16")},
    )
    buffer.demonstration_writer.load([episode(3, 9.1), episode(4, 9.0), episode(5, 9.1)])
    step = rollout((0.0, False), (0.0, True), value=4.0)
    learned_from(buffer, step)
    assert not target.exists()
    learned_from(buffer, step)
    found = {path.name: read_demonstration(path) for path in target.glob("*.safetensors")}
    assert sorted(found) == [f"{kind}_demo_{place}.safetensors" for kind in ("reward", "value") for place in (1, 2)]
    # The newest of equals comes first.
    assert [found[f"reward_demo_{place}.safetensors"].length for place in (1, 2)] == [5, 3]
    assert found["value_demo_1.safetensors"].value == 5.0
    best = found["reward_demo_1.safetensors"]
    assert (best.steps["action"].dtype, best.steps["observation"].dtype) == (torch.int8, torch.float16)
    assert best.total_reward == float(np.float16(9.1))
    assert best.last_observation is None
    buffer.num_agent_demos_to_save = 1
    buffer.save_demos()
    assert len([*target.glob("*.safetensors")]) == 2
    buffer.demo_dtypes = {"Action": torch.bool}
    buffer.demonstration_writer.load([replace(episode(), steps=episode().steps.apply(lambda leaf: leaf * 9))])
    buffer.num_agent_demos_to_save = 9
    with pytest.raises(ValueError, match=r"demo_dtypes.*9"):
        buffer.save_demos()


def test_annealing_and_capacity_rule_can_be_called() -> None:
    buffer = attached(total_buffer_demo_capacity=3, rho=0.1, phi=0.4, initial_reward_threshold=9.0)
    learned_from(buffer, rollout((0.0, True), (0.0, True), value=1.0))
    assert len(buffer.value_demos) == 2
    buffer.anneal_parameters()
    assert (buffer.rho, buffer.phi, len(buffer.value_demos)) == (pytest.approx(0.3), pytest.approx(0.2), 1)
    buffer.demonstrations.capacity = 1
    buffer.check_demo_buffer_capacity()
    assert len(buffer.demonstrations) == 1


def test_parameters_can_be_updated() -> None:
    buffer = PPODBuffer(8, rho=0.2, phi=0.3)
    for name, value in {"rho": 0.5, "phi": 0.5, "alpha": 2.0, "save_demos_every": 3, "gae_lambda": 0.5}.items():
        buffer.update_storage_parameter(name, value)
        assert getattr(buffer, name) == value


def test_demonstration_is_drawn_for_an_environment(tmp_path: Path) -> None:
    buffer = attached(initial_human_demos_dir=saved(tmp_path, episode()), rho=1.0, phi=0.0)
    assert buffer.sample_demo(1) is buffer.reward_demos[0]
    buffer.rho = 0.0
    assert buffer.sample_demo(0) is None


def test_scheduled_demonstration_is_replayed_in_the_next_episode(tmp_path: Path) -> None:
    buffer = attached(initial_human_demos_dir=saved(tmp_path, episode()), rho=1.0, phi=0.0)
    assert buffer.replay is not None
    buffer.sample_demo(1)
    buffer.rho = 0.0
    buffer.replay.begin(np.array([True] + [False] * (ENVS - 1)))
    assert not buffer.replay.playing.any()
    resumed = attached(initial_human_demos_dir=saved(tmp_path, episode()), rho=0.0, phi=0.0)
    resumed.load_state_dict(buffer.state_dict())
    for each in (buffer, resumed):
        assert each.replay is not None
        for expected in (True, False):
            each.replay.begin(np.ones(ENVS, bool))
            assert each.replay.playing.tolist() == [False, expected] + [False] * (ENVS - 2)
    with pytest.raises(RuntimeError, match=r"attach\(env, num_envs\)"):
        PPODBuffer(4).sample_demo(0)


@pytest.mark.parametrize("follows", [True, False])
def test_documented_steps_are_tracked(follows: bool) -> None:
    buffer = attached(initial_reward_threshold=2.0)
    for t in range(6):
        sample = {
            "Observation": torch.full((ENVS, 4), float(t)),
            "Action": torch.zeros(ENVS, dtype=torch.int64),
            "Reward": torch.ones(ENVS, 1),
            "Value": torch.full((ENVS, 1), float(t)),
            "Done": torch.tensor([[t == 2]] + [[False]] * (ENVS - 1)),
        }
        buffer.track_potential_demos({**sample, **({"NextObservation": sample["Observation"] + 1} if follows else {})})
    (demonstration,) = buffer.reward_demos
    assert (len(demonstration.steps), demonstration.total_reward, demonstration.value) == (3, 3.0, 2.0)
    assert demonstration.steps["observation"][:, 0].tolist() == [0.0, 1.0, 2.0]
    assert (demonstration.last_observation is not None) is follows


def test_factory_takes_the_documented_order() -> None:
    dtypes = {"Reward": torch.float64}
    settings = (0.2, 0.4, 0.9, 3, 7, "human", "agent", "more", "target", 5, 0.5, 2, dtypes)
    buffer = PPODBuffer.create_factory(9, *settings)("cpu", None, None, None)
    assert (buffer.size, buffer.rho, buffer.phi, buffer.gae_lambda, buffer.alpha) == (9, 0.2, 0.4, 0.9, 3)
    assert buffer.demonstrations.capacity == 7
    folders = (buffer.initial_human_demos_dir, buffer.initial_agent_demos_dir, buffer.supplementary_demos_dir)
    assert (*folders, buffer.target_agent_demos_dir) == ("human", "agent", "more", "target")
    assert (buffer.num_agent_demos_to_save, buffer.initial_reward_threshold, buffer.save_demos_every) == (5, 0.5, 2)
    assert buffer.demo_dtypes == dtypes
    assert PPODBuffer.demos_data_fields == ("Observation", "Action", "Reward")
    assert len(PPODBuffer.on_policy_data_fields) == 13


def test_envs_of_the_documented_kind_are_attached() -> None:
    class Envs(type(make_vector_env("CartPole-v1", 1))):  # type: ignore[misc]
        env_kwargs = {"frame_skip": 4}

    env = make_vector_env("CartPole-v1", ENVS)
    env.__class__ = Envs
    buffer = PPODBuffer(8, envs=env)
    buffer.attach()
    assert buffer.frame_skip == 4
    assert buffer.replay is not None
    assert buffer.replay.num_envs == ENVS
    with pytest.raises(ValueError, match=r"attach\(\).*num_envs"):
        PPODBuffer(8).attach()


@pytest.mark.parametrize("folder", ["target_agent_demos_dir", "supplementary_demos_dir"])
def test_folder_that_cannot_be_written_is_refused_before_anything_is_collected(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^{folder} must .*file/demos"):
        attached(**{folder: str(tmp_path / "file" / "demos")})


def test_frame_skip_is_that_of_the_recipe() -> None:
    buffer = PPODBuffer(8)
    buffer.attach(EnvironmentRecipe("CartPole-v1", action_repeat=3), 2)
    assert buffer.frame_skip == 3
    with pytest.raises(ValueError, match=r"frame_skip=1.*frame_skip=3"):
        episode().fits(CARTPOLE, buffer.frame_skip)


@pytest.mark.parametrize(
    ("threshold", "shown", "from_return"),
    [
        (None, None, "-inf"),
        (None, 0.0, "0"),
        (None, -5.0, "-5"),
        (0.0, None, "0"),
        (None, 1.0, None),
        (0.5, None, None),
        (0.5, 0.0, None),
        (-9.0, -5.0, None),
        (5e-7, None, "5e-07"),
        (2e-6, None, None),
    ],
)
def test_threshold_that_failures_reach_logs_a_warning(
    threshold: float | None,
    shown: float | None,
    from_return: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    human = None if shown is None else saved(tmp_path, episode(total=shown))
    attached(initial_reward_threshold=threshold, initial_human_demos_dir=human)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (from_return is not None)
    for message in said:
        assert f"the return {from_return}," in message
        assert "Set initial_reward_threshold" in message


@pytest.mark.parametrize(
    ("env", "log_prob", "warns"),
    [
        ("Pendulum-v1", "deterministic", True),
        ("Pendulum-v1", "current", False),
        ("CartPole-v1", "deterministic", False),
    ],
)
def test_continuous_actions_are_advised_to_take_the_policys_log_probability(
    env: str, log_prob: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    PPODBuffer(8, log_prob=log_prob, initial_reward_threshold=1.0).attach(env, 1)
    assert ['log_prob="current"' in record.getMessage() for record in caplog.records] == [True] * warns


def test_value_demonstrations_that_are_never_drawn_are_not_kept() -> None:
    buffer = attached(2, initial_reward_threshold=9.0, phi=0.0)
    failures = rollout((0.0, True), (0.0, True), value=1.0)
    learned_from(buffer, failures)
    assert mined(buffer) == []
    buffer.update_storage_parameter("phi", 0.5)
    learned_from(buffer, failures)
    assert len(buffer.value_demos) == 4
    kept = through_file(buffer.state_dict())
    buffer = attached(2, initial_reward_threshold=9.0, phi=0.0)
    buffer.load_state_dict(kept)
    assert (len(buffer.value_demos), buffer.phi) == (4, 0.5)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_human_share_without_human_demonstrations_logs_a_warning(share: float, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        PPODBuffer(8, human_share=share, initial_reward_threshold=1.0).attach("CartPole-v1", ENVS)
    assert ["human_share=0.5 has no effect" in record.getMessage() for record in caplog.records] == [True] * bool(share)
