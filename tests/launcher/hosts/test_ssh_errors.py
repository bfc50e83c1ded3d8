"""What OpenSSH has written where no network of a test leads: timeouts, routes, lost greetings."""

import pytest

from launcher.hosts.ssh_errors import login_error


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "ssh: connect to host 10.0.0.3 port 22: Connection timed out\r",
            "10.0.0.3 port 22 does not answer within 8 s; is it up, and no firewall in between?",
        ),
        (  # macOS
            "ssh: connect to host 10.0.0.3 port 22: Operation timed out\r",
            "10.0.0.3 port 22 does not answer within 8 s; is it up, and no firewall in between?",
        ),
        (
            "ssh: connect to host fe80::1 port 2222: No route to host\r",
            "fe80::1 port 2222: No route to host",
        ),
        (  # sshd with MaxStartups
            "kex_exchange_identification: Connection closed by remote host\r\n"
            "Connection closed by 10.0.0.3 port 22\r",
            "no SSH greeting came (Connection closed by remote host); is that port sshd's, and "
            "not overloaded?",
        ),
        (
            "channel 0: open failed: administratively prohibited: open failed\r",
            "administratively prohibited: open failed",
        ),
        (
            "debug1: Authenticating to far:22 as 'me'\r\n"
            "me@far: Permission denied (keyboard-interactive,password).\r",
            "login as me refused (no key to offer; it wants keyboard-interactive,password); set "
            "ansible_user and ansible_ssh_private_key_file, or: ssh-copy-id",
        ),
    ],
)
def test_what_ssh_says_becomes_one_line_with_what_to_do(log: str, message: str) -> None:
    assert str(login_error("host far", log)) == f"host far: {message}"


def test_what_is_not_known_is_left_to_the_caller() -> None:
    assert login_error("host far", "client_loop: send disconnect: Broken pipe") is None
