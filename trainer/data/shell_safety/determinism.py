"""Families of class non-deterministic: what is written or decided differs between equal runs.

A clock, a process id or a random number that only reaches a log on stderr, a comment or a single
quoted string is sound; so is a generator whose seed is set before its use.
"""

from __future__ import annotations

from trainer.data.shell_safety.family import NON_DETERMINISTIC, Family


def _family(name: str, sound: tuple[str, ...], defective: tuple[str, ...]) -> Family:
    return Family(f"determinism-{name}", NON_DETERMINISTIC, sound, defective)


FAMILIES = (
    _family(
        "random",
        (
            'RANDOM=@n\n@v=$RANDOM\necho "@word-$@v"',
            'RANDOM=@n\necho "$RANDOM" > "@f"',
            'RANDOM=@n\n@v=$(( RANDOM % @n ))\necho "$@v"',
            "echo '$RANDOM is not used for @word'",
            '# $RANDOM would change @word\n@v=@n\necho "@word-$@v"',
            'RANDOM=@n\nif [ "$RANDOM" -gt @n ]; then\n  echo "@m"\nfi',
        ),
        (
            '@v=$RANDOM\nRANDOM=@n\necho "@word-$@v"',
            'echo "$RANDOM" > "@f"\nRANDOM=@n',
            '@v=$(( RANDOM % @n ))\necho "$@v"\nRANDOM=@n',
            'echo "$RANDOM is used for @word"',
            '# a fixed number would not change @word\n@v=$RANDOM\necho "@word-$@v"',
            'if [ "$RANDOM" -gt @n ]; then\n  echo "@m"\nfi',
        ),
    ),
    _family(
        "clock",
        (
            'echo "@m $(date +%s)" >&2\necho "@word" > "@f"',
            '@v=$(date -u -d "@2" +%F)\necho "@word $@v" > "@f"',
            '@v=$(date -u -d "@86400" +%s)\necho "@word-$@v"',
            '# date +%s is not part of the name\ntar -cf "@f" @d',
            '@v=$(date +%F)\necho "@m $@v" >&2',
            'echo "@m" > "@f"\ndate +%T >&2',
        ),
        (
            'echo "@m" >&2\necho "@word $(date +%s)" > "@f"',
            '@v=$(date -u +%F)\necho "@word $@v" > "@f"',
            '@v=$(date +%s)\necho "@word-$@v"',
            '# the time is part of the name\ntar -cf "@f-$(date +%s)" @d',
            '@v=$(date +%F)\necho "@m $@v" > "@f"',
            'echo "@m" >&2\ndate +%T > "@f"',
        ),
    ),
    _family(
        "process",
        (
            '@v=$$\necho "pid $@v" >&2\necho "@word" > "@f"',
            'cp "@f" "@d/@word.$1"\necho "@m $$" >&2',
            "echo '@m $$'",
            '# $$ is not part of @word\necho "@word" > "@d/@word.@ext"',
            'echo "pid $BASHPID" >&2\ncp "@f" "@d/@word"',
            "printf '@word $$\\n' > \"@f\"",
        ),
        (
            '@v=$$\necho "pid" >&2\necho "@word $@v" > "@f"',
            'cp "@f" "@d/@word.$$"\necho "@m $1" >&2',
            'echo "@m $$"',
            '# the pid is part of @word\necho "@word" > "@d/@word.$$.@ext"',
            'echo "@m" >&2\ncp "@f" "@d/@word-$BASHPID"',
            'printf "@word $$\\n" > "@f"',
        ),
    ),
    _family(
        "scratch",
        (
            '@v=$(mktemp)\nsort "@f" > "$@v"\ncp "$@v" "@d/@word"\nrm -f "$@v"',
            '@v=$(mktemp -d)\ncp "@f" "$@v/"\nwc -l < "$@v/@word" > "@d/@word"',
            '@v=$(mktemp)\nsort -u "@f" > "$@v"\nmv -f "$@v" "@d/@word"',
            '@v=$(mktemp -d)\necho "@m $@v" >&2',
            '@v=$(mktemp)\ngrep @word "@f" > "$@v" || true\ncat "$@v"',
            '@v=$(mktemp)\necho "scratch $@v" >&2\ncp "@f" "$@v"',
        ),
        (
            '@v=$(mktemp)\nsort "@f" > "$@v"\necho "$@v" > "@d/@word"\nrm -f "$@v"',
            '@v=$(mktemp -d)\ncp "@f" "$@v/"\necho "$@v/@word" > "@d/@word"',
            '@v=$(mktemp)\nsort -u "@f" > "$@v"\necho "$@v" > "@d/@word"',
            '@v=$(mktemp -d)\necho "@m $@v" > "@f"',
            '@v=$(mktemp)\ngrep @word "@f" > "$@v" || true\necho "$@v"',
            '@v=$(mktemp)\ncp "@f" "$@v"\necho "scratch $@v"',
        ),
    ),
    _family(
        "directory",
        (
            'find @d -name "*.@ext" | sort | head -n 1',
            'find @d -type f | sort > "@f"',
            '@v=$(find @d -type f | sort | head -n @n)\necho "$@v"',
            "ls @d | sort | tail -n 1",
            'find @d -type f -print0 | sort -z | xargs -0 cat > "@f"',
            "find @d -type d | sort | tail -n @n",
        ),
        (
            'find @d -name "*.@ext" | head -n 1 | sort',
            'find @d -type f > "@f"',
            '@v=$(find @d -type f | head -n @n | sort)\necho "$@v"',
            "ls -t @d | tail -n 1",
            'find @d -type f -print0 | xargs -0 cat > "@f"',
            "find @d -type d | tail -n @n | sort",
        ),
    ),
    _family(
        "identity",
        (
            '@v=$(uuidgen --sha1 -n @@dns -N @word)\necho "$@v" > "@f"',
            '@v=$(openssl dgst -sha256 "@f")\necho "$@v"',
            '@v=$(uuidgen --sha1 -n @@url -N @word)\necho "@word=$@v"',
            '# uuidgen gives another id each time\n@v=@word-@n\necho "id=$@v"',
            '@v=$(sha256sum "@f" | cut -c 1-8)\ncp "@f" "@d/$@v"',
            'openssl dgst -md5 "@f" > "@d/@word"',
        ),
        (
            '@v=$(uuidgen)\necho "$@v" > "@f"',
            '@v=$(openssl rand -hex @n)\necho "$@v"',
            '@v=$(uuidgen -r)\necho "@word=$@v"',
            '# @word-@n would give the same id each time\n@v=$(uuidgen)\necho "id=$@v"',
            '@v=$(head -c 8 /dev/urandom | sha256sum | cut -c 1-8)\ncp "@f" "@d/$@v"',
            'openssl rand -base64 @n > "@d/@word"',
        ),
    ),
)
