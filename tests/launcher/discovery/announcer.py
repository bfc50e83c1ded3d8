"""A machine's mDNS responder: `python -m tests.launcher.discovery.announcer NAME ADDRESS PORT N`.

It announces `_motley._tcp`, and N names without an address, until stdin ends; then it says goodbye.
"""

from __future__ import annotations

import sys

from zeroconf import ServiceInfo, Zeroconf


def main(name: str, address: str, port: str, count: str) -> None:
    kind = "_motley._tcp.local."
    service = ServiceInfo(
        kind, f"{name}.{kind}", port=int(port), server=f"{name}.local.", parsed_addresses=[address]
    )
    with Zeroconf(interfaces=[address]) as responder:
        responder.register_service(service)
        for number in range(int(count)):
            lost = f"nowhere-{number}"
            service = ServiceInfo(kind, f"{lost}.{kind}", port=22, server=f"{lost}.local.")
            responder.registry.async_add(service)
        sys.stdout.write("announced\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
