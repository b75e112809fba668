#!/bin/bash
# The supervised run before distillation: the student's base model on golden solutions (configs/sft_7b.yaml).
#
# Resources: one node of 8 GPUs with 80 GB or more, for at most 12 hours at a time.
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/sft.sh
#   Fewer GPUs a node: RANKS_PER_NODE=4 sbatch --gpus-per-node=4 slurm/sft.sh
# The trained model, <run>/model, is the student.path of the distillation run.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/sft.sh configs/sft_1p5b.yaml             the 1.5B student
#   bash slurm/sft.sh --dry-run             prints what would run
#SBATCH --job-name=sft
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
run_on_cluster train configs/sft_7b.yaml "$@"
