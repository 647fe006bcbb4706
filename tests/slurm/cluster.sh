#!/usr/bin/env bash
# A real Slurm cluster of emulated nodes on this machine, everything below one directory:
#   cluster.sh install            Debian's packages, if root and absent (apt-get)
#   cluster.sh start DIR [NODES]  prints nothing, writes DIR/slurm.conf; `export SLURM_CONF=DIR/slurm.conf` to use it
#   cluster.sh stop DIR           cancels its jobs, ends its daemons and nothing else
#   cluster.sh kill-node DIR NODE the node dies: its daemon and all that runs on it (start-node: it comes back)
#   cluster.sh hide DIR NODE PATH what runs on the node finds PATH empty (show DIR NODE: as before)
#   cluster.sh kill-steps DIR NODE JOB  the daemon stays; the daemons of the job's steps and their tasks die
# Partition `batch` is preempted (requeued) by partition `high`, `brusque` without any grace; `lab` is for an account that nobody has. Each node has 4 CPUs and 2 GPUs that are not there.
set -euo pipefail
export PATH=/usr/sbin:/sbin:$PATH
PROGRAMS=(slurmctld slurmd sbatch srun scontrol munged)
PACKAGES=(slurmctld slurmd slurm-client munge)

fail() {
  echo "$*" >&2
  exit 1
}

missing() {
  local program
  for program in "${PROGRAMS[@]}"; do command -v "$program" >/dev/null || echo "$program"; done
}

install_packages() {
  [ -n "$(missing)" ] || return 0
  [ "$(id -u)" = 0 ] || fail "Slurm is not installed, and only root can install it: apt-get install ${PACKAGES[*]}"
  command -v apt-get >/dev/null || fail "Slurm is not installed, and there is no apt-get to install it with"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2 || fail "Slurm is not installed, and apt-get update failed"
  # policy-rc.d is not there in containers: a service that fails to start must not fail the installation
  apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >&2 || [ -z "$(missing)" ] || fail "apt-get could not install Slurm"
}

spawn() { # NAME PROGRAM ARGS...: a daemon in the foreground, so that its pid is known; returns once it is one, or has ended
  local name=$1 i
  shift
  setsid nohup "$@" </dev/null >>"log/$name.out" 2>&1 &
  echo $! >"pids/$name"
  for i in $(seq 6000); do # on a busy machine it is still a shell, `setsid` or `nohup` for a while
    alive "$name" && return 0
    grep -qE '^State:[[:space:]]+[^Z]' "/proc/$!/status" 2>/dev/null || return 0
    sleep 0.01
  done
}

alive() { # NAME: its recorded pid is still a daemon of Slurm, not a zombie, not somebody else by now
  local pid
  pid=$(cat "pids/$1" 2>/dev/null) || return 1
  grep -qE '^State:[[:space:]]+[^Z]' "/proc/$pid/status" 2>/dev/null && grep -qE '^(slurm|munge)' "/proc/$pid/comm"
}

free_ports() { # COUNT: the first of COUNT free ports in a row, below the range of outgoing connections
  python3 - "$1" <<'PY'
import random, socket, sys
count = int(sys.argv[1])
for _ in range(200):
    first = random.randrange(12000, 30000)
    held = []
    try:
        for port in range(first, first + count):
            held.append(socket.socket())
            held[-1].bind(("0.0.0.0", port))
    except OSError:
        continue
    finally:
        for s in held: s.close()
    print(first)
    sys.exit()
sys.exit("no free ports")
PY
}

write_config() { # NODES CPUS: slurm.conf and gres.conf
  local nodes=$1 cpus=$2 first i
  first=$(free_ports $((nodes + 1)))
  for i in 0 1; do mknod "dev/gpu$i" c 1 3 2>/dev/null || ln -sf "/dev/tty$i" "dev/gpu$i"; done
  echo "NodeName=n[1-$nodes] Name=gpu File=$PWD/dev/gpu[0-1]" >gres.conf
  cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$(uname -n)(127.0.0.1)
SlurmctldPort=$first
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its credential has expired: 120 s by default
AuthInfo=socket=$PWD/munge.sock,cred_expire=5
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/spool/%n
SlurmctldPidFile=$PWD/state/slurmctld.pid
SlurmdPidFile=$PWD/spool/%n.pid
SlurmctldLogFile=$PWD/log/slurmctld.log
SlurmdLogFile=$PWD/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
TCPTimeout=2
# Slurm's default: a rank that does not get the CPU for a while still saves within it
KillWait=30
UnkillableStepTimeout=20
InactiveLimit=0
MinJobAge=86400
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=2,bf_interval=2
JobRequeue=1
# what can never run is refused by sbatch, as most sites have it
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
NodeName=n[1-$nodes] NodeHostname=localhost NodeAddr=127.0.0.[11-$((10 + nodes))] Port=[$((first + 1))-$((first + nodes))] CPUs=$cpus RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 State=UP
PartitionName=brusque Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=lab Nodes=ALL AllowAccounts=physics MaxTime=60 State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF State=UP
CONF
}

wait_up() { # NODES: until they are idle or a daemon has ended; a busy machine may leave one without the CPU for long
  local nodes=$1 deadline=$((SECONDS + 120)) states= i
  while [ $SECONDS -lt $deadline ]; do
    alive slurmctld || fail "slurmctld has ended: $(tail -n 3 log/slurmctld.out log/slurmctld.log)"
    for i in $(seq "$nodes"); do alive "n$i" || fail "slurmd of n$i has ended: $(tail -n 3 "log/n$i.out")"; done
    states=$(timeout 3 sinfo -h -N -p batch -o '%N %t' 2>&1 || true)
    [ "$(grep -cE ' idle$' <<<"$states")" = "$nodes" ] && return 0
    sleep 0.1
  done
  fail "the cluster did not come up: $states"
}

start() { # DIR NODES
  local nodes=${2:-2} cpus=4 i
  [ "$(id -u)" = 0 ] || fail "a Slurm cluster of emulated nodes needs root"
  [ -z "$(missing)" ] || fail "not installed: $(missing | tr '\n' ' ')"
  mkdir -p "$1" && cd "$1"
  mkdir -p state spool log pids dev
  for i in ${!SLURM_@}; do unset "$i"; done
  export SLURM_CONF=$PWD/slurm.conf
  write_config "$nodes" "$cpus"
  (umask 077 && head -c 128 /dev/urandom >munge.key)
  spawn munged munged --foreground --force --num-threads=2 --key-file="$PWD/munge.key" --socket="$PWD/munge.sock" \
    --pid-file="$PWD/munged.pid" --log-file="$PWD/log/munged.log" --seed-file="$PWD/munged.seed"
  for i in $(seq 1200); do [ -S munge.sock ] && break || sleep 0.05; done
  spawn slurmctld slurmctld -D
  for i in $(seq "$nodes"); do
    mkdir -p "spool/n$i"
    spawn "n$i" slurmd -D -N "n$i"
  done
  wait_up "$nodes"
}

stop_daemon() { # NAME
  local pid i
  alive "$1" || return 0
  pid=$(cat "pids/$1")
  kill -TERM "$pid" 2>/dev/null || true
  for i in $(seq 100); do alive "$1" || return 0; sleep 0.05; done
  kill -KILL "$pid" 2>/dev/null || true
}

stop() { # DIR
  local jobs i name
  cd "$1" 2>/dev/null || return 0
  export SLURM_CONF=$PWD/slurm.conf
  jobs=$(timeout 5 squeue -h -o %A 2>/dev/null || true)
  if [ -n "$jobs" ]; then
    # shellcheck disable=SC2086 # one word per job
    timeout 10 scancel $jobs 2>/dev/null || true
    for i in $(seq 150); do
      [ -z "$(timeout 5 squeue -h -o %A 2>/dev/null || true)" ] && break
      sleep 0.1
    done
  fi
  for name in n1 n2 n3 n4 slurmctld munged; do stop_daemon "$name"; done
}

kill_node() { # DIR NODE [JOB]: slurmd alone would leave its tasks running, re-parented; with JOB, its steps alone
  cd "$1"
  python3 - "$PWD/spool/$2/$2_${3:+$3.}" "$(cat "pids/$2")" "${3:-}" <<'PY'
import os, signal, sys
from pathlib import Path
prefix, daemon, with_daemon = sys.argv[1], int(sys.argv[2]), not sys.argv[3]
# each step's slurmstepd listens on a unix socket SPOOL/NODE_JOB.STEP
lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
sockets = {f"socket:[{words[6]}]" for words in lines if len(words) == 8 and words[7].startswith(prefix)}
children, steps = {}, []
for stat in Path("/proc").glob("[0-9]*/stat"):
    try:
        name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        pid = int(stat.parent.name)
        children.setdefault(int(rest.split()[1]), []).append(pid)
        if name == "slurmstepd" and any(os.readlink(fd) in sockets for fd in (stat.parent / "fd").iterdir()):
            steps.append(pid)
    except OSError:
        pass
def below(pid):
    return [pid, *(p for child in children.get(pid, []) for p in below(child))]
doomed = [*([daemon] if with_daemon else []), *(pid for step in steps for pid in below(step))]
for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: nobody reports the others' deaths
    for pid in doomed:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
PY
}

start_node() { # DIR NODE: a node that died comes back
  cd "$1"
  export SLURM_CONF=$PWD/slurm.conf
  spawn "$2" slurmd -D -N "$2"
}

wait_idle() { # NODE
  local i
  for i in $(seq 1200); do
    [ "$(timeout 3 sinfo -h -N -n "$1" -p batch -o '%t' 2>&1 || true)" = idle ] && return 0
    sleep 0.1
  done
  fail "$1 does not come up"
}

hide() { # DIR NODE PATH: a mount of its own, as on a node that lacks a file system
  cd "$1"
  export SLURM_CONF=$PWD/slurm.conf
  stop_daemon "$2"
  # shellcheck disable=SC2016 # expanded by the inner shell
  spawn "$2" unshare --mount --propagation private sh -c 'mount -t tmpfs tmpfs "$1" && exec slurmd -D -N "$2"' hide "$3" "$2"
  wait_idle "$2"
}

show() { # DIR NODE
  cd "$1"
  export SLURM_CONF=$PWD/slurm.conf
  stop_daemon "$2"
  spawn "$2" slurmd -D -N "$2"
  wait_idle "$2"
}

case ${1:-} in
  install) install_packages ;;
  start) start "$2" "${3:-2}" ;;
  stop) stop "$2" ;;
  kill-node) kill_node "$2" "$3" ;;
  kill-steps) kill_node "$2" "$3" "$4" ;;
  start-node) start_node "$2" "$3" ;;
  hide) hide "$2" "$3" "$4" ;;
  show) show "$2" "$3" ;;
  *) fail "usage: cluster.sh install | start DIR [NODES] | stop DIR | kill-node DIR NODE | kill-steps DIR NODE JOB | start-node DIR NODE | hide DIR NODE PATH | show DIR NODE" ;;
esac
