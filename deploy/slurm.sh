#!/bin/bash
# A job that serves, or one that trains on all GPUs of its nodes. Give the cluster's own account and partition on the command line.
#
#   sbatch deploy/slurm.sh serve model=Qwen/Qwen3-4B-Instruct-2507
#   sbatch --nodes=2 deploy/slurm.sh train recipes.rl_basic model_name=Qwen/Qwen3-4B-Instruct-2507 log_path=$PWD/runs/first
#
# Two minutes before its time is over (and when it is preempted) every process gets SIGTERM: a server ends what it has begun, a run
# saves its step. Submitted again with the same words a run goes on; --dependency=singleton lets jobs of one name follow each other.
# The checkout with its .venv lies where the job is submitted, on a filesystem that all nodes see.
#SBATCH --job-name=tinker-local
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

what=${1:?serve or train}
shift
source .venv/bin/activate
export PYTHONUNBUFFERED=1
# On a disk that all nodes see: checkpoints outlive the job.
export TINKER_LOCAL_HOME=${TINKER_LOCAL_HOME:-$PWD/home}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

case $what in
serve)
    # Clients on other nodes: TINKER_BASE_URL=http://<this node>:8000, with a key of keys.txt (mode 600).
    echo "export TINKER_BASE_URL=http://$head:8000"
    srun --nodes=1 python -m tinker_local_backend.server host=0.0.0.0 api_keys_file=keys.txt "$@"
    ;;
train)
    srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
        --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
        -m "$@" behavior_if_log_dir_exists=resume
    ;;
*)
    echo "the first word must be serve or train, not $what" >&2
    exit 2
    ;;
esac
