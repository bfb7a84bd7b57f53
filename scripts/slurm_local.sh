#!/usr/bin/env bash
# A real Slurm of one node on this machine, for tests and trials: munged, slurmctld and slurmd on the loopback host, no
# systemd, nothing written outside its folder. Needs slurmctld, slurmd, slurm-client and munge (Debian); any user.
#
#   scripts/slurm_local.sh start    # then: export SLURM_CONF=…, which it prints
#   scripts/slurm_local.sh status
#   scripts/slurm_local.sh stop
#
# SLURM_LOCAL: its folder (default /tmp/pacer-slurm-<uid>); SLURM_LOCAL_PORT: its first port (default 16817).
set -euo pipefail
DIR="${SLURM_LOCAL:-/tmp/pacer-slurm-$(id -u)}"
PORT="${SLURM_LOCAL_PORT:-16817}"
export SLURM_CONF="$DIR/slurm.conf"
PATH="$PATH:/usr/sbin:/sbin"
HOST="$(hostname -s)"

configure() {
    mkdir -p "$DIR"/{state,spool,munge}
    chmod 755 "$DIR" "$DIR/munge"
    [ -s "$DIR/munge/key" ] || (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")
    local cores
    cores=$(nproc --all)
    # cred_expire: how long a requeued job waits before it starts again; config_overrides: at least four jobs at once
    cat >"$SLURM_CONF" <<CONF
ClusterName=pacer
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=$((cores < 4 ? 4 : cores)) State=UNKNOWN
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

running() {  # NAME: whether the daemon of that pid file lives
    [ -s "$DIR/$1.pid" ] && kill -0 "$(cat "$DIR/$1.pid")" 2>/dev/null
}

start() {
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null || { echo "error: $program is not installed; apt-get install slurm-wlm munge" >&2; exit 2; }
    done
    configure
    running munged || munged --force --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" \
        --pid-file="$DIR/munged.pid" --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" 2>>"$DIR/munge/log"
    running slurmctld || slurmctld -c >>"$DIR/slurmctld.log" 2>&1
    running slurmd || slurmd -c >>"$DIR/slurmd.log" 2>&1
    for _ in $(seq 150); do
        if sinfo --noheader --states=idle,alloc,mix --format=%n 2>/dev/null | grep -q .; then
            echo "export SLURM_CONF=$SLURM_CONF"
            return
        fi
        sleep 0.2
    done
    echo "error: the node does not come up; see $DIR/slurmctld.log and $DIR/slurmd.log" >&2
    exit 1
}

stop() {  # the daemons of this folder alone, by the ids that they wrote
    running slurmctld && scancel --quiet --user="$(id -un)" 2>/dev/null || true
    for name in slurmd slurmctld munged; do
        if running "$name"; then
            pid="$(cat "$DIR/$name.pid")"
            kill "$pid"
            for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
            kill -9 "$pid" 2>/dev/null || true
        fi
        rm -f "$DIR/$name.pid"
    done
}

status() {
    for name in munged slurmctld slurmd; do
        running "$name" && echo "$name runs" || { echo "$name does not run"; code=1; }
    done
    [ "${code:-0}" = 0 ] && sinfo && squeue
    return "${code:-0}"
}

case "${1:-}" in
    start | stop | status) "$1" ;;
    *) echo "usage: $0 start|stop|status" >&2; exit 2 ;;
esac
