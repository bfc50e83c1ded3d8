#!/bin/sh
# A Slurm of two nodes on this machine runs one job: slurm.sh STATE JOB_FOLDER; exits as the job does.
# Started in namespaces of its own (mount, network, pid, host name): nothing is left of it.
set -eu
state=$1 job=$2
ip link set lo up
hostname controller
printf '127.0.0.1 localhost controller\n127.0.0.1 n1 n2\n' > "$state/hosts"
mount --bind "$state/hosts" /etc/hosts
mkdir -m 755 "$state/munge" "$state/controller" "$state/spool-n1" "$state/spool-n2"
head -c 1024 /dev/urandom > "$state/munge/key"
chmod 400 "$state/munge/key"
munged --force --key-file="$state/munge/key" --socket="$state/munge/socket" \
    --pid-file="$state/munge/pid" --log-file="$state/munge/log" --seed-file="$state/munge/seed"
export SLURM_CONF="$state/slurm.conf"
cat > "$SLURM_CONF" <<END
ClusterName=motley
SlurmctldHost=controller(127.0.0.1)
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
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16901 CPUs=4
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=16902 CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
slurmctld
slurmd -N n1
slurmd -N n2
until [ "$(sinfo --noheader --Node --states=idle | wc -l)" = 2 ]; do sleep 0.2; done
cd "$job"
exec sbatch --wait job.sbatch
