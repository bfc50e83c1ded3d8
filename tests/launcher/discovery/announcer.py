"""A machine's mDNS responder: `python -m tests.launcher.discovery.announcer NAME ADDRESS PORT`.

It announces `_motley._tcp` until stdin ends, and takes it back then.
"""

from __future__ import annotations

import sys

from zeroconf import ServiceInfo, Zeroconf


def main(name: str, address: str, port: str) -> None:
    kind = "_motley._tcp.local."
    service = ServiceInfo(
        kind, f"{name}.{kind}", port=int(port), server=f"{name}.local.", parsed_addresses=[address]
    )
    with Zeroconf(interfaces=[address]) as responder:
        responder.register_service(service)
        sys.stdout.write("announced\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
