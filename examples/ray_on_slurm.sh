#!/usr/bin/env bash
# A Ray cluster of the machines of a SLURM job, and a run whose learner is on the first of them.
#
#   sbatch examples/ray_on_slurm.sh experiment=vtrace_cartpole data.collector.num_collectors=32 data.num_envs=256
#
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --signal=B:USR1@90
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS="$head:6379" RAY_USAGE_STATS_ENABLED=0
each=(srun --overlap --ntasks=1 --nodes=1)

# Without a token whoever reaches its ports can run code on all machines. It lies in the home folder, which they share.
ray get-auth-token --generate > /dev/null
export RAY_AUTH_MODE=token

"${each[@]}" --nodelist="$head" ray start --block --head --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" &
sleep 20
if (( SLURM_NNODES > 1 )); then
  srun --overlap --ntasks=$((SLURM_NNODES - 1)) --nodes=$((SLURM_NNODES - 1)) --exclude="$head" \
    ray start --block --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" &
fi

# The run is told before the job's time ends: it saves itself and puts the job back, in which it goes on by itself.
"${each[@]}" --nodelist="$head" torchrl-lightning-train collector=ray "$@" &
run=$!
trap 'kill -USR1 "$run"' USR1
wait "$run" || wait "$run" # a signal ends the first
