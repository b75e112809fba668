#!/bin/bash
# One HTML page over several runs: sbatch slurm/report.sh runs/a runs/b --output=report.html
#
# Resources: one core of one node for some minutes; sbatch options win: sbatch --nodes=1 --partition=cpu slurm/report.sh
#   VENV=/shared/venv   the virtual environment (.venv of the submission directory)
#SBATCH --job-name=report
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=00:30:00
#SBATCH --signal=B:USR1@60
#SBATCH --output=%x-%j.out
set -euo pipefail
trap '' USR1 # too short to save anything
ROOT=${ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
cd "$ROOT"
if [ "${1:-}" = --dry-run ]; then
  shift
  show=yes
fi
report=(env --chdir="$ROOT" PYTHONPATH="$ROOT" "${VENV:-$ROOT/.venv}/bin/python" -m stable_opd_mcore report "$@")
if [ -n "${show:-}" ]; then
  printf '%q ' "${report[@]}"
  echo
else
  "${report[@]}"
fi
