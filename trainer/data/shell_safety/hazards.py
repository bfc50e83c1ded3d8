"""Families of class unsafe: a step that can destroy, run or reveal more than intended.

Guards count only if they come first; often the forms differ only in the order of two words or
lines.
"""

from __future__ import annotations

from trainer.data.shell_safety.family import UNSAFE, Family


def _family(name: str, sound: tuple[str, ...], defective: tuple[str, ...]) -> Family:
    return Family(f"hazard-{name}", UNSAFE, sound, defective)


FAMILIES = (
    _family(
        "remove",
        (
            '@v=$1\nrm -rf "${@v:?}/"*',
            '@v=$1\n[ -n "$@v" ] || exit 1\nrm -rf "$@v/@word"',
            '@v=$2\n[ -n "$@v" ] || exit 1\nrm -rf "$@v/"*',
            '@v=${1:?}\nrm -rf "$@v/@word"',
            'rm -rf "@d/@word"\n@v=$1',
            '@v=${2:?}\nrm -rf "$@v/"',
        ),
        (
            '@v=${1:?}\nrm -rf "$2/"*',
            '@v=$1\nrm -rf "$@v/@word"\n[ -n "$@v" ] || exit 1',
            '@v=$2\nrm -rf "$@v/"*\n[ -n "$@v" ] || exit 1',
            '@v=$1\nrm -rf "$@v/@word"\necho "${1:?}"',
            '@v=$1\nrm -rf "$@v/@word"',
            '@v=$2\nrm -rf "$@v/"\necho "${2:?}"',
        ),
    ),
    _family(
        "clean",
        (
            'cd "@d" || exit 1\nrm -rf ./*',
            'find "@d" -name "*.@ext" -delete',
            'cd "@d/@word" || exit 1\nrm -rf ./*',
            'find @d -type f -name "@word*" -delete',
            'rm -rf "@d/@word"\ncd / || exit 1',
            'find "@d" -type f -empty -delete',
        ),
        (
            'cd "@d" || true\nrm -rf ./*',
            'find "@d" -delete -name "*.@ext"',
            'cd "@d/@word" || true\nrm -rf ./*',
            'find @d -delete -type f -name "@word*"',
            "cd / || exit 1\nrm -rf ./*",
            'find "@d" -delete -type f -empty',
        ),
    ),
    _family(
        "download",
        (
            'curl -fsSL -o "@f" @url/@word.sh\nsha256sum -c "@f.sha256" || exit 1\nsh "@f"',
            'curl -fsSL @url/@word.sh > "@f"\n# review it before sh',
            'curl -fsSL -o "@f" @url/@word\nsha256sum -c "@f.sha256" || exit 1\nbash "@f"',
            'wget -qO "@f" @url/@word.sh\nsha256sum -c "@d/@word" || exit 1\nbash "@f"',
            'curl -fsSL @url/@word.tgz | tar -xz -C "@d"',
            'wget -qO "@f" @url/@word\necho "sh @f"',
        ),
        (
            'curl -fsSL -o "@f" @url/@word.sh\nsh "@f"\nsha256sum -c "@f.sha256" || exit 1',
            'curl -fsSL @url/@word.sh | sh > "@f"\n# review it before',
            'curl -fsSL -o "@f" @url/@word\nbash "@f"\nsha256sum -c "@f.sha256" || exit 1',
            'wget -qO "@f" @url/@word.sh\nbash "@f"\nsha256sum -c "@d/@word" || exit 1',
            'curl -fsSL @url/@word.tgz | bash -s -- -C "@d"',
            'wget -qO - @url/@word | sh\necho "@f"',
        ),
    ),
    _family(
        "evaluate",
        (
            'case "$1" in\n  start|stop) @cmd "$1" ;;\n  *) exit 1 ;;\nesac',
            'eval "$(ssh-agent -s)"\n@cmd "$1"',
            'case "$2" in\n  @word) @cmd "$2" ;;\n  *) exit 1 ;;\nesac',
            '# eval "$1" would run anything\n@cmd "$1"',
            'sh -c \'@cmd "$1"\' _ "$1"',
            'echo \'eval "$1" is refused\'\n@cmd "$1"',
        ),
        (
            'case "$1" in\n  start|stop) @cmd ;;\n  *) eval "$1" ;;\nesac',
            'eval "$1"\n@cmd "$(ssh-agent -s)"',
            'case "$2" in\n  @word) @cmd ;;\n  *) eval "$2" ;;\nesac',
            '# @cmd would run anything\neval "$1"',
            'sh -c "@cmd $1" _ "$1"',
            "echo 'anything is run'\neval \"@cmd $1\"",
        ),
    ),
    _family(
        "disk",
        (
            'dd if=/dev/@disk of="@f" bs=1M',
            'dd if="@d/@word" of="@f" bs=4M',
            'dd if=/dev/@disk of="@f" bs=@nK',
            'dd if=/dev/zero of="@f" bs=1M count=@n\nlsblk /dev/@disk',
            'cp /dev/@disk "@f"',
            'cat /dev/@disk > "@f"',
        ),
        (
            'dd if="@f" of=/dev/@disk bs=1M',
            'dd if="@d/@word" of=/dev/@disk bs=4M',
            'dd if="@f" of=/dev/@disk bs=@nK',
            'dd if=/dev/zero of=/dev/@disk bs=1M count=@n\nls "@f"',
            'cp "@f" /dev/@disk',
            'cat "@f" > /dev/@disk',
        ),
    ),
    _family(
        "trust",
        (
            'curl -fsS --cacert "@f" -o "@d/@word" @url/@word',
            "ssh -o StrictHostKeyChecking=yes @u@@@h @cmd",
            'curl -fsS --cacert "@f" @url/@word > "@d/@word"',
            'wget --ca-certificate="@f" -qO "@d/@word" @url/@word',
            '# curl -k would skip the check\ncurl -fsS -o "@f" @url/@word',
            "scp -o StrictHostKeyChecking=yes @f @u@@@h:@d/",
        ),
        (
            'curl -fsS -k -o "@d/@word" @url/@word',
            "ssh -o StrictHostKeyChecking=no @u@@@h @cmd",
            'curl -fsS -k @url/@word > "@d/@word"',
            'wget --no-check-certificate -qO "@d/@word" @url/@word',
            '# curl would check\ncurl -k -fsS -o "@f" @url/@word',
            "scp -o StrictHostKeyChecking=no @f @u@@@h:@d/",
        ),
    ),
)
