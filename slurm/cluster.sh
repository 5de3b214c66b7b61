#!/usr/bin/env bash
# A real Slurm on this one machine: virtual nodes, each a slurmd of its own, whose GPUs only pose as such.
#
#   slurm/cluster.sh up     [STATE_DIR]            start it; says so and ends well when it is up already
#   slurm/cluster.sh status [STATE_DIR]            daemons, nodes, jobs; ends with 1 when it is not up
#   slurm/cluster.sh down   [--purge] [STATE_DIR]  cancel its jobs and stop its daemons; --purge also removes STATE_DIR
#
# STATE_DIR holds all of a bed and is its name: several beds run side by side, each with its own ports and keys.
# Default: alpa-slurm-USER in $TMPDIR or /tmp. Knobs, from the environment, for `up`:
NODES=${NODES:-4}                             # node1, node2, ...
CPUS=${CPUS:-4}                               # cores each node claims to have
GPUS=${GPUS:-2}                               # fake GPUs of each node
MAX_ARRAY_SIZE=${MAX_ARRAY_SIZE:-1001}        # array indices stay below this
MIN_JOB_AGE=${MIN_JOB_AGE:-300}               # seconds for which squeue knows a job that has ended
ENFORCE_PART_LIMITS=${ENFORCE_PART_LIMITS:-ALL} # NO: jobs that can never start are accepted and wait

set -euo pipefail

readonly HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly START_SECONDS=60 STOP_SECONDS=30
# Daemons are installed where a normal user's PATH does not look.
PATH=$PATH:/usr/sbin:/sbin

main() {
  local verb=${1:-help} purge=no
  shift || true
  local folders=() word
  for word in "$@"; do
    if [[ $word == --purge ]]; then purge=yes; else folders+=("$word"); fi
  done
  [[ ${#folders[@]} -le 1 ]] || fail "one STATE_DIR is enough, found ${folders[*]}"
  state=$(realpath -m "${folders[0]:-${TMPDIR:-/tmp}/alpa-slurm-$(id -un)}")
  export SLURM_CONF=$state/slurm.conf
  case $verb in
    up) up ;;
    status) status ;;
    down) down; if [[ $purge == yes ]]; then purge; echo "and its folder is removed"; fi ;;
    *) sed -n '2,/^NODES/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; [[ $verb == help ]] ;;
  esac
}

fail() { echo "error: $*" >&2; exit 1; }

# ---- up

up() {
  check_folder
  install_slurm
  if [[ -n $(running_daemons) ]]; then
    if [[ -z $(daemon_pid "$state/run/slurmctld.pid") ]] || ! controller_answers; then
      fail "a part of the bed in $state is running, but its controller does not answer: \`$0 down $state\` first"
    fi
    echo "the bed in $state is up already"
    usage
    return
  fi
  make_folders
  write_configuration
  start_daemons
  usage
}

check_folder() {
  # slurm.conf knows no quotes, and a socket's path may be 107 characters long.
  [[ $state =~ ^[A-Za-z0-9/._+-]+$ ]] || fail "STATE_DIR may hold letters, digits and / . _ + - only, found: $state"
  ((${#state} <= 80)) || fail "STATE_DIR may be 80 characters long, found ${#state}: $state"
}

install_slurm() {
  type slurmctld slurmd munged sinfo >/dev/null 2>&1 && return
  local packages="slurm-wlm munge"
  if [[ $(id -u) != 0 ]] || ! type apt-get >/dev/null 2>&1; then
    fail "Slurm or munge is missing. Install them, on Debian or Ubuntu by: sudo apt-get install --no-install-recommends $packages"
  fi
  apt-get update -qq
  # shellcheck disable=SC2086  # two words
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq --no-install-recommends $packages >/dev/null
}

make_folders() {
  mkdir -p "$state"/{state,log,run,dev,tmp}
  chmod 755 "$state" "$state/run"
  local node gpu
  for node in $(seq "$NODES"); do
    mkdir -p "$state/spool/node$node" "$state/tmp/node$node"
    # Slurm takes only a character device for a GPU. A link to one will do, and unlike mknod needs no root.
    for ((gpu = 0; gpu < GPUS; gpu++)); do ln -sfn /dev/null "$state/dev/node${node}gpu$gpu"; done
  done
}

write_configuration() {
  local ports node
  mapfile -t ports < <(free_ports $((NODES + 1)))
  sed -e "s|@STATE@|$state|g" -e "s|@HOST@|$(hostname -s)|" -e "s|@USER@|$(id -un)|" -e "s|@CONTROLLER_PORT@|${ports[0]}|" \
    -e "s|@MAX_ARRAY_SIZE@|$MAX_ARRAY_SIZE|" -e "s|@MIN_JOB_AGE@|$MIN_JOB_AGE|" \
    -e "s|@ENFORCE_PART_LIMITS@|$ENFORCE_PART_LIMITS|" "$HERE/slurm.conf.in" >"$state/slurm.conf"
  : >"$state/gres.conf"
  for node in $(seq "$NODES"); do
    # NodeHostname and NodeAddr: the node's name is resolved by nobody.
    echo "NodeName=node$node NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[$node]} CPUs=$CPUS Boards=1 SocketsPerBoard=1" \
      "CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN$( ((GPUS)) && echo " Gres=gpu:$GPUS")" >>"$state/slurm.conf"
    if ((GPUS)); then echo "NodeName=node$node Name=gpu File=$state/dev/node${node}gpu[0-$((GPUS - 1))]" >>"$state/gres.conf"; fi
  done
}

# Ports without a socket, below those the kernel hands out to outgoing connections, which could take them away again.
# Drawn at random, so that two beds that start at the same time do not meet.
free_ports() { shuf -i 15000-31999 -n 2000 | grep -vxF -f <(used_ports) | head -n "$1"; }

used_ports() {
  local port
  for port in $(awk 'FNR > 1 {sub(/.*:/, "", $2); print $2}' /proc/net/tcp /proc/net/tcp6 2>/dev/null); do echo $((16#$port)); done
}

start_daemons() {
  local node
  [[ -s $state/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$state/munge.key")
  # --force: munged would refuse a folder that only its owner may enter, which for a bed of one user is right.
  munged --force --key-file="$state/munge.key" --socket="$state/run/munge.socket" --pid-file="$state/run/munged.pid" \
    --log-file="$state/log/munged.log" --seed-file="$state/munge.seed" &>>"$state/log/munged.out" || start_failed "munged does not start"
  slurmctld -f "$SLURM_CONF" &>>"$state/log/slurmctld.out" || start_failed "slurmctld does not start"
  wait_until "$START_SECONDS" controller_answers || start_failed "slurmctld does not answer"
  # After a crash the queue still holds jobs, which would all run again.
  cancel_jobs
  for node in $(seq "$NODES"); do
    slurmd -N "node$node" -f "$SLURM_CONF" &>>"$state/log/slurmd.node$node.out" || start_failed "slurmd of node$node does not start"
  done
  wait_until "$START_SECONDS" all_idle || start_failed "after $START_SECONDS s $(num_idle) of $NODES nodes are idle"
}

start_failed() {
  tail -n 5 "$state"/log/*.out "$state"/log/{munged,slurmctld,slurmd.*}.log >&2 2>/dev/null || true
  down >&2
  fail "$*; the ends of the logs stand above, all of them in $state/log"
}

controller_answers() { timeout 10 squeue -h &>/dev/null; }

all_idle() { [[ $(num_idle) == "$NODES" ]]; }

num_idle() { timeout 10 sinfo -h -N -p debug -o '%t' 2>/dev/null | grep -cx idle || true; }

usage() {
  timeout 10 sinfo
  echo
  echo "To use it:   export SLURM_CONF=$SLURM_CONF"
  if [[ $(id -u) == 0 ]]; then
    # OpenMPI refuses root, which on a cluster is right and in a container is the only user there is.
    echo "As root too: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1"
  fi
  echo "To stop it:  $0 down $state"
}

# ---- status

status() {
  local daemons
  daemons=$(running_daemons)
  if [[ -z $daemons ]]; then echo "no bed is up in $state"; return 1; fi
  echo "SLURM_CONF=$SLURM_CONF"
  echo "$daemons" | while read -r pid file; do echo "$(basename "$file" .pid) runs as process $pid"; done
  timeout 10 sinfo -N -p debug -o '%10N %10t %5c %G'
  timeout 10 squeue --states=all -o '%12i %20j %12T %10M %6D %R'
}

# ---- down

down() {
  if [[ -z $(running_daemons) ]]; then echo "no bed is up in $state"; return; fi
  # A controller that has died cannot cancel: its jobs are left for kill_steps.
  if [[ -n $(daemon_pid "$state/run/slurmctld.pid") ]]; then
    cancel_jobs
    wait_until "$STOP_SECONDS" queue_is_empty || echo "warning: jobs are still there after $STOP_SECONDS s" >&2
  fi
  stop_daemons "$state"/run/slurmd.*.pid
  stop_daemons "$state"/run/slurmctld.pid "$state"/run/munged.pid
  kill_steps
  echo "the bed in $state is down; its logs are in $state/log"
}

cancel_jobs() {
  local jobs
  jobs=$(job_ids) || return 0
  # shellcheck disable=SC2086  # one argument a job
  if [[ -n $jobs ]]; then timeout 10 scancel $jobs || true; fi
}

queue_is_empty() { [[ -z $(job_ids) ]]; }

job_ids() { timeout 10 squeue -h -o %A 2>/dev/null | sort -u; }

stop_daemons() {
  local file pid
  for file in "$@"; do
    pid=$(daemon_pid "$file")
    if [[ -n $pid ]]; then kill "$pid"; fi
  done
  wait_until "$STOP_SECONDS" all_gone "$@" || fail "a daemon of $* does not end, see $state/log"
}

all_gone() { local file; for file in "$@"; do [[ -z $(daemon_pid "$file") ]] || return 1; done; }

# Steps outlive their slurmd: after a crash of a daemon nobody else would ever end them.
kill_steps() {
  local process
  for process in /proc/[0-9]*; do
    if [[ $(cat "$process/comm" 2>/dev/null) == slurmstepd && $(readlink "$process/cwd" 2>/dev/null) == "$state"/* ]]; then
      kill_tree "${process#/proc/}"
    fi
  done
}

kill_tree() {
  local child
  for child in $(cat "/proc/$1"/task/*/children 2>/dev/null); do kill_tree "$child"; done
  kill -KILL "$1" 2>/dev/null || true
}

# Only a folder that is a bed: its name may be a slip of the finger.
purge() {
  [[ -e $state ]] || return 0
  grep -qx 'ClusterName=alpabed' "$state/slurm.conf" 2>/dev/null || fail "$state is not the folder of a bed, it stays"
  rm -rf "$state"
}

# ---- processes

# Lines "PID PIDFILE" of this bed's daemons.
running_daemons() {
  local file pid
  for file in "$state"/run/*.pid; do
    pid=$(daemon_pid "$file")
    if [[ -n $pid ]]; then echo "$pid $file"; fi
  done
}

# The process a pid file names, or nothing if that has ended: its number may belong to another program by now, so the command
# line must name this bed's folder, as those of all its daemons do.
daemon_pid() {
  local pid
  [[ -s $1 ]] || return 0
  pid=$(<"$1")
  if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$state/"; then echo "$pid"; fi
}

# wait_until SECONDS COMMAND...: whether the command comes true in time.
wait_until() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.2
  done
}

main "$@"
