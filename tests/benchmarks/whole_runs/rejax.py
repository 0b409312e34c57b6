"""PPO of rejax: algorithm and environments in one compiled JAX program."""

from __future__ import annotations

from benchmarks.whole_runs.clock import Stopwatch, Training


def ppo(num_envs: int, steps: int, rollouts: int, mini_batch_size: int) -> Training:
    """Return a run on gymnax's CartPole with 4 epochs and tanh networks of 64 x 64, timed without compilation."""
    import jax
    from rejax import PPO

    algorithm = PPO.create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_steps=steps,
        num_epochs=4,
        num_minibatches=num_envs * steps // mini_batch_size,
        learning_rate=3e-4,
        max_grad_norm=0.5,
        ent_coef=0.0,
        agent_kwargs={"activation": "tanh"},
    )
    iterate = jax.jit(algorithm.train_iteration)

    def run(seed: int) -> float:
        state = jax.block_until_ready(iterate(algorithm.init_state(jax.random.PRNGKey(seed))))
        watch = Stopwatch()
        watch.start(0)
        for _ in range(rollouts):
            state = iterate(state)
        jax.block_until_ready(state)
        return watch.speed(rollouts * num_envs * steps)

    return run
