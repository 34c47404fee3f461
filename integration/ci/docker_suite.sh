#!/usr/bin/env bash
# Build docker/cpu and run its suite in containers, then the fault tests against the same containers.
#
# It uses the Docker engine that answers. Where none does: with CI_DOCKER=1 it starts one of its own (as root on Debian,
# installed from the machine's package mirror) and stops it at the end; without, it says so and ends with status 0.
# Where the base image can't be pulled, it makes one from the machine's own package mirror. Everything that a build host
# has of its own (mirror, certificates, pip settings, folders of wheels) is read from the machine when it runs.
#
#   CI_DOCKER=1        fail where the suite can't run, rather than leave it out
#   BASE=IMAGE         base image (default: the Dockerfile's)
#   PYTHON=PATH        a Python with pytest, aiohttp and pd-integration for the fault tests (default: python3)
#   WORK_DIR=DIR       log files, and the images of an engine started here, which a later run uses again (default: a
#                      temporary directory, of which the log files stay)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=${WORK_DIR:-$(mktemp -d /tmp/docker-suite.XXXXXX)}
python=${PYTHON:-python3}
compose_dir=$root/docker/cpu
project=pd-suite
local_base=pd-cpu-base:local
engine_pid=""
wheels_pid=""
build_arguments=()

say() { printf '%s docker_suite: %s\n' "$(date +%T)" "$*"; }
die() { say "$*" >&2; exit 1; }

compose() {
  if docker compose version >/dev/null 2>&1; then
    docker compose -p "$project" "$@"
  else
    docker-compose -p "$project" "$@"
  fi
}

limited() { # limited SECONDS COMMAND...: a command or function of this script, with a time-out
  local seconds=$1
  shift
  timeout "$seconds" bash -c "$(declare -f compose); project=$project; \"\$@\"" limited "$@"
}

stop_pid() { # stop_pid PID SECONDS: SIGTERM, then SIGKILL for what is left
  local waited=0
  kill "$1" 2>/dev/null || return 0
  while kill -0 "$1" 2>/dev/null; do
    if ((waited++ >= $2 * 5)); then kill -KILL "$1" 2>/dev/null || true; break; fi
    sleep 0.2
  done
}

clean_up() {
  local status=$?
  trap - EXIT
  if docker info >/dev/null 2>&1; then
    (cd "$compose_dir" && limited 120 compose down -v) >"$work/down.log" 2>&1 || say "down failed, see $work/down.log"
  fi
  [[ -z $wheels_pid ]] || stop_pid "$wheels_pid" 5
  if [[ -n $engine_pid ]]; then
    stop_pid "$engine_pid" 60
    say "the engine that this script started (pid $engine_pid) is stopped"
    [[ -n ${WORK_DIR:-} ]] || rm -rf "$work/data" "$work/exec"
  fi
  exit "$status"
}

# --- the engine -------------------------------------------------------------------------------------------------------

start_engine() {
  [[ $(id -u) == 0 ]] || die "no Docker engine answers, and only root can start one; start Docker, or run this as root"
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    say "installing a Docker engine with apt-get"
    apt-get update -qq >"$work/apt.log" 2>&1
    apt-get install -y --no-install-recommends docker.io debootstrap docker-compose >>"$work/apt.log" 2>&1 \
      || die "apt-get could not install docker.io debootstrap docker-compose, see $work/apt.log"
  fi
  # No default bridge and no firewall rules: nothing of the host is changed, and compose makes its own networks.
  export DOCKER_HOST=unix://$work/docker.sock DOCKER_BUILDKIT=0
  setsid dockerd --iptables=false --ip6tables=false --bridge=none --data-root "$work/data" --exec-root "$work/exec" \
    --pidfile "$work/dockerd.pid" -H "$DOCKER_HOST" >"$work/dockerd.log" 2>&1 &
  engine_pid=$!
  build_arguments=(--network=host) # an engine without a default bridge has no other for a build
  for ((i = 0; i < 300; i++)); do
    if docker info >/dev/null 2>&1; then
      say "started an engine, pid $engine_pid"
      return
    fi
    kill -0 "$engine_pid" 2>/dev/null || break
    sleep 0.2
  done
  tail -n 5 "$work/dockerd.log" >&2
  die "the engine did not come up in 60 s, see $work/dockerd.log"
}

# --- the base image where none can be pulled --------------------------------------------------------------------------

make_base() {
  local tree=$work/base codename mirror
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
  # shellcheck disable=SC2016  # apt-get fills these in
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' \
    | awk -v codename="$codename" '$2 == codename || $2 == "stable" {print $1; exit}')
  [[ -n $mirror ]] || die "apt's sources name no mirror for $codename"
  say "making a base image of Debian $codename"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$codename" "$tree" "$mirror" \
    >"$work/debootstrap.log" 2>&1 || die "debootstrap failed, see $work/debootstrap.log"
  cp -L /etc/ssl/certs/ca-certificates.crt "$tree/etc/ssl/certs/ca-certificates.crt"
  serve_wheels >"$tree/etc/pip.conf"
  tar -C "$tree" -c . | docker import - "$local_base" >/dev/null
  rm -rf "$tree"
}

# Print a pip.conf for the base image: the host's certificates and its folders of wheels, served on loopback.
serve_wheels() {
  local port folder
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n'
  folder=$("$python" -m pip config get global.find-links 2>/dev/null || true)
  [[ -d $folder ]] || return 0
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$python" -m http.server --bind 127.0.0.1 --directory "$folder" "$port" >"$work/wheels.log" 2>&1 &
  wheels_pid=$!
  printf 'find-links = http://127.0.0.1:%s/\n' "$port"
}

choose_base() {
  local base=${BASE:-}
  [[ -n $base ]] || base=$(awk -F= '/^ARG BASE=/ {print $2; exit}' "$compose_dir/Dockerfile")
  if ! docker image inspect "$base" >/dev/null 2>&1 && ! timeout 300 docker pull -q "$base" >"$work/pull.log" 2>&1; then
    say "$base can't be pulled: $(tail -n 1 "$work/pull.log")"
    command -v debootstrap >/dev/null || die "and there is no debootstrap to make a base image; install it"
    make_base
    base=$local_base
    build_arguments=(--network=host) # the folders of wheels are served on the host's loopback interface
  fi
  build_arguments+=(--build-arg "BASE=$base" --build-arg "PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}")
}

# --- the run ----------------------------------------------------------------------------------------------------------

build() {
  local started=$SECONDS
  say "building the image"
  docker build "${build_arguments[@]}" -t pd-cpu:local -f "$compose_dir/Dockerfile" "$root" >"$work/build.log" 2>&1 \
    || { tail -n 30 "$work/build.log" >&2; die "the build failed, see $work/build.log"; }
  say "built in $((SECONDS - started)) s, $(docker image inspect -f '{{.Size}}' pd-cpu:local) bytes"
}

run_suite() {
  local started=$SECONDS status=0
  say "docker compose up --exit-code-from suite"
  limited 1200 compose up --no-build --no-color --exit-code-from suite >"$work/suite.log" 2>&1 || status=$?
  grep -E '^suite' "$work/suite.log" || true
  ((status == 0)) || die "the suite failed with status $status, see $work/suite.log"
  say "the suite passed in $((SECONDS - started)) s"
  limited 120 compose down -v >>"$work/suite.log" 2>&1
}

run_faults() {
  local started=$SECONDS
  local files=(-f compose.yaml -f compose.faults.yaml)
  say "starting the servers for the fault tests"
  limited 900 compose "${files[@]}" up --no-build -d proxy >"$work/faults-up.log" 2>&1 \
    || { tail -n 20 "$work/faults-up.log" >&2; die "the servers did not start, see $work/faults-up.log"; }
  timeout 3600 "$python" -m pytest -v -m faults -p no:cacheprovider "$root/integration/tests/suite" --platform docker \
    --proxy-url http://127.0.0.1:18000 --prefill-url http://127.0.0.1:18100 --decode-url http://127.0.0.1:18200 \
    --compose-project "$project" | tee "$work/faults.log" || failed_faults
  say "the fault tests passed in $((SECONDS - started)) s"
}

failed_faults() {
  compose logs --no-color >"$work/servers.log" 2>&1 || true
  die "the fault tests failed, see $work/faults.log and $work/servers.log"
}

main() {
  mkdir -p "$work"
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  "$python" -c 'import aiohttp, pd_integration, pytest' || die "PYTHON=$python lacks what the fault tests need"
  if ! docker info >/dev/null 2>&1; then
    if [[ ${CI_DOCKER:-0} != 1 ]]; then
      say "no Docker engine answers: the container suite is left out (CI_DOCKER=1 starts an engine)"
      return
    fi
    start_engine
  fi
  choose_base
  build
  cd "$compose_dir"
  run_suite
  run_faults
}

main "$@"
