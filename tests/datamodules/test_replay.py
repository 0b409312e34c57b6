"""Updates sample from a replay buffer, and frames have a fixed ratio to updates."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import lightning as L
import pytest
import torch
from torchrl.envs import GymEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss

from kit.normalized import recording
from kit.replay import BUFFERS, SIZE, cells, dqn, experience, fit, prioritized, recurrent, replay_data
from torchrl_lightning.agents import DQNModule
from torchrl_lightning.replay import ExperienceBuffer, RingStorage


class Recorder(DQNModule):
    """Record the counters of the DataModule and the batch at the start of each update."""

    def training_step(self, batch, batch_idx):
        data = self.trainer.datamodule
        self.__dict__["collector"] = data.collector
        self.__dict__.setdefault("seen", []).append((data.updates, data.frames, len(data.buffer), batch.clone()))
        super().training_step(batch, batch_idx)


def expected_frames(update, ratio, warmup=40, frames_per_batch=2):
    """Return the number of frames before update number `update`, counted from 0."""
    return math.ceil((warmup + update * Fraction(ratio)) / frames_per_batch) * frames_per_batch


@pytest.mark.parametrize(
    ("ratio", "updates", "frames"),
    [(1e-7, 10**7, 1), (0.1234567, 10**12, 123_456_700_000), (1 / 3, 3 * 10**17, 10**17), (0.1, 10**17, 10**16)],
)
def test_small_ratio_collects_new_frames_eventually(ratio, updates, frames):
    """The ratio is not rounded, so that a small ratio is not zero and a long run does not drift."""
    data = replay_data(frames_per_update=ratio, warmup_frames=0)
    data._clock.frames = frames
    waits = []
    for data.updates in (updates, updates + 1):
        waits.append(data._waits_for_frames())
    assert waits == [False, True]


@pytest.mark.parametrize(("ratio", "exact"), [(1.0, "1"), (0.1, "1/10"), (1 / 3, "1/3"), (3.7, "37/10")])
def test_ratio_of_frames_to_updates_is_exact(ratio, exact, tmp_path):
    data = replay_data(frames_per_update=ratio, updates_per_epoch=31)
    module, _ = fit(tmp_path, data, dqn(Recorder))
    assert len(data.train_dataloader()) == 31
    # Batches are not sampled in advance: the buffer has exactly the frames of its update.
    found = [seen[:3] for seen in module.seen]
    assert found == [(u + 1, expected_frames(u, exact), expected_frames(u, exact)) for u in range(62)]


def test_warm_up_acts_at_random_before_the_policy(tmp_path):
    """A policy without exploration takes one action in each state; random actions differ."""
    data = replay_data(warmup_frames=200, frames_per_update=4.0)
    module = dqn(epsilon_start=0.0, epsilon_end=0.0)
    module.learning_rate = 1e-30  # no weight changes
    fit(tmp_path, data, module)
    steps = cells(data)
    with torch.no_grad():
        actions = module.policy.network.values([steps["observation"]]).argmax(-1)
    agrees = actions == steps["action"].reshape(len(steps), -1)[:, 0]
    assert agrees[200:].all()
    assert 0.3 < agrees[:200].float().mean() < 0.7


class QValues(L.LightningModule):
    """A module with a policy of TorchRL, which also writes values."""

    def configure_model(self):
        spec = self.trainer.datamodule.specs.action
        self.policy = QValueActor(MLP(4, 2, num_cells=[8]), spec=spec, in_keys=["observation"])
        self.loss = DQNLoss(self.policy, action_space="categorical", delay_value=False)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)["loss"]

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        return torch.optim.Adam(self.loss.parameters())


@pytest.mark.parametrize("env", ["CartPole-v1", partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)])
def test_other_outputs_of_the_policy_are_zero_in_the_warm_up(env, tmp_path):
    data = replay_data(env=env, warmup_frames=200)
    fit(tmp_path, data, QValues())
    values = cells(data)["action_value"]
    assert not values[:200].any()
    assert values[200:].all()


@pytest.mark.parametrize("name", [*BUFFERS, "recurrent"])
def test_buffers_of_all_kinds_are_accepted(name, tmp_path):
    data = replay_data(recurrent if name == "recurrent" else name)
    module = dqn(Recorder, recurrent=name in ("sequence", "recurrent"))
    if name == "recurrent":
        # A recurrent learner reads each step as a sequence of length 1.
        data.on_after_batch_transfer = lambda batch, index: batch.unsqueeze(1)
    fit(tmp_path, data, module)
    batch = module.seen[0][3]
    windows = {"sequence": (8, 4, 4), "recurrent": (8, 1, 4), "recent, prioritized": (8, 1, 4)}
    assert batch["observation"].shape == windows.get(name, (8, 4))
    assert data.updates == module.updates == 20


def test_settings_that_exceed_memory_or_disk_are_refused_before_collection(tmp_path):
    (tmp_path / "file").touch()
    beside = {"checkpoint_buffer": "beside", "buffer_dir": tmp_path / "file" / "buffer"}
    for settings, message in (
        (
            {"frames_per_batch": 2**50},
            rf"rollout of {2**50} frames needs .* free in the memory.*lower frames_per_batch",
        ),
        (beside, r"^buffer_dir must be a writable folder, got .*file/buffer .*Name another folder"),
    ):
        data = replay_data(**settings)
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, data)
        assert data.frames == 0
        assert data.collector is None


class Telling(ExperienceBuffer):
    """A buffer that stores the batches of its priority updates."""

    def update_tensordict_priority(self, data):
        self.told = [*getattr(self, "told", []), data]
        super().update_tensordict_priority(data)


class Marking(DQNModule):
    """Write errors that identify the update."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        batch["td_error"] = torch.full((len(batch),), 10.0 + self.updates)
        self.__dict__.setdefault("served", []).append(batch)


class Critics(DQNModule):
    """Write the errors of two critics, or only the larger error."""

    several = True

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        error = batch["td_error"]
        batch["td_error"] = torch.stack([error, error / 2], -1) if self.several else error


class OneCritic(Critics):
    """Write only the larger error."""

    several = False


def test_errors_of_two_critics_become_one_priority(tmp_path):
    def buffer(num_envs):
        return ExperienceBuffer(storage=RingStorage(SIZE), sampler=prioritized(), num_envs=num_envs)

    tables = []
    for kind in (Critics, OneCritic):
        data = replay_data(buffer, warmup_frames=100, frames_per_update=0.01)
        fit(tmp_path, data, dqn(kind))
        tables.append(data.buffer.sampler.table.priorities)
    assert torch.equal(*tables)
    assert len(tables[0].unique()) > 10


def test_priorities_are_written_also_after_the_last_batch_of_an_epoch(tmp_path):
    def buffer(num_envs):
        return Telling(storage=RingStorage(SIZE), sampler=prioritized(), num_envs=num_envs)

    data = replay_data(buffer, warmup_frames=100, frames_per_update=0.01)
    module, _ = fit(tmp_path, data, dqn(Marking))
    # Each batch of the twenty updates sets priorities once, in order, and is the object that the loss wrote into.
    assert len(module.served) == 20
    assert all(mine is theirs for mine, theirs in zip(data.buffer.told, module.served, strict=True))
    expected = {}
    for update, batch in enumerate(module.served):
        expected.update(dict.fromkeys(batch["index"].tolist(), (11.0 + update + 1e-8) ** 0.7))
    found = data.buffer.sampler.table.tree[torch.tensor(list(expected))]
    assert found.tolist() == pytest.approx(list(expected.values()))


def test_n_step_returns_sum_what_follows(tmp_path):
    """Each sampled transition equals a transition that is computed from the collected steps in a plain loop."""
    buffer = experience(n_steps=3, gamma=0.5)
    collector = recording(2, 2, init_random_frames=120)
    data = replay_data(buffer, warmup_frames=120, num_envs=2, frames_per_update=2.0, collector=collector)
    module, _ = fit(tmp_path, data, dqn(Recorder, gamma=0.5))
    steps = torch.cat(module.collector.recorded, 1)
    for _, frames, _, batch in module.seen:
        newest = frames // 2 - 1
        for row in batch:
            t, env = divmod(int(row["index"]), 2)
            total, factor, last = 0.0, 1.0, t
            for k in range(min(3, newest - t + 1)):
                last = t + k
                total += factor * float(steps["next", "reward"][env, last])
                factor *= 0.5
                if steps["next", "done"][env, last]:
                    break
            assert float(row["next", "reward"]) == pytest.approx(total)
            assert torch.equal(row["next", "observation"], steps["next", "observation"][env, last])
            assert bool(row["next", "terminated"]) == bool(steps["next", "terminated"][env, last])
            assert float(row["gamma"]) == factor


@pytest.mark.parametrize("updates_per_step", [1, 4])
def test_training_stops_when_all_frames_are_collected_and_learned_from(updates_per_step, tmp_path):
    data = replay_data(total_frames=70, frames_per_update=0.5, updates_per_step=updates_per_step)
    module, run = fit(tmp_path, data, max_epochs=-1)
    # After 40 frames of warm-up, update u waits for 40 + u / 2 frames, so 70 frames allow updates 0 to 60.
    assert data.frames == 70
    assert module.updates == data.updates == 61
    assert run.current_epoch == 7


def test_evaluation_batches_are_not_kept(tmp_path):
    data = replay_data()
    data.setup("fit")
    assert data.on_after_batch_transfer("episodes", 0) == "episodes"
    assert data.state_dict()["ranks"][0]["updates"] == 0  # else the update of that batch would be repeated
    data.close()


def test_exception_closes_everything(tmp_path):
    class Failing(DQNModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of luck")

    data = replay_data("prioritized")
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, data, dqn(Failing))
    assert data.collector is None
    # The failed update does not count: a resumed run repeats it, and the state does not need its priorities.
    assert data.state_dict()["ranks"][0]["updates"] == 0


def test_loss_without_priorities_names_the_missing_entry(tmp_path):
    class Forgetful(DQNModule):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            del batch["td_error"]

    with pytest.raises(KeyError, match="td_error"):
        fit(tmp_path, replay_data("prioritized"), dqn(Forgetful))


def test_metrics_contain_returns_timings_and_sizes(tmp_path):
    data = replay_data(warmup_frames=300, frames_per_batch=20)
    fit(tmp_path, data, max_epochs=1)
    metrics = data.metrics()
    assert metrics["train/return"] == metrics["train/length"] > 5
    assert metrics["updates"] == 10
    assert metrics["replay/size"] == metrics["frames"] == 320
    assert metrics["time/collect"] > 0


def test_rollouts_that_are_cut_by_resets_end_their_episodes(tmp_path):
    data = replay_data("sequence", frames_per_batch=20, reset_at_each_batch=True)
    module, _ = fit(tmp_path, data, dqn(Recorder, recurrent=True))
    last = cells(data).reshape(-1, 2)["next"][9::10]
    assert last["done"].all()
    assert not last["terminated"].all()
    for _, _, _, batch in module.seen:
        assert not batch["is_init"][:, 1:].any()
