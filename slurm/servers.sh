# shellcheck shell=bash
# SGLang servers on nodes of their own: started before the trainer, which waits for their health, watched while it runs,
# started again when they die. Part of common.sh, whose settings and variables it uses.
# Not here: what a server is (`stable-opd serve`), servers that share the trainer's nodes (rollout.sglang.placement).
# shellcheck disable=SC2034 # TRAINER and SERVER are common.sh's

connect_servers() {
  local index number host port
  SERVER_URLS=() # SERVERS_PER_NODE of the first node, then of the next
  API_KEY_FILE=$ATTEMPT_DIR/api_key # made by the first server; what other machines reach demands one
  for index in "${!SERVER_NODE_NAMES[@]}"; do
    host=$(address_of "${SERVER_NODE_NAMES[index]}")
    port=$((MASTER_PORT + 10000 + 20 * index))
    for ((number = 0; number < SERVERS_PER_NODE; number++)); do SERVER_URLS+=("http://$host:$((port + number))"); done
  done
  TRAINER+=(rollout.engine=sglang rollout.sglang.placement=external "rollout.sglang.urls=[$(joined "${SERVER_URLS[@]}")]"
    "rollout.sglang.api_key_file=$API_KEY_FILE")
}

# The command of server node $1, in $SERVER
server_command() {
  local address=${SERVER_URLS[$1 * SERVERS_PER_NODE]#http://} # of its first server; the others count the port up
  if [ -n "$SERVER_COMMAND" ]; then
    read -ra SERVER <<<"$SERVER_COMMAND"
  else
    SERVER=("${PYTHON[@]}" -m stable_opd_mcore serve)
  fi
  SERVER+=("${COMMAND_LINE[@]}" "run.directory=$ATTEMPT_DIR" "run.name=server_$1" rollout.engine=sglang
    rollout.sglang.placement=disaggregated "rollout.sglang.num_servers=$SERVERS_PER_NODE" "rollout.sglang.api_key_file=$API_KEY_FILE"
    "rollout.sglang.host=${address%:*}" "rollout.sglang.port=${address##*:}")
}

start_servers() {
  local index url deadline=$((SECONDS + SERVER_TIMEOUT))
  for index in "${!SERVER_NODE_NAMES[@]}"; do keep_server "$index" & done
  for index in "${!SERVER_NODE_NAMES[@]}"; do
    for url in "${SERVER_URLS[@]:index * SERVERS_PER_NODE:SERVERS_PER_NODE}"; do
      until curl --silent --fail --output /dev/null --max-time 5 "$url/health"; do
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

# Runs a server until stop_servers, starting it again when it dies; the trainer sends it the weights anew.
keep_server() {
  local index=$1 starts=0
  trap '' USR1 TERM
  step "server_$index" "${SERVER_NODE_NAMES[index]}" 1
  server_command "$index"
  while [ ! -e "$ATTEMPT_DIR/servers_stop" ]; do
    "${STEP[@]}" --output="$ATTEMPT_DIR/server_$index.start_$starts.log" "${SERVER[@]}"
    [ ! -e "$ATTEMPT_DIR/servers_stop" ] || return
    if ((++starts > SERVER_RESTARTS)); then
      log "server $index ended $starts times: given up"
      touch "$ATTEMPT_DIR/server_$index.given_up"
      return
    fi
    log "server $index on ${SERVER_NODE_NAMES[index]} ended: start $starts of at most $SERVER_RESTARTS more"
    sleep 2
  done
}

stop_servers() {
  local index
  ((SERVER_NODES > 0)) || return 0
  touch "$ATTEMPT_DIR/servers_stop"
  for index in "${!SERVER_NODE_NAMES[@]}"; do signal_step TERM "server_$index"; done
}
