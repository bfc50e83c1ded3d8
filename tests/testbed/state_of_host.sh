# Prints a host's state, a fact a line: state_of_host.sh FOLDER...; see state.py.
LC_ALL=C
export LC_ALL
for part in logits checkpoints; do timeout 20 stat "/srv/motley/$part/." >/dev/null 2>&1; done
find "$@" -xdev -printf 'file %p %y %m %U:%G %l\n' 2>/dev/null | sort
find "$@" -xdev -type f -exec sha256sum {} + 2>/dev/null | sed -E 's/^(\S+)  (.*)/file \2 \1/' | sort
dpkg-query -W -f 'package ${Package} ${Version} ${Status}\n' | sort
getent passwd | sed 's/^/account /' | sort
getent group | sed 's/^/group /' | sort
kinds=service,socket,timer,mount,automount
systemctl list-units --type=$kinds --state=active,failed --plain --no-legend |
    awk '{print "unit", $1, $3, $4}' | sort
systemctl list-unit-files --state=enabled --plain --no-legend | awk '{print "enabled", $1}' | sort
systemctl show '*' --property=Id,NeedDaemonReload | awk -F= '
    $1 == "Id" {id = $2} $1 == "NeedDaemonReload" && $2 == "yes" {print "systemd has an old", id}'
awk '$5 ~ "^/srv/" {i = 7; while ($i != "-") i++; print "mount", $5, $(i + 1), $(i + 2)}' /proc/self/mountinfo
ss -Hltn | awk '{print "listens", $4}' | grep -vE ':(3[3-9]|[4-6][0-9])[0-9]{3}$' | sort -u
command -v nft >/dev/null && nft --stateless list ruleset | sed 's/^/rule /'
for image in /boot/initrd.img-*; do
    [ -e "$image" ] || continue
    lsinitramfs "$image" | grep modprobe.d | sed "s,^,initramfs ${image##*/} ,"
    blacklist=$(mktemp -d) && unmkinitramfs "$image" "$blacklist" &&
        find "$blacklist" -name 'motley-*' -exec cat {} + | sed "s/^/initramfs says /"
    rm -rf "$blacklist"
done
# Processes that read their settings when they start and never again.
ticks=$(getconf CLK_TCK)
for pair in nfs-ganesha.service=/etc/ganesha/ganesha.conf; do
    unit=${pair%%=*} file=${pair#*=}
    pid=$(systemctl show --property=MainPID --value "$unit")
    if [ "${pid:-0}" != 0 ] && [ -e "$file" ]; then
        age=$(awk -v t="$ticks" -v up="$(cut -d' ' -f1 /proc/uptime)" '{print int(up - $22 / t)}' "/proc/$pid/stat")
        file_age=$(($(date +%s) - $(stat -c %Y "$file")))
        [ "$age" -le $((file_age + 1)) ] && echo "reads $unit its settings" || echo "reads $unit older settings"
    fi
done
for file in /etc/systemd/system/*motley*.mount /etc/systemd/system/*motley*.automount /etc/systemd/system/*motley*.timer; do
    [ -e "$file" ] || continue
    since=$(systemctl show --property=ActiveEnterTimestamp --value "${file##*/}")
    [ -z "$since" ] || [ -z "$(find "$file" -newermt "1 second $since")" ] || echo "older than its file: ${file##*/}"
done
exit 0
