#!/bin/bash
# Run on all GPUs of one machine, without Slurm: launch/torchrun.sh train configs/stable_opd_1p5b.yaml kl.beta=0.03
#
# Resources: one process per GPU that CUDA_VISIBLE_DEVICES names, or per GPU, or one process on a machine without GPUs;
# RANKS=4 sets another number.
#   VENV=/path/to/venv   the virtual environment (default: .venv of this repository)
#   AFTER=A:B DONE=FILE     for a chain of stages: fail unless files A and B exist, create FILE on success
# After Ctrl-C, SIGTERM or SIGUSR1 all ranks save after their step, and the same command resumes; Ctrl-C twice ends at once.
# Not here: several nodes (slurm/), server nodes.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
GPUS=$(nvidia-smi --list-gpus 2>/dev/null | grep -c ^GPU || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # a part of them; empty or -1: none
  IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES/#-1/}"
  GPUS=$((${#visible[@]} < GPUS ? ${#visible[@]} : GPUS))
fi
RANKS=${RANKS:-$((GPUS > 0 ? GPUS : 1))}

if [ "${1:-}" = --dry-run ]; then
  shift
  show='echo'
fi
IFS=: read -ra before <<<"${AFTER:-}"
for file in "${before[@]}"; do
  if [ ! -e "$file" ]; then
    echo "not started: a stage before it did not succeed ($file is missing)" >&2
    exit 1
  fi
done

if [ "${1:-}" = report ]; then RANKS=1; fi

# By default the agent kills its workers 30 s after a signal, too soon for a checkpoint, and SIGUSR1 kills the agent.
# Without --local-addr its ranks look for this machine by its full name, which a name server may not know.
launch=("$VENV/bin/python" -m torch.distributed.run --standalone --local-addr=localhost --nproc-per-node="$RANKS"
  "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1" --shutdown-timeout=600 -m stable_opd_mcore "$@")
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1
cd "$ROOT"
if [ -n "${show:-}" ]; then
  shown=(env --chdir="$ROOT" PYTHONPATH="$PYTHONPATH" CUDA_DEVICE_MAX_CONNECTIONS=1 "${launch[@]}")
  printf '%q ' "${shown[@]}"
  echo
  exit
fi

# The agent runs in the background, because bash runs a trap at once only while it waits. Without job control (-m) bash
# would start it with SIGINT ignored.
agent=''
stopped_by=''
# shellcheck disable=SC2329 # called by the traps
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
  [ -n "$signalled" ] || break # a signal ends `wait` early, with another code than the agent's
done
[ -z "$stopped_by" ] || echo "stopped by SIG$stopped_by; the same command resumes from the newest checkpoint" >&2
if [ "$code" = 0 ] && [ -n "${DONE:-}" ]; then touch "$DONE"; fi
exit "$code"
