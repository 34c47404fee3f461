#!/usr/bin/env bash
# Lint what is no Python: Dockerfiles (hadolint), scripts (shellcheck), the workflow (actionlint), and the compose files
# (the compose that is installed; left out, with a word, where there is none). Called by `hatch run lint`,
# whose environment has hadolint and shellcheck; actionlint is used where it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

failed=0
check() { # check WHAT COMMAND...
  local what=$1
  shift
  if "$@"; then echo "lint: ok: $what"; else echo "lint: FAILED: $what" >&2; failed=1; fi
}

# shellcheck disable=SC2317,SC2329  # `check` calls it
compose_config() { # compose_config FILE...: the files are valid for the compose that is installed
  local files=() name
  for name in "$@"; do files+=(-f "$name"); done
  # What the A3 file demands; no image is looked at.
  VLLM_ASCEND_VERSION=0 MODEL_DIR=/model "${compose[@]}" "${files[@]}" config -q
}

check Dockerfiles hadolint docker/*/Dockerfile
check scripts shellcheck docker/*/*.sh integration/ci/*.sh .ci/run
if command -v actionlint >/dev/null; then
  check workflow actionlint .github/workflows/*.yml
else
  echo "lint: left out: the workflow, because actionlint is not installed"
fi

if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
elif command -v docker-compose >/dev/null; then
  compose=(docker-compose)
else
  echo "lint: left out: compose files, because no docker compose is installed"
  exit "$failed"
fi
check "docker/cpu/compose.yaml" compose_config docker/cpu/compose.yaml
check "docker/cpu/compose.faults.yaml" compose_config docker/cpu/compose.yaml docker/cpu/compose.faults.yaml
check "docker/a3/compose.yaml" compose_config docker/a3/compose.yaml
exit "$failed"
