"""Each mistake gets a message that names what is wrong, and no traceback."""

from __future__ import annotations

import pytest

from cli.commands import TINY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.batchsize=3"], "Key 'batchsize' not in 'OnPolicyDataSchema'"),
        (["experiment=nope"], "Could not find 'experiment/nope'"),
        (["logger=nope"], "Could not find 'logger/nope'"),
        (["+data=gae"], "error: +data=gae would add to what is there; select a group as data=gae."),
        (["data.total_frames=-1"], "error: nothing would end this run; give data.total_frames=N"),
        (["model.learning_rate=???"], "error: the config has no value for model.learning_rate; give"),
        (["model.network=gru"], "error: model.network is 'gru', expected a config; select it as model/network=gru."),
        (["eval_checkpoint=worst"], "error: eval_checkpoint is 'worst'; expected 'best' or 'last'."),
        (["ckpt_path=nowhere.ckpt"], "error: ckpt_path=nowhere.ckpt is not a file; checkpoints lie in"),
        (["data.frames_per_batch=1001"], "frames_per_batch=1001 is no multiple of num_envs=8; take 1008."),
        (["data.env=Nope-v0"], "error: Gymnasium does not know the environment 'Nope-v0'"),
        (["--multirun", "seed=0,1", "trainer.strategy=ddp"], "take trainer.strategy=ddp_spawn"),
    ],
)
def test_a_mistake_is_named(arguments, message, run, tmp_path):
    done = run("train", *arguments, "hydra.run.dir=run", "hydra.sweep.dir=run", expect=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("**/*.ckpt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env=pendulum"], "environment='CartPole-v1', but this run has environment='Pendulum-v1'"),
        (["data.frames_per_batch=256"], "frames_per_batch=128, but this run has frames_per_batch=256"),
        (["model.network.hidden_sizes=[32]"], "size mismatch"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(arguments, message, run, trained):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    done = run("train", *TINY, *arguments, f"ckpt_path={checkpoint}", expect=1)
    assert f"error: {checkpoint} does not fit this run" in done.stderr
    assert message in done.stderr
    assert "The run of that checkpoint was given: data.num_envs=4" in done.stderr
    assert "Traceback" not in done.stderr
