#!/bin/bash
# An example with experts on both sides: Qwen3-30B-A3B taught by Qwen3-235B-A22B, tensor 4 x expert 8.
#
# Resources: two nodes of 8 H200, for at most 48 hours at a time. Not run at this size yet.
# A node's host memory holds the teacher while servers sample: about 1 TB in all.
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_30b_a3b.sh
#   Rollouts on SGLang nodes of their own, here two trainer nodes and one server node:
#     SERVER_NODES=1 sbatch --nodes=3 slurm/stable_opd_30b_a3b.sh 'memory.offload=[frozen]'
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_30b_a3b.sh train.steps=200
#   bash slurm/stable_opd_30b_a3b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_30b_a3b
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@1800
#SBATCH --output=%x-%j.out
MIN_FREE_GIB=${MIN_FREE_GIB:-1500} # a checkpoint with its optimizer is about 400 GiB, three are kept
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_30b_a3b.yaml "$@"
