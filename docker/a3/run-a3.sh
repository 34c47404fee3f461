#!/usr/bin/env bash
# run-a3.sh prefill|decode|proxy|suite [ARGUMENT...]: run one part of the deployment on this A3 host with docker run.
#
#   VLLM_ASCEND_VERSION=... MODEL_DIR=/data/my-model docker/a3/run-a3.sh build
#   VLLM_ASCEND_VERSION=... MODEL_DIR=/data/my-model docker/a3/run-a3.sh decode
#
# Two hosts: on the Prefill host `PREFILL_HOST=10.0.0.1 ... run-a3.sh prefill`, where 10.0.0.1 is that host's address;
# on the other one the same PREFILL_HOST with decode (and its own DECODE_HOST) and with proxy.
#
# Beside the settings of serve.sh, which are passed on:
#   IMAGE=pd-a3:$VLLM_ASCEND_VERSION   the image of docker/a3/Dockerfile
#   MODEL_DIR=DIR                      the model's directory on this host, for prefill and decode
#   SHM_SIZE=1024g                     for 16 cards with 16 GiB each
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
role=${1:?prefill, decode, proxy, suite or build}
shift
image=${IMAGE:-pd-a3:${VLLM_ASCEND_VERSION:?give the release of quay.io/ascend/vllm-ascend, without -a3}}

if [[ $role == build ]]; then
  exec docker build --build-arg "VLLM_ASCEND_VERSION=${VLLM_ASCEND_VERSION:?}" -t "$image" \
    -f "$root/docker/a3/Dockerfile" "$@" "$root"
fi

options=(--rm --name "pd-$role" --net=host)
settings=(MODEL_NAME PREFILL_HOST DECODE_HOST PROXY_HOST PREFILL_PORT DECODE_PORT PROXY_PORT PREFILL_KV_PORT
  DECODE_KV_PORT PREFILL_DP PREFILL_TP DECODE_DP DECODE_TP PREFILL_DEVICES DECODE_DEVICES CPU_BYTES_PER_RANK
  MAX_MODEL_LEN BLOCK_SIZE PREFILL_BATCHED_TOKENS DECODE_BATCHED_TOKENS
  DECODE_BLOCKS MIN_DRIVER)
for name in "${settings[@]}"; do
  [[ -z ${!name:-} ]] || options+=(--env "$name")
done

if [[ $role == prefill || $role == decode ]]; then
  options+=("--shm-size=${SHM_SIZE:-1024g}" --ulimit memlock=-1:-1)
  for number in {0..15}; do
    options+=(--device "/dev/davinci$number")
  done
  options+=(--device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc)
  for path in /usr/local/dcmi /usr/local/Ascend/driver/tools/hccn_tool /usr/local/bin/npu-smi \
    /usr/local/Ascend/driver/lib64 /usr/local/Ascend/driver/version.info /etc/ascend_install.info /etc/hccn.conf; do
    options+=(--volume "$path:$path:ro")
  done
  options+=(--volume "${MODEL_DIR:?give the directory of the model on this host}:/model:ro")
fi

exec docker run "${options[@]}" "$image" "$role" "$@"
