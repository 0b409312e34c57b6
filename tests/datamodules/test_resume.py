from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from torchrl_lightning import GAEBuffer, VanillaOnPolicyBuffer, VTraceBuffer

# A resumed run writes beside the checkpoint that it came from.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def parameters(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("buffer", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    buffer, stopped_after, tmp_path, make_data, make_trainer, make_module
):
    settings = {"buffer": buffer, "reset_at_each_batch": True}
    uninterrupted = make_module()
    make_trainer(max_epochs=4, limit_val_batches=1).fit(uninterrupted, datamodule=make_data(**settings))

    first = make_module()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    trainer = make_trainer(
        max_epochs=stopped_after, limit_val_batches=1, enable_checkpointing=True, callbacks=[checkpoint]
    )
    trainer.fit(first, datamodule=make_data(**settings))
    assert not torch.equal(parameters(first), parameters(uninterrupted))

    # Another seed: everything must come from the checkpoint. It is read with weights_only, Lightning's default.
    resumed = make_module(seed=99)
    data = make_data(**settings)
    make_trainer(max_epochs=4, limit_val_batches=1, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        resumed, datamodule=data, ckpt_path=checkpoint.last_model_path
    )
    assert data.frames == 4 * 64
    assert torch.equal(parameters(resumed), parameters(uninterrupted))


def test_without_resets_a_resumed_run_goes_on_from_its_counters(tmp_path, make_data, make_trainer, make_module):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    make_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        make_module(), datamodule=make_data()
    )
    data = make_data()
    make_trainer(max_epochs=3, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        make_module(), datamodule=data, ckpt_path=checkpoint.last_model_path
    )
    assert data.frames == 3 * 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "Acrobot-v1"}, "environment='CartPole-v1', but this run has environment='Acrobot-v1'"),
        ({"num_envs": 8}, "num_envs=4, but this run has num_envs=8"),
        ({"frames_per_batch": 128}, "frames_per_batch=64, but this run has frames_per_batch=128"),
        ({"buffer": VTraceBuffer}, "buffer='GAEBuffer', but this run has buffer='VTraceBuffer'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(settings, message, make_data):
    written = make_data()
    written.setup("fit")
    other = make_data(**settings)
    other.setup("fit")
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(written.state_dict())
    assert other.frames == 0


def test_a_state_of_another_version_is_refused(make_data):
    data = make_data()
    data.setup("fit")
    with pytest.raises(ValueError, match="version 0, this release reads 1"):
        data.load_state_dict({**data.state_dict(), "version": 0})


def test_a_state_of_other_ranks_is_refused(make_data):
    data = make_data()
    data.setup("fit")
    state = data.state_dict()
    with pytest.raises(ValueError, match=r"of 2 rank\(s\), but this run has 1"):
        data.load_state_dict({**state, "ranks": state["ranks"] * 2})
