#!/bin/sh
# A Slurm of two nodes on this machine runs one job: slurm.sh STATE JOB_FOLDER; exits as the job does.
# Started in namespaces of its own (mount, network, pid, host name): nothing is left of it.
set -eu
state=$1 job=$2
ip link set lo up
ip address add 10.99.0.1/32 dev lo # names are looked up by who has an address besides 127.0.0.1
ip address add 10.99.0.2/32 dev lo
hostname n1
printf '127.0.0.1 localhost\n10.99.0.1 n1\n10.99.0.2 n2\n' > "$state/hosts"
mount --bind "$state/hosts" /etc/hosts
mkdir -m 755 "$state/munge" "$state/controller" "$state/spool-n1" "$state/spool-n2"
head -c 1024 /dev/urandom > "$state/munge/key"
chmod 400 "$state/munge/key"
munged --force --key-file="$state/munge/key" --socket="$state/munge/socket" \
    --pid-file="$state/munge/pid" --log-file="$state/munge/log" --seed-file="$state/munge/seed"
export SLURM_CONF="$state/slurm.conf"
cat > "$SLURM_CONF" <<END
ClusterName=motley
SlurmctldHost=n1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
CredType=cred/munge
StateSaveLocation=$state/controller
SlurmctldPidFile=$state/controller.pid
SlurmctldLogFile=$state/controller.log
SlurmdPidFile=$state/%n.pid
SlurmdSpoolDir=$state/spool-%n
SlurmdLogFile=$state/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=n1 Port=16901 CPUs=4
NodeName=n2 NodeHostname=n1 NodeAddr=n2 Port=16902 CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
slurmctld
slurmd -N n1
slurmd -N n2
waited=0
until [ "$(sinfo --noheader --Node --states=idle | wc -l)" = 2 ]; do
    [ "$waited" -lt 120 ] || { sinfo --long --Node >&2; exit 1; }
    waited=$((waited + 1))
    sleep 0.5
done
cd "$job"
# Not by exec: this shell is the first process here, and waits for those that lose their parent.
sbatch --wait job.sbatch || exit $?
