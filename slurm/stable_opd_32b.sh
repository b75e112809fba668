#!/bin/bash
# An example over several nodes: a 32B student (Qwen2.5-32B) taught by its 32B reasoning sibling, tensor 8 x pipeline 2.
#
# Resources: four trainer nodes and two SGLang nodes of 8 H200, for at most 48 hours at a time. Not run at this size yet.
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/stable_opd_32b.sh
#   Fewer GPUs a node: RANKS_PER_NODE=4 sbatch --gpus-per-node=4 slurm/stable_opd_32b.sh
#   Other splits: SERVER_NODES=4 sbatch --nodes=12 ...; trainer GPUs must be a multiple of parallel.tensor x pipeline.
# Settings: arguments are passed to `stable-opd train`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/stable_opd_32b.sh train.steps=200
#   bash slurm/stable_opd_32b.sh --dry-run             prints what would run
#SBATCH --job-name=stable_opd_32b
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
MIN_FREE_GIB=${MIN_FREE_GIB:-1500} # a checkpoint with its optimizer is about 450 GiB, three are kept
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster train configs/stable_opd_32b.yaml "$@"
