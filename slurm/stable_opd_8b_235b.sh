#!/bin/bash
# An example of a dense student with a teacher of experts: Qwen3-8B taught by Qwen3-235B-A22B, pipeline 2 x expert 8.
#
# Resources: two trainer nodes and two SGLang nodes of 8 H200, for at most 24 hours at a time. Not run at this size yet.
#   sbatch options override the lines below: sbatch --nodes=6 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_8b_235b.sh
#   Other splits: SERVER_NODES=4 sbatch --nodes=12 ...; trainer GPUs must be a multiple of parallel.pipeline x parallel.expert.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_8b_235b.sh train.steps=200
#   bash slurm/stable_opd_8b_235b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_8b_235b
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@1800
#SBATCH --output=%x-%j.out
SERVER_NODES=${SERVER_NODES:-2}
MIN_FREE_GIB=${MIN_FREE_GIB:-450} # a checkpoint with its optimizer is about 110 GiB, three are kept
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_8b_235b.yaml "$@"
