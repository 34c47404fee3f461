#!/bin/sh
# serve.sh NAME COMMAND...: run COMMAND with VLLM_HOST_IP set to this container's address under NAME.
#
# A container on several networks has several addresses. KV transfers, and every port that vLLM opens for them, go over
# the network on which NAME is known.
set -eu
name=$1
shift
address=$(getent hosts "$name") || {
  echo "serve.sh: $name has no address; give this service that alias on the network that KV transfers are to take" >&2
  exit 1
}
export VLLM_HOST_IP="${address%% *}"
exec "$@"
