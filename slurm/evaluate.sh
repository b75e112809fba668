#!/bin/bash
# Evaluate the trained model of a config's run, or evaluation.model, on the paper's six benchmarks; with
# evaluation.benchmarks=[] on data.eval instead. Queued again, it continues after the last stored responses.
#
# Resources: one node of 8 GPUs, for at most 4 hours.
#   sbatch options override the lines below: sbatch --nodes=4 --time=2-00:00:00 --partition=h200 --account=me slurm/evaluate.sh
#   Fewer GPUs a node: RANKS_PER_NODE=4 sbatch --gpus-per-node=4 slurm/evaluate.sh
# Settings: arguments are passed to `stable-opd evaluate`; a .yaml file among them replaces the config.
# Environment variables (virtual environment or container, checks, limits): see common.sh.
#   sbatch slurm/evaluate.sh                                    the trained model of configs/stable_opd_7b.yaml
#   sbatch slurm/evaluate.sh configs/baselines/oat_zero.yaml    another model, by name
#   sbatch slurm/evaluate.sh evaluation.model=runs/stable_opd_7b/checkpoints/step_000300
#   sbatch slurm/evaluate.sh 'evaluation.benchmarks=[math500,minerva]' evaluation.num_samples=4
#   bash slurm/evaluate.sh --dry-run             prints what would run
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --output=%x-%j.out
source "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}/slurm/common.sh" || {
  echo "submit from the repository's root, or set ROOT to it" >&2
  exit 2
}
run_on_cluster evaluate configs/stable_opd_7b.yaml "$@"
