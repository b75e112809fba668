#!/bin/bash
# One rank of a Slurm step: sets the variables that torchrun would set, forwards signals, and records the exit code in
# $ATTEMPT_DIR/exits. srun itself reports the ranks that it killed and hides the one that failed first.
# Called by common.sh as `srun ... rank.sh COMMAND ...`; needs ATTEMPT_DIR, MASTER_ADDR, MASTER_PORT.
# With RUN_DIRECTORY it also copies the outcome of the run and the stacks of a hang to $ATTEMPT_DIR/run. It runs inside the
# container, where RUN_DIRECTORY may be a path that the batch node does not have; ATTEMPT_DIR is the same on both sides.
# Not here: what is run, and the verdict on its end (verdict.py).
set -u

export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*}
name=$(printf 'rank_%05d' "$RANK")
files=()
if [ -n "${RUN_DIRECTORY:-}" ]; then files=("stacks/$name.txt"); fi
if [ -n "${RUN_DIRECTORY:-}" ] && [ "$RANK" = 0 ]; then files+=(REQUEUE DONE); fi
for file in "${files[@]}"; do rm -f "$RUN_DIRECTORY/$file"; done # left by an earlier attempt
echo "$SLURMD_NODENAME" >"$ATTEMPT_DIR/ranks/$name"

# copy_from_run FILE...: copy those that are not empty to $ATTEMPT_DIR/run
copy_from_run() {
  local file
  for file in "$@"; do
    [ -s "$RUN_DIRECTORY/$file" ] || continue
    mkdir -p "$ATTEMPT_DIR/run/stacks"
    cp "$RUN_DIRECTORY/$file" "$ATTEMPT_DIR/run/$file.$name" && mv "$ATTEMPT_DIR/run/$file.$name" "$ATTEMPT_DIR/run/$file"
  done
}

# Clusters that track processes by cgroup signal only this shell, not the command below it.
child=''
signalled=''
# shellcheck disable=SC2329 # called by the traps
forward() {
  signalled=yes
  [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

(
  trap '' USR1 # a request to stop must not kill the trainer before it listens; common.sh repeats the request
  exec "$@"
) &
child=$!
while :; do
  signalled=''
  wait "$child"
  code=$?
  [ -n "$signalled" ] || break # a signal ends `wait` early, with another code than the command's
done

copy_from_run "${files[@]}"
if [ -e "$ATTEMPT_DIR/run/stacks/$name.txt" ]; then # a hang; the step ends with the first rank that leaves
  sleep 5                                           # so that the other ranks also write and copy their stacks
fi
echo "$code $(date +%s.%N) $SLURMD_NODENAME" >"$ATTEMPT_DIR/exits/$name.partial"
mv "$ATTEMPT_DIR/exits/$name.partial" "$ATTEMPT_DIR/exits/$name"
exit "$code"
