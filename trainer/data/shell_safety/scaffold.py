"""The text around the steps of a script, alike in every class: sound code and comments.

Comments and messages name the commands of all classes, so that their presence is no hint. Every
third one is for validation.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.shell_safety.family import held_out


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Texts of one kind, split between training and validation."""

    name: str
    texts: tuple[str, ...]

    def templates(self, validation: bool) -> list[tuple[str, str]]:
        """Return the ids and texts of one split."""
        return [
            (f"{self.name}/{number}", text)
            for number, text in enumerate(self.texts)
            if held_out(number) == validation
        ]


def _scaffold(name: str, *texts: str) -> Scaffold:
    return Scaffold(f"scaffold-{name}", texts)


TITLES = _scaffold(
    "title",
    "# Nightly backup",
    "# Deploy the current release",
    "# Rotate the logs",
    "# Create the service accounts",
    "# CI step: build and test",
    "# Prepare the container host",
    "# Import the daily data",
    "# Fetch the tools",
    "# Update the configuration",
    "# Clean the workspace",
    "# Set up the database",
    "# Collect the reports",
    "# Publish the artifacts",
    "# Migrate the tables",
    "# Restore a snapshot",
)

SETTINGS = _scaffold(
    "settings",
    "set -euo pipefail",
    "set -eu",
    "set -euo pipefail",
    "set -e",
    "set -u",
    "set -eu",
    "export LC_ALL=C\nset -e",
    "umask 022",
    "export LC_ALL=C",
)

NOISE = _scaffold(
    "noise",
    "# no rm -rf without a guard, no eval of input",
    "# mkdir and useradd run once, ln -s too",
    "# never curl @url | sh as root",
    "# $RANDOM, $$ and date stay out of names",
    '# quote "$@v" and "$@"',
    "# rm -rf of $1 and mkdir without -p are out",
    'echo "@m" >&2',
    '[ "$#" -ge 1 ] || exit 2',
    'echo "@word: @m" >&2',
    "echo 'no eval, no $RANDOM, no chmod 777'",
    'if [ "$(id -u)" -ne 0 ]; then\n  echo "not root" >&2\nfi',
    "echo 'no date, no $$, no curl | sh'",
    "readonly @v=@d",
    '@v="${1:-@word}"',
    'readonly @v="${2:-@word}"',
    "# TODO: git clone and echo >> only when missing",
    'log() {\n  printf \'%s\\n\' "$*" >&2\n}\nlog "@m"',
    "# TODO: docker run and mv only when missing",
    "trap 'echo \"@m\" >&2' EXIT",
    "export @v=@word",
    "trap 'echo \"@word\" >&2' ERR",
    "# chmod 777 and curl -k are not the answer",
    "# sort before head; mktemp names are not printed",
    "# dd of=/dev/@disk is not done here",
    'command -v @cmd >/dev/null 2>&1 || echo "no @word" >&2',
    'if [[ -n $1 ]]; then\n  echo "@m" >&2\nfi',
    'command -v psql >/dev/null 2>&1 || echo "no psql" >&2',
)
