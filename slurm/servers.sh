# shellcheck shell=bash
# SGLang servers on nodes of their own. They start before the trainer, which waits until all are healthy; a server node's
# command is started again when it ends. Part of common.sh, whose settings and variables it uses.
# Not here: one server (`stable-opd serve`), servers that share the trainer's nodes (rollout.sglang.placement).
# shellcheck disable=SC2034 # common.sh uses TRAINER and SERVER

# after derive_topology
connect_servers() {
  local node number=0 host last
  SERVER_URLS=() # SERVERS_PER_NODE of the first node, then of the next
  API_KEY_FILE=$ATTEMPT_DIR/api_key # the first server creates it
  for node in "${SERVER_NODE_NAMES[@]}"; do
    host=$(address_of "$node")
    for ((last = number + SERVERS_PER_NODE; number < last; number++)); do
      SERVER_URLS+=("http://$host:$((MASTER_PORT + 10000 + number))")
    done
  done
  # ++: they replace settings of the command line
  TRAINER+=(++rollout.engine=sglang ++rollout.sglang.placement=external
    "++rollout.sglang.urls=[$(joined "${SERVER_URLS[@]}")]" "++rollout.sglang.api_key_file=$API_KEY_FILE")
}

# server_command INDEX: the command of that server node, in $SERVER
server_command() {
  local address=${SERVER_URLS[$1 * SERVERS_PER_NODE]#http://} # the first server's; the others have the next ports
  if [ -n "$SERVER_COMMAND" ]; then
    read -ra SERVER <<<"$SERVER_COMMAND"
  else
    SERVER=("${PYTHON[@]}" -m stable_opd_mcore serve)
  fi
  SERVER+=("${COMMAND_LINE[@]}" "++run.directory=$ATTEMPT_DIR" "++run.name=server_$1" ++rollout.engine=sglang
    ++rollout.sglang.placement=disaggregated "++rollout.sglang.num_servers=$SERVERS_PER_NODE"
    "++rollout.sglang.tensor=$SERVER_TENSOR" "++rollout.sglang.api_key_file=$API_KEY_FILE"
    "++rollout.sglang.host=${address%:*}" "++rollout.sglang.port=${address##*:}")
}

start_servers() {
  local index url deadline=$((SECONDS + SERVER_TIMEOUT))
  for index in "${!SERVER_NODE_NAMES[@]}"; do keep_server "$index" & done
  for index in "${!SERVER_NODE_NAMES[@]}"; do
    for url in "${SERVER_URLS[@]:index * SERVERS_PER_NODE:SERVERS_PER_NODE}"; do
      until "$HOST_PYTHON" "$ROOT/slurm/health.py" "$url/health"; do
        if [ -e "$ATTEMPT_DIR/server_$index.given_up" ] || ((SECONDS >= deadline)); then
          stop_servers
          judge record failed "server $index on ${SERVER_NODE_NAMES[index]} is not healthy: $url; $ATTEMPT_DIR/server_$index.*.log"
          return 1
        elif [ -n "$STOP_WANTED" ]; then
          stop_servers
          judge record stopped "asked to stop while the servers started" --action=requeue
          return 1
        fi
        sleep 1
      done
    done
    log "server $index on ${SERVER_NODE_NAMES[index]} is healthy"
  done
}

# Run a server node's command until stop_servers; start it again when it ends. The trainer sends it the weights again.
keep_server() {
  local index=$1 starts=0 ends=0 began message
  trap '' USR1 TERM
  step "server_$index" "${SERVER_NODE_NAMES[index]}" 1
  server_command "$index"
  while [ ! -e "$ATTEMPT_DIR/servers_stop" ]; do
    began=$SECONDS
    "${STEP[@]}" --output="$ATTEMPT_DIR/server_$index.start_$starts.log" "${SERVER[@]}"
    [ ! -e "$ATTEMPT_DIR/servers_stop" ] || return
    starts=$((starts + 1))
    if ((SECONDS - began > 3600)); then ends=0; fi
    ends=$((ends + 1))
    if ((ends > SERVER_RESTARTS)); then
      message="server $index on ${SERVER_NODE_NAMES[index]} ended $ends times, SERVER_RESTARTS=$SERVER_RESTARTS"
      log "$message: given up"
      echo "$message; $ATTEMPT_DIR/server_$index.start_$((starts - 1)).log" >"$ATTEMPT_DIR/server_$index.partial"
      mv "$ATTEMPT_DIR/server_$index.partial" "$ATTEMPT_DIR/server_$index.given_up"
      return
    fi
    log "server $index on ${SERVER_NODE_NAMES[index]} ended: start $starts, $((SERVER_RESTARTS - ends)) more"
    sleep 2
  done
}

stop_servers() {
  local index
  ((SERVER_NODES > 0)) || return 0
  touch "$ATTEMPT_DIR/servers_stop"
  for index in "${!SERVER_NODE_NAMES[@]}"; do signal_step TERM "server_$index"; done
}
