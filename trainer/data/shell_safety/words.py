"""Names for shell scripts, drawn alike for every class and both splits: no name is a hint."""

from __future__ import annotations

import random
import re

from trainer.data.shell_safety.family import Template

_PLACEHOLDER = re.compile(r"@(@|[a-z]+)")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_LITERAL = re.compile(r'"(/\w+(?:/\w+)*(?:\.\w+)*/?)"')


def _split_words(text: str) -> list[str]:
    return text.split()


_PARTS = _split_words(
    "app api web auth cache data event order user media report stock index queue mail audit build "
    "config metric batch price session ledger profile"
)
_ROOTS = _split_words("/srv /opt /mnt /data /home /var")
_EXTENSIONS = _split_words("log csv json txt conf xml")
_USERS = _split_words("deploy backup worker builder runner agent monitor")
_COMMANDS = _split_words("./build ./check ./import ./report ./sync ./export make rake")
_HOSTS = _split_words("db1 web2 node3 edge4 files5")
_IMAGES = _split_words("nginx redis postgres alpine python")
_DISKS = _split_words("sda sdb sdc vdb")
_VARIABLES = _split_words(
    "src dst dir file name target path value out base root input host tag key item"
)
_VERBS = _split_words("starting finished checked updated copied loaded skipped stopped ready done")


class Names:
    """The names of one script: `@v` and `@w` differ between its steps."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._upper = rng.random() < 0.4
        self._variables = rng.sample(_VARIABLES, len(_VARIABLES))

    def fill_placeholders(self, text: str) -> str:
        """Replace each placeholder of one step; all but `@n` keep their value within it."""
        known: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            kind = match[1]
            if kind == "@":
                return "@"
            if kind == "n":
                return str(self._rng.randint(2, 90))
            if kind not in known:
                known[kind] = self._draw(kind)
            return known[kind]

        return _PLACEHOLDER.sub(replace, text)

    def render_step(self, template: Template) -> str:
        """Return a step in its context, sometimes in an equivalent spelling."""
        step = self.fill_placeholders(template.text)
        if self._rng.random() < 0.3:
            step = _VARIABLE.sub(r"${\1}", step)
        if self._rng.random() < 0.3:
            step = _LITERAL.sub(r"\1", step)  # a literal path needs no quotes
        around = self.fill_placeholders(template.context.replace("@step", "\0"))
        indent = "  " if "  \0" in around else ""
        return around.replace("\0", step.replace("\n", f"\n{indent}"))

    def _draw(self, kind: str) -> str:
        pick = self._rng.choice
        match kind:
            case "v" | "w":
                name = self._variables.pop()
                return name.upper() if self._upper else name
            case "d":
                return f"{pick(_ROOTS)}/{pick(_PARTS)}"
            case "f":
                return f"{pick(_ROOTS)}/{pick(_PARTS)}.{pick(_EXTENSIONS)}"
            case "word":
                return pick(_PARTS)
            case "k":
                return f"{pick(_PARTS)}={pick(_PARTS)}"
            case "m":
                return f"{pick(_PARTS)} {pick(_VERBS)}"
            case "url":
                return f"https://{pick(_PARTS)}.example.com"
            case "ext":
                return pick(_EXTENSIONS)
            case "u":
                return pick(_USERS)
            case "cmd":
                return pick(_COMMANDS)
            case "h":
                return pick(_HOSTS)
            case "i":
                return pick(_IMAGES)
            case "disk":
                return pick(_DISKS)
            case _:
                raise AssertionError(f"no names for @{kind}")
