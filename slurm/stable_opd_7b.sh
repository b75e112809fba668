#!/bin/bash
# The paper's 7B run: Qwen2.5-Math-7B taught by OpenThinker3-7B, Stable-OPD, 800 steps (configs/stable_opd_7b.yaml).
#
# Resources: one node of 8 H200, for at most 24 hours at a time; by its plan 8 GPUs of 80 GB are enough (GPU=h100).
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_7b.sh
#   Fewer GPUs a node: RANKS_PER_NODE=4 sbatch --gpus-per-node=4 slurm/stable_opd_7b.sh
#   (four of 80 GB need train.recompute=selective too)
#   Rollouts on SGLang nodes of their own, here two trainer nodes and one server node:
#     SERVER_NODES=1 sbatch --nodes=3 slurm/stable_opd_7b.sh
# Before the time limit, on preemption and after a lost node it saves and queues itself again; each start resumes.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_7b.sh kl.beta=0.03 run.name=beta_03
#   bash slurm/stable_opd_7b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_7b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900
#SBATCH --output=%x-%j.out
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_7b.yaml "$@"
