#!/bin/bash
# The paper's 1.5B run: Qwen2.5-Math-1.5B taught by OpenThinker3-7B, Stable-OPD (configs/stable_opd_1p5b.yaml).
#
# Resources: one node of 8 H200, for at most 12 hours at a time.
#   GPUs of 80 GB: GPU=h100 sbatch slurm/stable_opd_1p5b.sh train.recompute=selective
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_1p5b.sh
#   Fewer GPUs a node: RANKS_PER_NODE=4 sbatch --gpus-per-node=4 slurm/stable_opd_1p5b.sh
# Before the time limit, on preemption and after a lost node it saves and queues itself again; each start resumes.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_1p5b.sh mixture.lambda=0.3 run.name=lambda_3
#   bash slurm/stable_opd_1p5b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_1p5b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.out
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_1p5b.yaml "$@"
