#!/usr/bin/env bash
# serve.sh prefill|decode|proxy|suite [ARGUMENT...]: what a container of this image does; ARGUMENTs are passed on.
#
# Settings come from the environment. The defaults are those of a first try: one card each for Prefill and Decode, both
# on this host. For Prefill on another host, give its address as PREFILL_HOST on both.
set -euo pipefail

usage() {
  cat >&2 <<'END'
usage: serve.sh prefill|decode|proxy|suite [ARGUMENT...]

  MODEL=/model                          the model's directory, in the container
  MODEL_NAME=model                      the name clients use
  PREFILL_HOST=127.0.0.1                address of the Prefill host: Prefill listens there, the proxy connects to it
  DECODE_HOST=127.0.0.1                 the same for Decode
  PROXY_HOST=127.0.0.1                  where the proxy listens
  PREFILL_PORT=8100 DECODE_PORT=8200 PROXY_PORT=8000
  PREFILL_KV_PORT=27000 DECODE_KV_PORT=28000
  PREFILL_DP=1 PREFILL_TP=1 DECODE_DP=1 DECODE_TP=1
  PREFILL_DEVICES=0,1,2,3,4,5,6,7       davinci devices of Prefill
  DECODE_DEVICES=8,9,10,11,12,13,14,15  davinci devices of Decode
  CPU_BYTES_PER_RANK=17179869184        host memory for preempted requests, on each card of Decode
  MAX_MODEL_LEN=32768 BLOCK_SIZE=128
  PREFILL_BATCHED_TOKENS=8192 DECODE_BATCHED_TOKENS=4096
  DECODE_BLOCKS=                        KV cache blocks of Decode, where not all that fit: the suite wants it full
  MIN_DRIVER=25.5                       oldest Ascend driver that the preflight lets pass
END
  exit 2
}

role=${1:-}
[[ -n $role ]] || usage
shift

: "${MODEL:=/model}" "${MODEL_NAME:=model}"
: "${PREFILL_HOST:=127.0.0.1}" "${DECODE_HOST:=127.0.0.1}" "${PROXY_HOST:=127.0.0.1}"
: "${PREFILL_PORT:=8100}" "${DECODE_PORT:=8200}" "${PROXY_PORT:=8000}"
: "${PREFILL_KV_PORT:=27000}" "${DECODE_KV_PORT:=28000}"
: "${PREFILL_DP:=1}" "${PREFILL_TP:=1}" "${DECODE_DP:=1}" "${DECODE_TP:=1}"
: "${PREFILL_DEVICES:=0,1,2,3,4,5,6,7}" "${DECODE_DEVICES:=8,9,10,11,12,13,14,15}"
: "${CPU_BYTES_PER_RANK:=17179869184}"
: "${MAX_MODEL_LEN:=32768}" "${BLOCK_SIZE:=128}"
: "${PREFILL_BATCHED_TOKENS:=8192}" "${DECODE_BATCHED_TOKENS:=4096}"
: "${MIN_DRIVER:=25.5}"

mooncake() { # mooncake ROLE KV_PORT: the transfer config of vllm-ascend's MooncakeConnectorV1
  printf '{"kv_connector": "MooncakeConnectorV1", "kv_role": "%s", "kv_port": "%s", "kv_connector_extra_config": {' \
    "$1" "$2"
  printf '"prefill": {"dp_size": %s, "tp_size": %s}, "decode": {"dp_size": %s, "tp_size": %s}}}' \
    "$PREFILL_DP" "$PREFILL_TP" "$DECODE_DP" "$DECODE_TP"
}

decode_transfer() {
  # The module path makes it this repository's connector, also where vllm-ascend has registered one of the same name.
  printf '{"kv_connector": "MultiConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"connectors": ['
  mooncake kv_consumer "$DECODE_KV_PORT"
  printf ', {"kv_connector": "RecomputeCPUOffloadConnector", "kv_connector_module_path": "offload_connector", '
  printf '"kv_role": "kv_consumer", "kv_connector_extra_config": {"cpu_bytes_to_use_per_rank": %s}}]}}' \
    "$CPU_BYTES_PER_RANK"
}

vllm() { # vllm HOST PORT DP TP DEVICES CPU_BYTES ARGUMENT...: the preflight, then the server in this process's place
  local host=$1 port=$2 dp=$3 tp=$4 devices=$5 cpu_bytes=$6
  shift 6
  export ASCEND_RT_VISIBLE_DEVICES=$devices
  if [[ $host != 127.0.0.1 ]]; then # the other host must reach the ports that vLLM opens for KV transfers
    export VLLM_HOST_IP=$host HCCL_IF_IP=$host
  fi
  exec python3 /opt/pd/preflight.py --model "$MODEL" --devices "$devices" --cards $((dp * tp)) \
    --cpu-bytes-per-rank "$cpu_bytes" --min-driver "$MIN_DRIVER" -- \
    python3 -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name "$MODEL_NAME" \
    --host "$host" --port "$port" --trust-remote-code --enforce-eager --tensor-parallel-size "$tp" \
    --data-parallel-size "$dp" --max-model-len "$MAX_MODEL_LEN" --block-size "$BLOCK_SIZE" "$@"
}

case $role in
  prefill)
    vllm "$PREFILL_HOST" "$PREFILL_PORT" "$PREFILL_DP" "$PREFILL_TP" "$PREFILL_DEVICES" 0 \
      --max-num-batched-tokens "$PREFILL_BATCHED_TOKENS" \
      --kv-transfer-config "$(mooncake kv_producer "$PREFILL_KV_PORT")" "$@"
    ;;
  decode)
    vllm "$DECODE_HOST" "$DECODE_PORT" "$DECODE_DP" "$DECODE_TP" "$DECODE_DEVICES" "$CPU_BYTES_PER_RANK" \
      --max-num-batched-tokens "$DECODE_BATCHED_TOKENS" ${DECODE_BLOCKS:+--num-gpu-blocks-override "$DECODE_BLOCKS"} \
      --additional-config '{"recompute_scheduler_enable": true}' --kv-transfer-config "$(decode_transfer)" "$@"
    ;;
  proxy)
    exec python3 -m pd_integration.proxy --prefill "http://$PREFILL_HOST:$PREFILL_PORT" \
      --transfer-from-answer --decode "http://$DECODE_HOST:$DECODE_PORT" --host "$PROXY_HOST" --port "$PROXY_PORT" "$@"
    ;;
  suite)
    exec python3 -m pytest -v -p no:cacheprovider /opt/suite --platform a3 --model-name "$MODEL_NAME" \
      --proxy-url "http://$PROXY_HOST:$PROXY_PORT" --prefill-url "http://$PREFILL_HOST:$PREFILL_PORT" \
      --decode-url "http://$DECODE_HOST:$DECODE_PORT" --time-out 300 \
      --ranks $((DECODE_DP * DECODE_TP)) --cpu-bytes-per-rank "$CPU_BYTES_PER_RANK" "$@"
    ;;
  *) usage ;;
esac
