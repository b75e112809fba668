#!/bin/bash
# One rank of a Slurm step: gives its command the variables torchrun would set, passes signals on to it, and leaves a
# note of how it ended in $ATTEMPT_DIR/exits, for srun reports the ranks it killed and hides the one that failed first.
# Called by common.sh as `srun ... rank.sh COMMAND ...`; needs ATTEMPT_DIR, MASTER_ADDR, MASTER_PORT.
# Not here: what is run, and what its end means.
set -u

export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%(*}
name=$(printf 'rank_%05d' "$RANK")
echo "$SLURMD_NODENAME" >"$ATTEMPT_DIR/ranks/$name"

# Clusters that track processes by cgroup signal only this shell, not the command below it.
child=''
signalled=''
# shellcheck disable=SC2329 # called by the traps
pass_on() {
  signalled=yes
  [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

(
  trap '' USR1 # until the trainer listens, a request to stop must not kill it; common.sh repeats the request
  exec "$@"
) &
child=$!
while :; do
  signalled=''
  wait "$child"
  code=$?
  [ -n "$signalled" ] || break # a signal ends `wait` early, with a code that is not the command's
done

echo "$code $(date +%s.%N) $SLURMD_NODENAME" >"$ATTEMPT_DIR/exits/$name.partial"
mv "$ATTEMPT_DIR/exits/$name.partial" "$ATTEMPT_DIR/exits/$name"
exit "$code"
