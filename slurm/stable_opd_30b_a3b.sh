#!/bin/bash
# An example with experts on both sides: Qwen3-30B-A3B taught by Qwen3-235B-A22B, pipeline 2 x expert 8.
#
# Resources: four trainer nodes and two SGLang nodes of 8 H200, for at most 48 hours at a time. Not run at this size yet.
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_30b_a3b.sh
#   Other splits: SERVER_NODES=4 sbatch --nodes=12 ...; trainer GPUs must be a multiple of parallel.pipeline x parallel.expert.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_30b_a3b.sh train.steps=200
#   bash slurm/stable_opd_30b_a3b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_30b_a3b
#SBATCH --nodes=6
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@1800
#SBATCH --output=%x-%j.out
SERVER_NODES=${SERVER_NODES:-2}
MIN_FREE_GIB=${MIN_FREE_GIB:-1500} # a checkpoint with its optimizer is about 400 GiB, three are kept
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_30b_a3b.yaml "$@"
