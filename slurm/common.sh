# shellcheck shell=bash
# Functions that the batch scripts of this folder share. They check one allocation, split it into trainer and server
# nodes, run both, and queue the job again where that helps. A script states its resources and calls `run_on_cluster`.
# Settings are environment variables (`VENV=/shared/venv sbatch slurm/...`), each below with its default and its reason.
# Not here: the verdict on an attempt (verdict.py), one rank (rank.sh), server nodes (servers.sh), the checks of nodes
# (allocation.sh, preflight.py), training.
set -uo pipefail

# ---- where things are -------------------------------------------------------------------------------------------
: "${ROOT:=${SLURM_SUBMIT_DIR:-$PWD}}"   # the repository, on a file system that every node sees
: "${VENV:=$ROOT/.venv}"                 # virtual environment on that file system; unused with a container
: "${CONTAINER_IMAGE:=}"                 # a pyxis image (path.sqsh or registry#image:tag); empty: no container
: "${CONTAINER_MOUNTS:=$ROOT:$ROOT}"     # add the model's and the data's directories
: "${CACHE_DIR:=${CONTAINER_IMAGE:+$ROOT/runs/cache}}" # compiled kernels, which every node must be able to write;
                                         # empty: the home's ~/.cache, unless the shell sets the variables itself
: "${HOST_PYTHON:=}"                     # Python >= 3.8 on the batch node, for verdict.py; empty: VENV's, else python3
# The job as Slurm's commands name it: a task of an array is ARRAY_TASK, since SLURM_JOB_ID of one of them names all.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
: "${JOB:=${SLURM_JOB_ID:-0}}"
: "${LOG_DIR:=$ROOT/runs/slurm/${SLURM_JOB_NAME:-job}-$JOB}" # verdict.json, attempt_N/rank_00000.log ...

# ---- shape ------------------------------------------------------------------------------------------------------
: "${RANKS_PER_NODE:=8}"                 # one process per GPU
: "${SERVER_NODES:=0}"                   # the last nodes of the allocation run SGLang; 0: rollouts come from the
                                         # trainer's nodes, as rollout.engine and rollout.sglang.placement say
: "${GPU:=h200}"                          # h200 or h100: its memory says how many GPUs a server needs; cpu: a test
: "${SERVER_COMMAND:=}"                  # in place of `python -m stable_opd_mcore serve`
: "${SERVER_TIMEOUT:=1800}"              # seconds that servers have until all of them answer /health, the START of
                                         # serving/timeouts.py: with empty caches they first compile kernels
: "${SERVER_RESTARTS:=5}"                # how often in an hour a server node's command may end before the job fails

# ---- checks before the start ------------------------------------------------------------------------------------
: "${PREFLIGHT:=on}"                     # off: only read the config
: "${REQUIRE_GPU:=1}"                    # RANKS_PER_NODE healthy GPUs on every node
: "${PLAN:=on}"                          # off: start also where `stable-opd plan` says that memory does not fit
: "${CHECK:=on}"                        # off: do not run `stable-opd check` before the servers; `train` checks anyway
: "${MIN_FREE_GIB:=200}"                 # at the run's directory: a 7B checkpoint with its optimizer is about 100 GiB
: "${MIN_ALLREDUCE_GBPS:=100}"           # GB/s over all GPUs (H200 nodes with NVLink and 8x400G reach over 300); 0: skip
: "${PREFLIGHT_TIMEOUT:=900}"            # seconds until every node must have answered: it unpacks the image, and
                                         # imports torch from a cold file system

# ---- when it stops ----------------------------------------------------------------------------------------------
: "${MAX_REQUEUES:=50}"                  # how often the job may start again in all
: "${MAX_HANGS:=3}"                      # how often it may start again after the watchdog ended it
: "${LAST_SECONDS:=25}"                  # before the end of the job: the time to judge it and to queue it again
: "${NETWORK_INTERFACE:=}"               # e.g. bond0, where the default route is not the cluster's own network

# shellcheck source=slurm/servers.sh
source "$ROOT/slurm/servers.sh"
# shellcheck source=slurm/allocation.sh
source "$ROOT/slurm/allocation.sh"

ATTEMPT=${SLURM_RESTART_COUNT:-0}
export ATTEMPT_DIR=$LOG_DIR/attempt_$ATTEMPT
CONTAINER_NAME=stable_opd_${SLURM_JOB_ID:-0}_$ATTEMPT # a new one each attempt: a half removed one would be used again
STOP_WANTED='' # the signal this script got. USR1: the job has to end soon; TERM: Slurm is ending it now

log() { echo "$(date +%FT%T) [attempt $ATTEMPT] $*"; }

# run_on_cluster SUBCOMMAND CONFIG [--dry-run] [--option ...] [key=value ...]: `stable-opd SUBCOMMAND CONFIG key=value ...
# --option ...` on all ranks
run_on_cluster() {
  local dry_run='' subcommand=$1 argument
  COMMAND_LINE=("$2") # config and settings, of every command in the job
  OPTIONS=()          # those of SUBCOMMAND
  local -a configs=()
  shift 2
  for argument in "$@"; do
    case $argument in
      --dry-run) dry_run=yes ;;
      --*) OPTIONS+=("$argument") ;;
      *.yaml | *.yml)
        if [[ $argument = *=* && ! -e $argument ]]; then COMMAND_LINE+=("$argument"); else configs+=("$argument"); fi
        ;;
      *) COMMAND_LINE+=("$argument") ;;
    esac
  done
  if ((${#configs[@]} > 1)); then
    log "one job has one config, but ${configs[*]} are given: submit a job for each"
    return 2
  fi
  COMMAND_LINE[0]=${configs[0]:-${COMMAND_LINE[0]}}
  if [ -n "$CONTAINER_IMAGE" ]; then PYTHON=(python3); else PYTHON=("$VENV/bin/python"); fi
  if [ -z "$HOST_PYTHON" ]; then
    if [ -x "$VENV/bin/python" ]; then HOST_PYTHON=$VENV/bin/python; else HOST_PYTHON=python3; fi
  fi
  split_nodes || return 2
  set_environment
  TRAINER=("${PYTHON[@]}" -m stable_opd_mcore "$subcommand" "${COMMAND_LINE[@]}" "${OPTIONS[@]}")
  if [ -n "$dry_run" ]; then describe "$subcommand"; return 0; fi

  mkdir -p "$ATTEMPT_DIR"/{ranks,exits,preflight}
  ln -sfn "attempt_$ATTEMPT" "$LOG_DIR/current"
  trap 'STOP_WANTED=${STOP_WANTED:-USR1}; log "USR1: the job has to end soon"' USR1
  trap 'STOP_WANTED=TERM; log "TERM: Slurm is ending the job"; touch "$ATTEMPT_DIR/servers_stop"' TERM
  log "trainers ${TRAINER_NODES[*]}, servers ${SERVER_NODE_NAMES[*]:-none}, logs $ATTEMPT_DIR"
  check_nodes "$subcommand" || return 1
  if ! check_plan "$subcommand"; then
    judge record failed "$PLANNED"
    return 1
  fi
  if ! check_run "$subcommand"; then
    judge record failed "$CHECKED"
    return 1
  fi
  log "$CHECKED"
  if ((SERVER_NODES > 0)); then
    if ! derive_topology; then
      judge record failed "$TOPOLOGY"
      return 1
    fi
    log "$TOPOLOGY"
    connect_servers
    start_servers || return 1
  fi
  run_trainer
  stop_servers
  judge_run
}

# ---- the allocation ---------------------------------------------------------------------------------------------
split_nodes() {
  local -a nodes
  if ((${SLURM_HET_SIZE:-1} > 1)); then
    log "a heterogeneous job of $SLURM_HET_SIZE components: only the first would be used. Submit one job for all nodes;" \
      "SERVER_NODES=N makes its last N nodes servers"
    return 2
  fi
  if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    if ! command -v scontrol >/dev/null; then
      log "SLURM_JOB_NODELIST is set, but Slurm's command scontrol is not found: run the script outside the container" \
        "(CONTAINER_IMAGE names one for the ranks), or unset SLURM_JOB_NODELIST for a dry run"
      return 2
    fi
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  else # a dry run outside a job: as many nodes as the script requests
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

ipv4_of() { getent ahostsv4 "$1" | awk '$1 !~ /^127\./ {print $1; exit}'; }

# IPv4 address of a node, or its name when no address is found. The resolver is the first source, then Slurm. This
# machine's own name may resolve to 127.0.1.1 (Debian); its address is then the source address on the way to another node.
address_of() {
  local address other
  address=$(ipv4_of "$1")
  if [ -z "$address" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    address=$(scontrol -o show node "$1" | sed -nE 's/.* NodeAddr=(\S+).*/\1/p')
    [[ $address =~ ^[0-9.]+$ ]] || address=$(ipv4_of "$address") # NodeAddr is the node's name by default
  fi
  for other in "${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}"; do
    if [ -n "$address" ] || [ "$1" != "${SLURMD_NODENAME:-$(hostname -s)}" ]; then break; fi
    other=$(ipv4_of "$other")
    [ -z "$other" ] || address=$(ip -4 route get "$other" | sed -nE 's/.* src (\S+).*/\1/p')
  done
  echo "${address:-$1}"
}

set_environment() {
  MASTER_ADDR=$(address_of "${TRAINER_NODES[0]}")
  # One port per job, because jobs may share a node. Servers listen 10000 above it and below Linux's ephemeral ports
  # (32768), also where they are 1024.
  MASTER_PORT=$((12000 + ${SLURM_JOB_ID:-0} % 9000))
  export MASTER_ADDR MASTER_PORT
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
  export PYTHONFAULTHANDLER=1                 # a rank that crashes in C leaves its Python stack in its log
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}  # a missing path fails at once instead of after network time-outs
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}       # NCCL's errors are in the log of the rank
  export CUDA_DEVICE_MAX_CONNECTIONS=1        # Megatron on Hopper: communication queued before compute must start first
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=1    # a collective that fails or times out ends its rank instead of hanging it
  if [ -n "${http_proxy:-}${https_proxy:-}${all_proxy:-}${HTTP_PROXY:-}${HTTPS_PROXY:-}${ALL_PROXY:-}" ]; then
    local node direct=localhost,127.0.0.1 # nodes reach one another without the proxy
    for node in "${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}"; do direct+=,$node,$(address_of "$node"); done
    export NO_PROXY=$direct${NO_PROXY:+,$NO_PROXY} no_proxy=$direct${no_proxy:+,$no_proxy}
  fi
  if [ -n "$CACHE_DIR" ]; then
    export TRITON_CACHE_DIR=$CACHE_DIR/triton TORCHINDUCTOR_CACHE_DIR=$CACHE_DIR/inductor
    export SGLANG_CACHE_DIR=$CACHE_DIR/sglang SGLANG_JIT_CACHE_DIR=$CACHE_DIR/sglang/jit
    export FLASHINFER_WORKSPACE_BASE=$CACHE_DIR CUDA_CACHE_PATH=$CACHE_DIR/cuda TVM_FFI_CACHE_DIR=$CACHE_DIR/tvm_ffi
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
    # by its name it is unpacked once on a node, not for every step; remove_container (allocation.sh) removes it;
    # writable, because libraries write to a home that enroot makes read-only
    STEP+=(--container-image="$CONTAINER_IMAGE" --container-name="$CONTAINER_NAME" --container-writable
      --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$ROOT")
  fi
}

joined() { local IFS=,; echo "$*"; }

step_id() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' |
    awk -v name="$1" -v job="$JOB." 'index($1, job) == 1 && $2 == name {print $1}'
}

# signal_step SIGNAL NAME: signal the step's processes through Slurm. srun itself, when signalled, kills its step at once.
signal_step() {
  local id
  id=$(step_id "$2")
  # Slurm 22.05 prints "Invalid job id" although it delivers the signal
  [ -z "$id" ] || scancel --signal="$1" "$id" 2>/dev/null
}

# computed NAME OPTION...: what `stable-opd NAME` prints for this job; in the container where there is one
computed() {
  local name=$1
  shift
  local -a command=("${PYTHON[@]}" -m stable_opd_mcore "$name" "${COMMAND_LINE[@]}" "$@" --nodes="${#TRAINER_NODES[@]}"
    --server-nodes="$SERVER_NODES" --gpus-per-node="$RANKS_PER_NODE" --gpu="$GPU")
  if [ -n "$CONTAINER_IMAGE" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    step "$name" "${TRAINER_NODES[0]}" 1
    command=("${STEP[@]}" "${command[@]}")
  fi
  "${command[@]}" 2>&1
}

# Who trains where, and the servers' places, in $TOPOLOGY; sets SERVERS_PER_NODE and SERVER_TENSOR. Returns 1 where they
# cannot be computed; $TOPOLOGY then says why.
derive_topology() {
  TOPOLOGY=$(computed topology --shell) || return 1
  SERVERS_PER_NODE=$(sed -nE 's/^SERVERS_PER_NODE=([0-9]+)$/\1/p' <<<"$TOPOLOGY")
  SERVER_TENSOR=$(sed -nE 's/^SERVER_TENSOR=([0-9]+)$/\1/p' <<<"$TOPOLOGY")
  TOPOLOGY=$(sed -nE 's/^# //p' <<<"$TOPOLOGY")
}

# check_plan SUBCOMMAND: memory and seconds of the run in $PLANNED. Returns 1 where the memory does not fit or the plan
# cannot be computed; $PLANNED then ends with the reason.
check_plan() {
  PLANNED=''
  if [ "$1" != train ] || [ "$PLAN" != on ] || [ "$GPU" = cpu ]; then return 0; fi
  PLANNED=$(computed plan)
}

# check_run SUBCOMMAND: what `stable-opd check` finds in the run, in $CHECKED. Returns 1 where it finds errors.
check_run() {
  CHECKED='checks of the run: skipped'
  if [ "$1" != train ] || [ "$CHECK" != on ]; then return 0; fi
  local -a settings=()
  if [ "$SERVER_NODES" -gt 0 ]; then # as connect_servers sets for the trainer; the servers make their key later
    settings=(++rollout.engine=sglang ++rollout.sglang.api_key_file=null)
  fi
  if [[ " ${OPTIONS[*]} " = *' --accept-changes '* ]]; then settings+=(--accept-changes); fi
  CHECKED=$(computed check "${settings[@]}")
}

describe() {
  if derive_topology; then
    echo "# ${TOPOLOGY//$'\n'/$'\n'# }"
  else # for example because the student is not trained yet
    printf '# the topology is not known here: %s\n' "$TOPOLOGY"
    SERVERS_PER_NODE=1 SERVER_TENSOR=null
  fi
  check_plan "$1" || echo "# THE JOB WOULD END HERE (PLAN=off overrides):"
  if [ -n "$PLANNED" ]; then echo "# ${PLANNED//$'\n'/$'\n'# }"; fi
  if ((SERVER_NODES > 0)); then connect_servers; fi
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

# ---- the trainer ------------------------------------------------------------------------------------------------
# Returns when the trainer's step has ended, or shortly before the end of the job. The step runs in the background: bash
# runs a trap at once while it waits for a child, and late while it runs one.
run_trainer() {
  local trainer seconds=0 end=''
  if [ -n "$STOP_WANTED" ]; then return; fi
  step trainer "$(joined "${TRAINER_NODES[@]}")" "$RANKS_PER_NODE"
  "${STEP[@]}" --kill-on-bad-exit=1 --wait=60 --output="$ATTEMPT_DIR/rank_%5t.log" "$ROOT/slurm/rank.sh" "${TRAINER[@]}" &
  trainer=$!
  while kill -0 "$trainer" 2>/dev/null; do
    if [ -z "$STOP_WANTED" ] && compgen -G "$ATTEMPT_DIR/server_*.given_up" >/dev/null; then
      STOP_WANTED=USR1
    fi
    if [ "$STOP_WANTED" = USR1 ] && ((seconds++ % 20 == 0)); then # repeated: ranks that still start ignore the signal
      log "asking the trainer to stop after its step"
      signal_step USR1 trainer
      end=$(job_end)
    fi
    if [ -n "$end" ] && ((end - $(date +%s) < LAST_SECONDS)); then
      log "the trainer has not stopped $LAST_SECONDS s before the end of the job"
      return
    fi
    sleep 1 &
    wait $!
  done
  wait "$trainer"
  log "trainer step ended with code $?"
  trap '' USR1 # one that arrives now has not ended the trainer
}

judge_run() {
  local -a run=(run --nodes "${TRAINER_NODES[@]}" "${SERVER_NODE_NAMES[@]}"
    --ranks=$((${#TRAINER_NODES[@]} * RANKS_PER_NODE)))
  judge "${run[@]}" && return
  [ "$NEXT" = probe ] || return 1
  probe_nodes
  judge "${run[@]}" --probed
}

# End of the job in seconds since the epoch; empty when it has none.
job_end() {
  local end
  end=$(scontrol -o show job "$JOB" | sed -nE 's/.* EndTime=([0-9]\S+).*/\1/p')
  [ -z "$end" ] || date -d "$end" +%s
}

# Run a command on every node but this one; a node that runs it leaves alive_NODE. One step a node, because a step over
# several nodes fails as a whole. Slurm itself may need minutes to notice a silent node.
probe_nodes() {
  local node probe
  local -a probes=()
  for node in "${TRAINER_NODES[@]:1}" "${SERVER_NODE_NAMES[@]}"; do
    CONTAINER_IMAGE='' step alive "$node" 1 # importing an image takes longer than the probe may
    timeout 40 "${STEP[@]}" --output=none touch "$ATTEMPT_DIR/alive_$node" 2>/dev/null &
    probes+=($!)
  done
  for probe in "${probes[@]}"; do wait "$probe"; done # not for the servers, which this shell runs too
}

# ---- the verdict ------------------------------------------------------------------------------------------------
# judge WHAT ARGUMENT...: have verdict.py judge, record the verdict and name the next action ($NEXT), then do that.
# Returns 0 when the job continues or has ended well.
judge() {
  local answer code
  # ignored signals stay ignored in verdict.py, which must finish while Slurm ends the job
  answer=$(
    trap '' TERM USR1
    exec "$HOST_PYTHON" "$ROOT/slurm/verdict.py" "$ATTEMPT_DIR" --job="$SLURM_JOB_ID" --attempt="$ATTEMPT" \
      --stop="$STOP_WANTED" --max-requeues="$MAX_REQUEUES" --max-hangs="$MAX_HANGS" "$@"
  )
  code=$?
  NEXT=${answer%% *}
  case $NEXT in end | requeue | exclude) remove_container ;; esac
  case $NEXT in
    requeue)
      trap '' TERM CONT USR1
      queue_again requeue || code=1 # otherwise the exit code of this attempt does not count
      ;;
    exclude)
      trap '' TERM CONT USR1
      queue_again requeuehold && exclude_nodes "${answer#* }"
      ;;
    '') [ "$1" = refused ] || log "no verdict: $HOST_PYTHON slurm/verdict.py ended with code $code" ;;
  esac
  return "$code"
}

# queue_again requeue|requeuehold; returns 1 when Slurm refuses, for example because of --no-requeue
queue_again() {
  local message
  if ! message=$(scontrol "$1" "$JOB" 2>&1); then
    judge refused "$message"
    return 1
  fi
}

# exclude_nodes NODE,NODE: release the held job without them. Slurm accepts an exclusion only while a job is held.
exclude_nodes() {
  local excluded try
  excluded=$(scontrol -o show job "$JOB" | sed -nE 's/.* ExcNodeList=(\S+).*/\1/p')
  excluded=$(joined ${excluded:+"${excluded/(null)/}"} "$1")
  for try in 1 2 3 4 5 6 7 8; do
    scontrol update JobId="$JOB" ExcNodeList="${excluded#,}" && break
    sleep "0.$try"
  done
  scontrol release "$JOB"
}
