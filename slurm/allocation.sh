# shellcheck shell=bash
# The checks of an allocation before anything runs on it, and the container's end. Part of common.sh, whose settings and variables it uses.
# Not here: what is checked (preflight.py), what a fault means (verdict.py).

# check_nodes SUBCOMMAND: run preflight.py on every node; it writes attempt_N/preflight. Returns 0 when the trainer may start.
check_nodes() {
  local -a all=("${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}")
  local -a servers=()
  local notes=$ATTEMPT_DIR/preflight
  if ((${#SERVER_NODE_NAMES[@]})) && [ -z "$SERVER_COMMAND" ]; then
    servers=(--servers="$(joined "${SERVER_NODE_NAMES[@]}")")
  fi
  echo "$SLURM_JOB_ID.$ATTEMPT" >"$notes/token"
  step preflight "$(joined "${all[@]}")" 1
  timeout "$PREFLIGHT_TIMEOUT" "${STEP[@]}" --output="$notes/node_%t.log" "${PYTHON[@]}" slurm/preflight.py node "$notes" \
    --checks="$PREFLIGHT" --token="$SLURM_JOB_ID.$ATTEMPT" --gpus=$((REQUIRE_GPU * RANKS_PER_NODE)) \
    --min-free-gib="$MIN_FREE_GIB" --head="${TRAINER_NODES[0]}" --port="$MASTER_PORT" --subcommand="$1" \
    "${servers[@]}" -- \
    "${COMMAND_LINE[@]}" 2>"$notes/srun.log"
  cat "$notes/srun.log" >&2
  if ! compgen -G "$notes/node_*.log" >/dev/null; then # Slurm started no task, so no node is at fault
    judge record requeued "Slurm did not start the checks: $(tail -n 1 "$notes/srun.log")" --action=requeue
    return 1
  fi
  judge preflight --nodes "${all[@]}" || return 1
  if [ "$PREFLIGHT" = on ] && [ "$MIN_ALLREDUCE_GBPS" != 0 ]; then
    check_network
    judge network || return 1
  fi
  RUN_DIRECTORY=$(cat "$notes/run_directory") # a path inside the container; only rank.sh uses it
  export RUN_DIRECTORY
  log "preflight passed: all-reduce $(cat "$notes/network_good" 2>/dev/null || echo skipped); run directory $RUN_DIRECTORY"
}

# One all-reduce over every trainer rank.
check_network() {
  step network "$(joined "${TRAINER_NODES[@]}")" "$RANKS_PER_NODE"
  timeout "$PREFLIGHT_TIMEOUT" "${STEP[@]}" --kill-on-bad-exit=1 --output="$notes/network_%5t.log" "$ROOT/slurm/rank.sh" \
    "${PYTHON[@]}" slurm/preflight.py network "$notes" --floor="$MIN_ALLREDUCE_GBPS"
  rm -f "$ATTEMPT_DIR"/exits/* "$ATTEMPT_DIR"/ranks/*
}

# pyxis keeps a named container on the node's disk after the job, unless its container_scope is "job". Not where the job
# has no time for it: then `enroot remove` is the user's.
remove_container() {
  local node end
  local -a removals=()
  [ -n "$CONTAINER_IMAGE" ] && [ "$STOP_WANTED" != TERM ] || return 0
  end=$(job_end)
  if [ -n "$end" ] && ((end - $(date +%s) < 3 * LAST_SECONDS)); then return 0; fi
  for node in "${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}"; do
    CONTAINER_IMAGE='' step container "$node" 1
    timeout $((2 * LAST_SECONDS)) "${STEP[@]}" --output=none enroot remove --force "pyxis_$CONTAINER_NAME" 2>/dev/null &
    removals+=($!)
  done
  for node in "${removals[@]}"; do wait "$node"; done
}
