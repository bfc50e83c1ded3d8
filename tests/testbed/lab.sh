#!/usr/bin/env bash
# The first process of a lab, called by lab.py inside new mount, net, uts, ipc and pid namespaces:
# everything of the lab is below it or in its namespaces, so killing it removes all but the cgroup.
#
#   lab.sh enter FOLDER KEY     set up, say "ready"; end with stdin, unless that says "stay"
#   lab.sh forget FOLDER KEY    remove the cgroup of the lab, and those that dead labs left
#                               (in a mount namespace of its own)
set -euo pipefail
verb=$1 folder=$2 key=$3

case $verb in
enter)
    while read -r field value; do # /proc is still the machine's: how the machine calls us
        case $field in Pid:) echo "$value" ;; esac
    done </proc/self/status
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys # of the new network namespace
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mkdir "/sys/fs/cgroup/$key"
    echo 0 >"/sys/fs/cgroup/$key/cgroup.procs"
    exec unshare --cgroup -- "$0" mount "$@"
    ;;

mount)
    shift
    folder=$2
    umount /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup # now the lab's own cgroup is its root
    resolver=$(readlink -m /etc/resolv.conf)
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/lock /run/user /run/netns "${resolver%/*}"
    [ -e "$resolver" ] || : >"$resolver"
    mount --bind "$folder/etc/resolv.conf" "$resolver"
    mount --bind "$folder/etc/hosts" /etc/hosts
    mount --bind "$folder/etc/ssh" /etc/ssh # the lab's hosts are known to every ssh in the lab
    hostname lab
    ip link set lo up
    ip link add tb0 address 02:00:0a:4d:00:00 type bridge # else each new port may change it
    ip link set tb0 up
    # The operator has a cable too: what a bridge itself sends goes to each port, whatever it allows.
    ip link add eth0 type veth peer v-lab
    ip link set v-lab master tb0 up
    ip address add 10.77.0.1/24 dev eth0
    ip link set eth0 up
    ip route add default via 10.77.0.2 # slirp4netns, as soon as it is there
    echo ready
    exec >/dev/null
    # The shell stays: as process 1 it reaps what its hosts and commands leave behind.
    while read -r word; do
        [ "$word" != stay ] || while :; do
            sleep infinity &
            wait
        done
    done
    ;;

forget)
    mkdir -p "$folder/cgroup"
    mount -t cgroup2 cgroup2 "$folder/cgroup"
    [ ! -d "$folder/cgroup/$key" ] || find "$folder/cgroup/$key" -depth -type d -exec rmdir {} +
    # An empty one may also be a lab's that starts this moment: only old ones.
    find "$folder/cgroup" -maxdepth 1 -name 'motley-testbed-*' -mmin +1 \
        -exec grep -qx 'populated 0' '{}/cgroup.events' \; -print0 |
        xargs -0 -I '{}' find '{}' -depth -type d -exec rmdir '{}' + || true
    ;;
esac
