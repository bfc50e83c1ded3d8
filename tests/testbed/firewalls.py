"""Firewalls for hosts, switched on: they drop what nobody asked for, ssh apart."""

from __future__ import annotations

from tests.testbed.host import Host

RULES = """flush ruleset
table inet filter {
  chain input {
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iif lo accept
    tcp dport 22 accept
  }
}
"""


def switch_nftables_on(host: Host) -> None:
    """Give a host nftables.service with such rules."""
    host.exec(["tee", "/etc/nftables.conf"], input=RULES)
    host.exec(["systemctl", "enable", "--now", "nftables"])


def switch_ufw_on(host: Host) -> None:
    """Install ufw in a host and enable it."""
    host.exec(["apt-get", "-qq", "update"], timeout=300)
    install = ["apt-get", "-qq", "--yes", "--no-install-recommends", "install", "ufw"]
    host.exec(install, env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=300)
    host.exec(["ufw", "allow", "22/tcp"])
    host.exec(["ufw", "--force", "enable"])
