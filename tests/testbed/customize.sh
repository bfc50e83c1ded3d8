#!/bin/sh
# Called by mmdebstrap with the new system's root: what a freshly installed server has beyond its
# packages. Keys, names and addresses are added a host, before its first boot (host.py).
set -eu
root=$1
chroot "$root" useradd --create-home --shell /bin/bash --uid 1000 ops
if [ -d "$root/etc/sudoers.d" ]; then # a bare one has no sudo
    echo 'ops ALL=(ALL) NOPASSWD:ALL' >"$root/etc/sudoers.d/ops"
    chmod 440 "$root/etc/sudoers.d/ops"
fi
if [ -n "$(find /usr/local/share/ca-certificates -name '*.crt' 2>/dev/null)" ]; then
    cp -rL /usr/local/share/ca-certificates "$root/usr/local/share/"
    chroot "$root" update-ca-certificates >/dev/null
fi
# Nothing answers to these in a container: they would only delay the boot or fail.
chroot "$root" systemctl mask --quiet systemd-networkd-wait-online.service e2scrub_all.timer \
    fstrim.timer getty@tty1.service console-getty.service
# systemd-nspawn hides the kernel's boot id behind one of its own, but a unit with a /proc of its own
# (ProtectProc=) still sees the kernel's: on a real host both are one.
cat >"$root/etc/systemd/system/kernel-boot-id.service" <<'UNIT'
[Unit]
Description=Show the kernel's own boot id
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'while mountpoint -q "$0"; do umount "$0"; done' /proc/sys/kernel/random/boot_id
[Install]
WantedBy=sysinit.target
UNIT
chroot "$root" systemctl enable --quiet kernel-boot-id.service
rm -f "$root"/etc/ssh/ssh_host_* "$root/etc/hostname" "$root/etc/resolv.conf" \
    "$root/usr/sbin/policy-rc.d"
: >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"
