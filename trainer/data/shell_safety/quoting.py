"""Families of class needs-quoting: an expansion that the shell splits and globs.

Unquoted is sound in an assignment, in `[[ ]]`, in `case` and in arithmetic, so only the place of
the quotes decides.
"""

from __future__ import annotations

from trainer.data.shell_safety.family import NEEDS_QUOTING, Family


def _family(name: str, sound: tuple[str, ...], defective: tuple[str, ...]) -> Family:
    return Family(f"quoting-{name}", NEEDS_QUOTING, sound, defective)


FAMILIES = (
    _family(
        "copy",
        (
            '@v=$1\ncp "$@v" "@d/"',
            '@v=$1\n@w=@d\ncp -a "$@v" "$@w/"',
            '@v=$1\ncp -p "$@v" "@d/@n"',
            '@v="$1"\n@w=$@v\ncp -- "$@w" @d/',
            '@v=@d\ncp -r "$@v/." "$1"',
            '@v=$1\n@w=$2\ncp "$@v" "$@w"',
        ),
        (
            '@v="$1"\ncp $@v "@d/"',
            '@v=$1\n@w="@d"\ncp -a "$@v" $@w/',
            '@v="$1"\ncp -p $@v "@d/@n"',
            '@v=$1\n@w="$@v"\ncp -- $@w @d/',
            '@v="@d"\ncp -r $@v/. "$1"',
            '@v="$1"\n@w=$2\ncp "$@v" $@w',
        ),
    ),
    _family(
        "test",
        (
            '@v=$1\nif [ "$@v" = @word ]; then\n  echo "@m"\nfi',
            'if [[ $1 = @word ]]; then\n  echo "@m"\nfi',
            '@v=$1\nif [ -f "$@v" ]; then\n  echo "@m"\nfi',
            "@v=$1\n[[ -f $@v ]] || exit 1",
            '@v="$2"\n[ -d "$@v" ] || exit 1',
            'if [[ -z $1 ]]; then\n  echo "@m"\nfi',
        ),
        (
            '@v="$1"\nif [ $@v = @word ]; then\n  echo "@m"\nfi',
            'if [ $1 = @word ]; then\n  echo "@m"\nfi',
            '@v="$1"\nif [ -f $@v ]; then\n  echo "@m"\nfi',
            '@v="$1"\n[ -f $@v ] || exit 1',
            '@v="$2"\n[ -d $@v ] || exit 1',
            'if [ -z $1 ]; then\n  echo "@m"\nfi',
        ),
    ),
    _family(
        "loop",
        (
            '@v=("$@")\nfor entry in "${@v[@]}"; do\n  echo "$entry"\ndone',
            'for entry in "$@"; do\n  wc -l "$entry"\ndone',
            'for entry in "$@"; do\n  gzip -kf "$entry"\ndone',
            'while IFS= read -r entry; do\n  wc -c "$entry"\ndone < "@f"',
            'for entry in @d/*.@ext; do\n  cksum "$entry"\ndone',
            '@v=(@word @n)\nfor entry in "${@v[@]}"; do\n  wc -c "@d/$entry"\ndone',
        ),
        (
            '@v=("$@")\nfor entry in ${@v[@]}; do\n  echo "$entry"\ndone',
            'for entry in $@; do\n  wc -l "$entry"\ndone',
            'for entry in $*; do\n  gzip -kf "$entry"\ndone',
            'for entry in $(cat "@f"); do\n  wc -c "$entry"\ndone',
            "for entry in @d/*.@ext; do\n  cksum $entry\ndone",
            '@v=(@word @n)\nfor entry in "${@v[@]}"; do\n  wc -c @d/$entry\ndone',
        ),
    ),
    _family(
        "print",
        (
            "@v=$1\nprintf '%s\\n' \"$@v\"",
            '@v=$1\necho "$@v" > "@f"',
            '@w=$1\necho "@word: $@w"',
            'case $1 in\n  @word) echo "$2" ;;\n  *) echo "@m" ;;\nesac',
            '@v=$(( $1 + @n ))\necho "$@v"',
            'case $2 in\n  @word) echo "@m" ;;\n  *) printf \'%s\\n\' "$2" ;;\nesac',
        ),
        (
            "@v=\"$1\"\nprintf '%s\\n' $@v",
            '@v="$1"\necho $@v > "@f"',
            '@w="$1"\necho @word: $@w',
            'case "$1" in\n  @word) echo $2 ;;\n  *) echo "@m" ;;\nesac',
            '@v="$1-@n"\necho $@v',
            'case "$2" in\n  @word) echo "@m" ;;\n  *) printf \'%s\\n\' $2 ;;\nesac',
        ),
    ),
    _family(
        "search",
        (
            '@v=$1\ngrep -c "$@v" "@f"',
            '@v=@d\ngrep -rl @word "$@v"',
            '@v=$1\nfind "$@v" -name "*.@ext" | sort',
            '@v=$1\nwc -l "$@v"',
            '@v=$2\nsort -u "$@v" > "@f"',
            '@v=$1\ngrep -q "$@v" @f',
        ),
        (
            '@v="$1"\ngrep -c $@v "@f"',
            '@v="@d"\ngrep -rl @word $@v',
            '@v="$1"\nfind $@v -name "*.@ext" | sort',
            '@v="$1"\nwc -l $@v',
            '@v="$2"\nsort -u $@v > "@f"',
            '@v="$1"\ngrep -q $@v @f',
        ),
    ),
    _family(
        "forward",
        (
            'run() {\n  @cmd "$@"\n}\nrun @word',
            '@v=$1\n@cmd --input "$@v" --count $#',
            '@v=("$@")\n@cmd "${@v[@]}"',
            '@cmd --name "$*"',
            '@v=$1\nshift\n@cmd "$@v" "$@"',
            '@v=$2\n@cmd --output="$@v" || exit $?',
        ),
        (
            "run() {\n  @cmd $@\n}\nrun @word",
            '@v="$1"\n@cmd --input $@v --count $#',
            '@v=("$@")\n@cmd ${@v[@]}',
            "@cmd --name $*",
            '@v="$1"\nshift\n@cmd "$@v" $@',
            '@v="$2"\n@cmd --output=$@v || exit $?',
        ),
    ),
)
