"""Families of class non-idempotent: a second run fails, or changes what the first one left.

The check, the flag or the truncation that makes a step repeatable must come before it and be
about it; the same words also occur too late or about something else.
"""

from __future__ import annotations

from trainer.data.shell_safety.family import NON_IDEMPOTENT, Family


def _family(name: str, sound: tuple[str, ...], defective: tuple[str, ...]) -> Family:
    return Family(f"idempotence-{name}", NON_IDEMPOTENT, sound, defective)


FAMILIES = (
    _family(
        "mkdir",
        (
            'mkdir -p "@d"\ncp "@f" "@d/"',
            '@v=@d\nmkdir -p "$@v/@word"',
            'mkdir -p "@d/@word"\nls -l "@d"',
            '[ -d "@d" ] || mkdir "@d"',
            'if [ ! -d "@d" ]; then\n  mkdir "@d"\nfi',
            '@v=@d\n[ -d "$@v" ] || mkdir "$@v"',
        ),
        (
            'mkdir "@d"\ncp -p "@f" "@d/"',
            '@v=@d\nmkdir "$@v/@word"',
            'mkdir "@d/@word"\nls -lp "@d"',
            'mkdir "@d"\n[ -d "@d" ] || exit 1',
            'if mkdir "@d"; then\n  echo "@m"\nelse\n  exit 1\nfi',
            '@v=@d\nmkdir "$@v"\n[ -d "$@v" ] || exit 1',
        ),
    ),
    _family(
        "link",
        (
            'ln -sfn "@d" "@f"',
            '@v=@d\nln -sf "$@v/@word" "@f"',
            'ln -sf "@d/@word" "@f"',
            '[ -L "@f" ] || ln -s "@d" "@f"',
            'rm -f "@f"\nln -s "@d/@word" "@f"',
            '@v=@f\nrm -f "$@v"\nln -s "@d" "$@v"',
        ),
        (
            'ln -s "@d" "@f"',
            '@v=@d\nln -s "$@v/@word" "@f"',
            'ln -s "@d/@word" "@f"',
            'ln -s "@d" "@f"\n[ -L "@f" ] || exit 1',
            'ln -s "@d/@word" "@f"\nrm -f "@d/@n"',
            '@v=@f\nln -s "@d" "$@v"\nrm -f "@d/@word"',
        ),
    ),
    _family(
        "account",
        (
            "id -u @u >/dev/null 2>&1 || useradd @u",
            "if ! id -u @u >/dev/null 2>&1; then\n  useradd -m @u\nfi",
            "id -u @u >/dev/null 2>&1 || useradd -m @u",
            "getent group @u >/dev/null || groupadd @u",
            'groupadd -f @u\nusermod -aG @u "$USER"',
            "if ! getent group @u >/dev/null; then\n  groupadd @u\nfi",
        ),
        (
            "useradd @u\nid -u @u >/dev/null 2>&1 || exit 1",
            "if ! useradd -m @u; then\n  id -u @u >/dev/null 2>&1\nfi",
            "useradd -m @u\nid -u @u >/dev/null 2>&1 || exit 1",
            "groupadd @u\ngetent group @u >/dev/null || exit 1",
            'groupadd @u\nusermod -aG @u "$USER"',
            "if ! groupadd @u; then\n  getent group @u >/dev/null\nfi",
        ),
    ),
    _family(
        "append",
        (
            'grep -qxF "@k" "@f" || echo "@k" >> "@f"',
            ': > "@f"\necho "@k" >> "@f"',
            'if ! grep -q "^@word" "@f"; then\n  echo "@k" >> "@f"\nfi',
            'echo "@k" > "@f"\necho "@m" >> "@f"',
            'if ! grep -qxF "@k" "@f"; then\n  echo "@k" >> "@f"\nfi',
            ': > "@f"\nprintf \'%s\\n\' "@k" >> "@f"',
        ),
        (
            'echo "@k" >> "@f"\ngrep -qxF "@k" "@f" || exit 1',
            'echo "@k" >> "@f"\n: > "@d/@word"',
            'if ! grep -q "^@word" "@d/@word"; then\n  echo "@m"\nfi\necho "@k" >> "@f"',
            'echo "@m" >> "@f"\necho "@k" > "@d/@word"',
            'if grep -qxF "@k" "@f"; then\n  echo "@k" >> "@f"\nfi\necho "@k" >> "@f"',
            'printf \'%s\\n\' "@k" >> "@f"\n: > "@d/@word"',
        ),
    ),
    _family(
        "clone",
        (
            '[ -d "@d/.git" ] || git clone @url/@word.git "@d"',
            'if [ ! -d "@d/.git" ]; then\n  git clone @url/@word.git "@d"\nfi',
            '[ -d "@d" ] || git clone @url/@word.git "@d"',
            "docker rm -f @word || true\ndocker run -d --name @word @i",
            "docker network inspect @word || docker network create @word",
            "docker rm -f @word >/dev/null || true\ndocker run --name @word @i @cmd",
        ),
        (
            'git clone @url/@word.git "@d"\n[ -d "@d/.git" ] || exit 1',
            'git clone @url/@word.git "@d"\nif [ ! -d "@d/.git" ]; then\n  exit 1\nfi',
            'git clone @url/@word.git "@d"\n[ -d "@d" ] || exit 1',
            "docker run -d --name @word @i\ndocker rm -f @u || true",
            "docker network create @word\ndocker network inspect @word || exit 1",
            "docker run --name @word @i @cmd\ndocker rm -f @u >/dev/null || true",
        ),
    ),
    _family(
        "database",
        (
            'psql -c "CREATE TABLE IF NOT EXISTS @word (id int)"',
            'psql -c "INSERT INTO @word VALUES (@n) ON CONFLICT DO NOTHING"',
            'psql -d @u -c "CREATE TABLE IF NOT EXISTS @word (id int, name text)"',
            'psql -c "UPDATE @word SET total = @n WHERE id = @n"',
            'psql -c "DROP TABLE IF EXISTS @word" -c "CREATE TABLE @word (id int)"',
            'psql -d @u -c "UPDATE @word SET hits = @n"',
        ),
        (
            'psql -c "CREATE TABLE @word (id int)"',
            'psql -c "INSERT INTO @word VALUES (@n)"',
            'psql -d @u -c "CREATE TABLE @word (id int, name text)"',
            'psql -c "UPDATE @word SET total = total + @n WHERE id = @n"',
            'psql -c "CREATE TABLE @word (id int)" -c "DROP TABLE IF EXISTS @u"',
            'psql -d @u -c "UPDATE @word SET hits = hits + @n"',
        ),
    ),
)
