#!/bin/bash
# All GPUs of one machine, without Slurm: launch/torchrun.sh train configs/stable_opd_1p5b.yaml kl.beta=0.03
#
# Resources: one process per GPU found, one process where there is none; RANKS=4 asks for another number.
#   VENV=/path/to/venv   the virtual environment (.venv here)
#   AFTER=FILES DONE=FILE   for a chain of stages: do nothing unless FILES exist, leave FILE when all went well
# Ctrl-C ends it at once; SIGTERM or SIGUSR1 to it lets all ranks save after their step, and the same command resumes.
# Not here: several nodes (slurm/), server nodes.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
GPUS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
RANKS=${RANKS:-$((GPUS > 0 ? GPUS : 1))}

if [ "${1:-}" = --dry-run ]; then
  shift
  show='echo'
fi
for file in ${AFTER:-}; do
  if [ ! -e "$file" ]; then
    echo "not started: what it depends on did not end well ($file is missing)" >&2
    exit 1
  fi
done

if [ "${1:-}" = report ]; then RANKS=1; fi

# The agent would kill its workers 30 s after a signal, and die of SIGUSR1 itself; a checkpoint takes longer.
launch=("$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node="$RANKS"
  "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1" --shutdown-timeout=600 -m stable_opd_mcore "$@")
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1
cd "$ROOT"
if [ -n "${show:-}" ]; then
  echo "${launch[@]}"
  exit
fi

# A trap runs at once only while bash waits for a child; with job control (-m) the child still listens to SIGINT.
agent=''
stopped_by=''
# shellcheck disable=SC2317 # called by the traps
pass_on() {
  signalled=yes stopped_by=$1
  [ -z "$agent" ] || kill -s "$1" "$agent" 2>/dev/null || true
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
set -m
"${launch[@]}" &
agent=$!
while :; do
  signalled='' code=0
  wait "$agent" || code=$?
  [ -n "$signalled" ] || break # a signal ends `wait` early, with a code that is not the command's
done
[ -z "$stopped_by" ] || echo "stopped by SIG$stopped_by; the same command goes on from the newest checkpoint" >&2
if [ "$code" = 0 ] && [ -n "${DONE:-}" ]; then touch "$DONE"; fi
exit "$code"
