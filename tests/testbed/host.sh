#!/bin/sh
# Keeps one host, called by host.py in the lab: host.sh NAME NSPAWN-ARGUMENTS...
# nspawn ends with 133 when the host asks for a reboot; anything else is a power-off.
mkdir -p "/sys/fs/cgroup/$1" # a cgroup each: two systemds in one delete each other's slices
echo $$ >"/sys/fs/cgroup/$1/cgroup.procs"
shift
while :; do
    SYSTEMD_NSPAWN_API_VFS_WRITABLE=network systemd-nspawn "$@" </dev/null
    [ $? = 133 ] || exit
done
