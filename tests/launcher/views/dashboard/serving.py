"""`launch dashboard` as a process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import PATIENCE


@dataclass(frozen=True)
class Server:
    """One that serves."""

    url: str
    process: subprocess.Popen[str]
    context: ssl.SSLContext | None = None

    def request(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; a path that begins with / is below the host, others below the page."""
        at = urlsplit(self.url)
        host, port = str(at.hostname), at.port
        made = (
            http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=self.context)
            if at.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=PATIENCE)
        )
        below = path if path.startswith("/") else at.path + path
        made.request(method, below, headers={k.replace("_", "-"): v for k, v in headers.items()})
        return made, made.getresponse()

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Return the status, the headers and the text of an answer."""
        made, answer = self.request(path, method, **headers)
        text = answer.read().decode()
        made.close()
        return answer.status, answer.headers, text

    def json(self, path: str) -> Any:
        """Return an answer's object."""
        status, _, text = self.get(path)
        assert status == 200, text
        return json.loads(text)


PROGRAM = (sys.executable, "-m", "launcher.cli")


@contextmanager
def serving(state: Path, *flags: str, program: Sequence[str] = PROGRAM) -> Iterator[Server]:
    """Serve the runs of a state folder; the address is what the command prints."""
    command = [*program, "dashboard", *(flags or ("--port", "0"))]
    process = subprocess.Popen(
        command,
        env=os.environ | {"MOTLEY_STATE_DIR": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"(https?://\S+)\n", line)
        assert found, process.stderr.read()
        secure = found[1].startswith("https")
        context = ssl.create_default_context(cafile=state / "ca" / "ca.pem") if secure else None
        yield Server(found[1], process, context)
    finally:
        ended = process.poll()  # by the test
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert ended is not None or said == "\n"  # behind the ^C of a terminal
