# shellcheck shell=bash
# What the batch scripts of this folder share: one allocation is checked, split into trainer and server nodes, run,
# judged, and queued again when that is the remedy. A script states its resources and calls `run_on_cluster`.
# Settings are environment variables (`VENV=/shared/venv sbatch slurm/...`), each below with its default and its reason.
# Not here: what one rank does (rank.sh), server nodes (servers.sh), the checks of a node (preflight.py), training.
set -uo pipefail

# ---- where things are -------------------------------------------------------------------------------------------
: "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}"   # the repository, on a file system that every node sees
: "${VENV:=$ROOT/.venv}"                 # virtual environment on that file system; unused with a container
: "${CONTAINER_IMAGE:=}"                 # a pyxis image (path.sqsh or registry#image:tag); empty: no container
: "${CONTAINER_MOUNTS:=$ROOT:$ROOT}"     # add the model's and the data's directories
: "${LOG_DIR:=$ROOT/runs/slurm/${SLURM_JOB_NAME:-job}-${SLURM_JOB_ID:-0}}" # verdict.json, attempt_N/rank_00000.log ...

# ---- shape ------------------------------------------------------------------------------------------------------
: "${RANKS_PER_NODE:=8}"                 # one process per GPU
: "${SERVER_NODES:=0}"                   # the last nodes of the allocation run SGLang; 0: rollouts come from the
                                         # trainer's nodes, as rollout.engine and rollout.sglang.placement say
: "${SERVERS_PER_NODE:=1}"                # each data-parallel rank of the trainer needs a server of its own
: "${SERVER_COMMAND:=}"                  # in place of `python -m stable_opd_mcore serve`
: "${SERVER_TIMEOUT:=900}"               # seconds until all servers must answer /health; weights load from shared disk
: "${SERVER_RESTARTS:=5}"                # times one server may die before it is left dead

# ---- checks before the start ------------------------------------------------------------------------------------
: "${PREFLIGHT:=on}"                     # off: only read the config
: "${REQUIRE_GPU:=1}"                    # RANKS_PER_NODE healthy GPUs on every node
: "${MIN_FREE_GIB:=200}"                 # at the run's directory: a 7B checkpoint with its optimizer is about 100 GiB
: "${MIN_ALLREDUCE_GBPS:=100}"           # GB/s over all GPUs (H200 nodes with NVLink and 8x400G reach over 300); 0: skip
: "${PREFLIGHT_TIMEOUT:=300}"            # seconds; a node that has not answered by then is bad

# ---- when it stops ----------------------------------------------------------------------------------------------
: "${MAX_REQUEUES:=50}"                  # how often the job may start again in all
: "${MAX_HANGS:=3}"                      # of these, after the watchdog ended it
: "${NETWORK_INTERFACE:=}"               # e.g. bond0, where the default route is not the cluster's own network

# shellcheck source=slurm/servers.sh
source "$ROOT/slurm/servers.sh"

ATTEMPT=${SLURM_RESTART_COUNT:-0}
export ATTEMPT_DIR=$LOG_DIR/attempt_$ATTEMPT
STOP_WANTED='' # USR1: the scheduler wants the nodes back soon; TERM: Slurm is ending the job itself

log() { echo "$(date +%FT%T) [attempt $ATTEMPT] $*"; }

# run_on_cluster SUBCOMMAND CONFIG [--dry-run] [key=value ...]: `stable-opd SUBCOMMAND CONFIG key=value ...` on all ranks
run_on_cluster() {
  local dry_run='' subcommand=$1 argument
  COMMAND_LINE=("$2")
  shift 2
  for argument in "$@"; do
    case $argument in
      --dry-run) dry_run=yes ;;
      *.yaml | *.yml) COMMAND_LINE[0]=$argument ;;
      *) COMMAND_LINE+=("$argument") ;;
    esac
  done
  if [ -n "$CONTAINER_IMAGE" ]; then PYTHON=(python3); else PYTHON=("$VENV/bin/python"); fi
  split_nodes || return 2
  set_environment
  TRAINER=("${PYTHON[@]}" -m stable_opd_mcore "$subcommand" "${COMMAND_LINE[@]}")
  if ((SERVER_NODES > 0)); then connect_servers; fi
  if [ -n "$dry_run" ]; then describe; return 0; fi

  mkdir -p "$ATTEMPT_DIR"/{ranks,exits,preflight}
  ln -sfn "attempt_$ATTEMPT" "$LOG_DIR/current"
  trap 'STOP_WANTED=${STOP_WANTED:-USR1}; log "USR1: the nodes are wanted back soon"' USR1
  trap 'STOP_WANTED=TERM; log "TERM: Slurm is ending the job"; touch "$ATTEMPT_DIR/servers_stop"' TERM
  log "trainers ${TRAINER_NODES[*]}, servers ${SERVER_NODE_NAMES[*]:-none}, logs $ATTEMPT_DIR"
  check_nodes || return $?
  if ((SERVER_NODES > 0)); then start_servers || return $?; fi
  run_trainer
  stop_servers
  judge
}

# ---- the allocation ---------------------------------------------------------------------------------------------
split_nodes() {
  local -a nodes
  if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  else # a dry run before submission: as many as the script asks for
    local count
    count=$(sed -nE 's/^#SBATCH --nodes=([0-9]+).*/\1/p' "$0")
    mapfile -t nodes < <(seq -f 'node%g' "${count:-1}")
  fi
  local trainers=$((${#nodes[@]} - SERVER_NODES))
  if ((trainers < 1)); then
    log "SERVER_NODES=$SERVER_NODES of ${#nodes[@]} nodes leaves no trainer: sbatch --nodes=$((SERVER_NODES + 1)) or more"
    return 2
  fi
  TRAINER_NODES=("${nodes[@]:0:trainers}")
  SERVER_NODE_NAMES=("${nodes[@]:trainers}")
}

resolved() { getent ahostsv4 "$1" | awk '$1 !~ /^127\./ {print $1; exit}'; }

# IPv4 address of a node. The resolver may not know it, or only as 127.0.1.1, as Debian's machines know themselves: then
# Slurm may, and this machine's own is the one on the way to another node.
address_of() {
  local found other
  found=$(resolved "$1")
  if [ -z "$found" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    found=$(scontrol -o show node "$1" | sed -nE 's/.* NodeAddr=(\S+).*/\1/p')
    [[ $found =~ ^[0-9.]+$ ]] || found=$(resolved "$found") # unless stated, it is the node's name
  fi
  for other in "${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}"; do
    if [ -n "$found" ] || [ "$1" != "${SLURMD_NODENAME:-$(hostname -s)}" ]; then break; fi
    other=$(resolved "$other")
    [ -z "$other" ] || found=$(ip -4 route get "$other" | sed -nE 's/.* src (\S+).*/\1/p')
  done
  echo "${found:-$1}"
}

set_environment() {
  MASTER_ADDR=$(address_of "${TRAINER_NODES[0]}")
  # One per job: a fixed one collides where nodes are shared. Servers have theirs 10000 above, below Linux's own (32768).
  MASTER_PORT=$((12000 + ${SLURM_JOB_ID:-0} % 10000))
  export MASTER_ADDR MASTER_PORT
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
  export PYTHONFAULTHANDLER=1                 # a rank that crashes in C leaves its Python stack in its log
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}  # compute nodes without internet fail at once, not after time-outs
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}       # what fails is in the log, at no cost
  export CUDA_DEVICE_MAX_CONNECTIONS=1        # Megatron on Hopper: communication queued before compute must start first
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=1    # a collective that fails or times out ends its rank instead of hanging it
  if ((SERVER_NODES > 0)); then
    export NCCL_CUMEM_ENABLE=0                # SGLang sets it in its processes; both ends of the weight group must agree
  fi
  if [ -n "$NETWORK_INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME=$NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE
  fi
}

# step NAME NODES RANKS_PER_NODE: the srun command, in $STEP, for a step on these comma-separated nodes
step() {
  local -a nodes
  IFS=, read -ra nodes <<<"$2"
  local cpus=$((${SLURM_CPUS_ON_NODE:-$3} / $3))
  STEP=(srun --job-name="$1" --nodes="${#nodes[@]}" --nodelist="$2" --ntasks-per-node="$3"
    --ntasks=$((${#nodes[@]} * $3)) --cpus-per-task=$((cpus > 0 ? cpus : 1)) --overlap --export=ALL --chdir="$ROOT")
  if [ -n "$CONTAINER_IMAGE" ]; then
    STEP+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$ROOT")
  fi
}

joined() { local IFS=,; echo "$*"; }

step_id() { squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v name="$1" '$2 == name {print $1}'; }

# Never signal srun itself: it kills its step at once. Slurm passes the signal to the step's processes.
signal_step() {
  local id
  id=$(step_id "$2")
  # Slurm 22.05 delivers the signal and says "Invalid job id" all the same
  [ -z "$id" ] || scancel --signal="$1" "$id" 2>/dev/null
}

describe() {
  step trainer "$(joined "${TRAINER_NODES[@]}")" "$RANKS_PER_NODE"
  echo "# logs and verdict: $LOG_DIR"
  echo "# on ${#TRAINER_NODES[@]} trainer node(s), rendezvous at $MASTER_ADDR:$MASTER_PORT:"
  printf '%q ' "${STEP[@]}" "$ROOT/slurm/rank.sh" "${TRAINER[@]}"
  echo
  local index
  for index in "${!SERVER_NODE_NAMES[@]}"; do
    step "server_$index" "${SERVER_NODE_NAMES[index]}" 1
    echo "# on server node ${SERVER_NODE_NAMES[index]}, trainers start when all its servers answer /health:"
    server_command "$index"
    printf '%q ' "${STEP[@]}" "${SERVER[@]}"
    echo
  done
}

# ---- checks before the start ------------------------------------------------------------------------------------
# Writes attempt_N/run_directory; a bad node is named, and the job queued again without it.
check_nodes() {
  local -a all=("${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}") bad=()
  local notes=$ATTEMPT_DIR/preflight node index
  echo "$SLURM_JOB_ID.$ATTEMPT" >"$notes/token"
  step preflight "$(joined "${all[@]}")" 1
  timeout "$PREFLIGHT_TIMEOUT" "${STEP[@]}" --output="$notes/node_%t.log" "${PYTHON[@]}" slurm/preflight.py node "$notes" \
    --checks="$PREFLIGHT" --token="$SLURM_JOB_ID.$ATTEMPT" --gpus=$((REQUIRE_GPU * RANKS_PER_NODE)) \
    --min-free-gib="$MIN_FREE_GIB" --head="${TRAINER_NODES[0]}" --port="$MASTER_PORT" -- "${COMMAND_LINE[@]}" 2>"$notes/srun.log"
  cat "$notes/srun.log" >&2
  if ! compgen -G "$notes/node_*.log" >/dev/null; then # not one task: no node's fault
    requeue requeued "Slurm did not start the checks: $(tail -n 1 "$notes/srun.log")"
    return 1
  fi
  if [ -s "$notes/config_error" ]; then
    verdict failed "the config: $(cat "$notes/config_error")"
    return 2
  fi
  for index in "${!all[@]}"; do
    node=${all[index]}
    if [ ! -e "$notes/$node.good" ]; then
      log "preflight: $node: $(cat "$notes/$node.bad" 2>/dev/null || tail -n 1 "$notes/node_$index.log" || echo 'no answer')"
      bad+=("$node")
    fi
  done
  if [ ${#bad[@]} = 0 ] && [ "$PREFLIGHT" = on ] && [ "$MIN_ALLREDUCE_GBPS" != 0 ]; then
    check_network
  fi
  if [ ${#bad[@]} = 0 ]; then
    RUN_DIRECTORY=$(cat "$notes/run_directory")
    log "preflight passed: all-reduce $(cat "$notes/${TRAINER_NODES[0]}.network_good" 2>/dev/null || echo skipped); run directory $RUN_DIRECTORY"
  elif [ -n "$STOP_WANTED" ]; then
    requeue stopped "asked to stop during the checks"
    return 1
  else
    exclude_nodes "requeued" "${bad[@]}"
    return 1
  fi
}

# All-reduce over every trainer rank, then over each node and each pair of neighbours when that was slow: names the node.
check_network() {
  step network "$(joined "${TRAINER_NODES[@]}")" "$RANKS_PER_NODE"
  timeout "$PREFLIGHT_TIMEOUT" "${STEP[@]}" --kill-on-bad-exit=1 --output="$notes/network_%5t.log" "$ROOT/slurm/rank.sh" \
    "${PYTHON[@]}" slurm/preflight.py network "$notes" --floor="$MIN_ALLREDUCE_GBPS"
  rm -f "$ATTEMPT_DIR"/exits/* "$ATTEMPT_DIR"/ranks/*
  for node in "${TRAINER_NODES[@]}"; do
    if [ ! -e "$notes/$node.network_good" ]; then
      log "preflight: $node: $(cat "$notes/$node.network_bad" 2>/dev/null || echo "the all-reduce did not finish; $notes/network_*.log")"
      bad+=("$node")
    fi
  done
}

# exclude_nodes VERDICT NODE...: a held job may be told which nodes to avoid, a running one may not.
exclude_nodes() {
  local verdict=$1 excluded try
  shift
  excluded=$(scontrol -o show job "$SLURM_JOB_ID" | sed -nE 's/.* ExcNodeList=(\S+).*/\1/p')
  excluded=$(joined ${excluded:+"${excluded/(null)/}"} "$@")
  if ((ATTEMPT >= MAX_REQUEUES)); then
    verdict failed "bad node(s) $*; submit again with --exclude=${excluded#,}"
    return
  fi
  verdict "$verdict" "bad node(s) $* excluded; queued again"
  trap '' TERM CONT
  scontrol requeuehold "$SLURM_JOB_ID"
  for try in 1 2 3 4 5 6 7 8; do
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded#,}" && break
    sleep "0.$try"
  done
  scontrol release "$SLURM_JOB_ID"
}

# ---- the trainer ------------------------------------------------------------------------------------------------
# Waits in the foreground of a loop: a trap runs at once while bash waits for a child, never while it runs one.
run_trainer() {
  local trainer since=0
  rm -rf "$RUN_DIRECTORY"/{REQUEUE,stacks} # an earlier attempt's, which would be taken for this one's
  if [ -n "$STOP_WANTED" ]; then return; fi
  step trainer "$(joined "${TRAINER_NODES[@]}")" "$RANKS_PER_NODE"
  "${STEP[@]}" --kill-on-bad-exit=1 --wait=60 --output="$ATTEMPT_DIR/rank_%5t.log" "$ROOT/slurm/rank.sh" "${TRAINER[@]}" &
  trainer=$!
  while kill -0 "$trainer" 2>/dev/null; do
    if [ "$STOP_WANTED" = USR1 ] && ((since++ % 20 == 0)); then # again and again: ranks that still start do not listen yet
      log "asking the trainer to stop after its step"
      signal_step USR1 trainer
    fi
    sleep 1 &
    wait $!
  done
  wait "$trainer"
  log "trainer step ended with code $?"
}

# ---- what came of it --------------------------------------------------------------------------------------------
judge() {
  local world=$((${#TRAINER_NODES[@]} * RANKS_PER_NODE)) hung='' hangs
  local -a ended=()
  mapfile -t ended < <(cd "$ATTEMPT_DIR/exits" && grep -H . rank_????? 2>/dev/null)
  if [ -e "$RUN_DIRECTORY/REQUEUE" ]; then
    requeue stopped "stopped after a step, checkpoint $(cat "$RUN_DIRECTORY/REQUEUE")"
    return
  fi
  if [ ${#ended[@]} = "$world" ] && ! grep -qv '^0 ' "$ATTEMPT_DIR"/exits/rank_?????; then
    verdict "done" "all $world ranks ended well"
    return 0
  fi
  if hung=$(hung_ranks); then
    log "hang: stacks follow"
    cat "$RUN_DIRECTORY"/stacks/rank_?????.txt
    if [ -z "$STOP_WANTED" ] && leave_out_silent_nodes; then return 1; fi
    hangs=$(grep -c '"verdict": "hang"' "$LOG_DIR/verdicts.jsonl" 2>/dev/null)
    if ((${hangs:-0} >= MAX_HANGS)); then
      verdict failed "hung $MAX_HANGS times before; $hung"
      return 1
    fi
    requeue hang "$hung"
    return
  fi
  if [ -n "$STOP_WANTED" ]; then
    requeue stopped "ended before it could save; the newest checkpoint stands"
    return
  fi
  name_culprit
}

# Whose fault: ranks that stood still, as the others saw it (watchdog.py), else those whose stack is not in a collective.
hung_ranks() {
  local file name why='stood still' suspects=() places=''
  grep -qs . "$RUN_DIRECTORY"/stacks/rank_?????.txt || return 1
  mapfile -t suspects < <(cat "$RUN_DIRECTORY/stacks/silent" 2>/dev/null)
  if [ ${#suspects[@]} = 0 ]; then
    why='not waiting for others'
    for file in "$RUN_DIRECTORY"/stacks/rank_?????.txt; do
      # the main thread comes last in a dump, its innermost frame first
      awk '/^(Current t|T)hread /{getline; inner = $0} END {exit inner !~ /torch\/distributed/}' "$file" ||
        suspects+=("$(basename "$file" .txt)")
    done
  fi
  for name in "${suspects[@]}"; do places+=" $name on $(cat "$ATTEMPT_DIR/ranks/$name")"; done
  echo "no step within fault.watchdog_minutes${places:+; $why:$places}"
}

# Nodes that do not run a command any more: what ran there did not fail, it is gone. One step a node, for a step over
# several fails as a whole. This node runs the script, so it is there.
silent_nodes() {
  local node others=("${TRAINER_NODES[@]:1}" "${SERVER_NODE_NAMES[@]}")
  for node in "${others[@]}"; do
    step alive "$node" 1
    timeout 40 "${STEP[@]}" --output=none touch "$ATTEMPT_DIR/alive_$node" 2>/dev/null &
  done
  wait
  for node in "${others[@]}"; do
    [ -e "$ATTEMPT_DIR/alive_$node" ] || echo "$node"
  done
}

# Whether there were any; Slurm itself may need minutes to notice.
leave_out_silent_nodes() {
  local -a silent
  mapfile -t silent < <(silent_nodes)
  ((${#silent[@]} > 0)) || return 1
  exclude_nodes "lost" "${silent[@]}"
  return 0
}

# The first that a signal killed, else the first that failed: the others fail because it is gone.
name_culprit() {
  local rank node code last
  if leave_out_silent_nodes; then return 1; fi
  read -r rank code node < <(cd "$ATTEMPT_DIR/exits" && awk '
    $1 != 0 && $1 != 143 {order = ($1 > 128 ? 0 : 1); print order, $2, FILENAME, $1, $3}' rank_????? 2>/dev/null |
    sort -k1,1n -k2,2n | awk '{print $3, $4, $5; exit}')
  if [ -z "${rank:-}" ]; then
    requeue lost "the trainer ended without a word from its ranks"
    return
  fi
  last=$(grep -v -e '^\s*$' -e '/rank\.sh: line ' "$ATTEMPT_DIR/$rank.log" | tail -n 1)
  verdict failed "$rank on $node ended with code $code: $last" "$((10#${rank#rank_}))" "$node" "$code"
  return 1
}

# requeue VERDICT REASON: start again where the newest checkpoint stands, unless Slurm is ending the job itself
requeue() {
  if [ "$STOP_WANTED" = TERM ]; then # preemption queues it again by itself; after scancel, submit it again to go on
    verdict "$1" "$2"
    return 0
  fi
  if ((ATTEMPT >= MAX_REQUEUES)); then
    verdict failed "$2; started $((ATTEMPT + 1)) times, MAX_REQUEUES=$MAX_REQUEUES"
    return 1
  fi
  verdict "$1" "$2; queued again"
  trap '' TERM CONT USR1
  scontrol requeue "$SLURM_JOB_ID" # the exit code of this attempt counts no more
}

json() { # the text as a JSON string
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "$(tr -d '\000-\037' <<<"$text")"
}

# verdict NAME REASON [RANK NODE CODE]: verdict.json is the last one, verdicts.jsonl all
verdict() {
  local line
  line="{\"verdict\": \"$1\", \"reason\": $(json "$2"), \"job\": $SLURM_JOB_ID, \"attempt\": $ATTEMPT"
  line+=", \"rank\": ${3:-null}, \"node\": $(if [ -n "${4:-}" ]; then json "$4"; else echo null; fi), \"exit_code\": ${5:-null}"
  line+=", \"time\": \"$(date +%FT%T%z)\"}"
  echo "$line" >>"$LOG_DIR/verdicts.jsonl"
  echo "$line" >"$LOG_DIR/verdict.json"
  log "verdict: $1: $2"
}
