"""Where ssh would go, by the real `ssh -G` on configurations of our own."""

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.errors import ConfigError
from launcher.hosts.ssh_config import resolve_route
from launcher.inventory.hosts import Host

pytestmark = [pytest.mark.needs("ssh"), pytest.mark.usefixtures("own_state")]


def write(folder: Path, text: str, name: str = "config") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def settings(host: Host, accept_new: bool = False) -> dict[str, str]:
    """Return what ssh itself makes of the command, with which it logs in."""
    route = resolve_route(host, accept_new)
    command = [*route.command, "-G", "--", route.destination]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        found.setdefault(*line.partition(" ")[::2])
    return found


def test_include_aliases_and_wildcards_count(tmp_path: Path) -> None:
    included = write(tmp_path, "Host intel\n  HostName 10.0.0.3\n  Port 2200\n", "more")
    config = write(
        tmp_path,
        f'Include {included}\nHost *\n  User me\n  IdentityFile "{tmp_path}/a key"\n'
        f"  IdentitiesOnly yes\n  HostKeyAlias box\n  UserKnownHostsFile {tmp_path}/one "
        f"{tmp_path}/two\n  GlobalKnownHostsFile none\n  IdentityAgent {tmp_path}/socket\n",
    )
    host = Host(name="intel", ssh_args=("-F", config))
    route = resolve_route(host)
    assert (route.user, route.jumps) == ("me", ())
    found = settings(host)
    assert (found["hostname"], found["port"], found["user"]) == ("10.0.0.3", "2200", "me")
    assert found["identityfile"] == f"{tmp_path}/a key"
    assert (found["identitiesonly"], found["hostkeyalias"]) == ("yes", "box")
    assert found["userknownhostsfile"] == f"{tmp_path}/one {tmp_path}/two"
    assert found["identityagent"] == f"{tmp_path}/socket"


def test_the_inventory_wins_over_ssh_config(tmp_path: Path) -> None:
    config = write(tmp_path, "Host *\n  User me\n  Port 2200\n  IdentityFile ~/.ssh/mine\n")
    host = Host(
        name="intel",
        address="10.0.0.9",
        ssh_port=2222,
        user="operator",
        ssh_key=write(tmp_path, "", "lab"),
        ssh_args=("-F", config, "-o", "Port=1", "-o", "ConnectTimeout=3"),
    )
    route = resolve_route(host)
    assert (route.destination, route.user) == ("10.0.0.9", "operator")
    found = settings(host)
    assert found["hostname"] == "10.0.0.9"
    assert (found["port"], found["user"]) == ("2222", "operator")
    assert found["identityfile"] == str(tmp_path / "lab")
    assert found["connecttimeout"] == "8"
    with pytest.raises(ConfigError, match="ansible_ssh_private_key_file: no file /no/such"):
        resolve_route(replace(host, ssh_key="/no/such"))


def test_the_settings_that_verify_win_over_all_others(tmp_path: Path) -> None:
    wrong = {
        "stricthostkeychecking": "no",
        "nohostauthenticationforlocalhost": "yes",
        "batchmode": "no",
        "forwardagent": "yes",
        "controlmaster": "auto",
        "controlpath": f"{tmp_path}/%C",
        "controlpersist": "60",
        "updatehostkeys": "yes",
        "remotecommand": "tmux",
        "connecttimeout": "0",
    }
    config = write(tmp_path, "Host *\n" + "\n".join(f"{k} {v}" for k, v in wrong.items()))
    args = [word for name, value in wrong.items() for word in ("-o", f"{name}={value}")]
    for host in (
        Host(name="intel", ssh_args=("-F", config)),
        Host(name="intel", ssh_args=(*args, f"-F{config}")),
        Host(name="intel", ssh_args=(*args, f"-4F{config}")),
        Host(name="intel", ssh_args=("-F", "/dev/null", "-F", config)),
    ):
        found = settings(host)
        assert found["stricthostkeychecking"] in ("true", "yes")
        assert found["nohostauthenticationforlocalhost"] == "no"
        assert (found["batchmode"], found["forwardagent"]) == ("yes", "no")
        assert found["controlmaster"] in ("false", "no")
        assert "controlpath" not in found
        assert found["controlpersist"] in ("false", "no")
        assert found["updatehostkeys"] in ("false", "no")
        assert found.get("remotecommand", "none") == "none"
        assert found["connecttimeout"] == "8"
        assert settings(host, accept_new=True)["stricthostkeychecking"] == "accept-new"
        # What ssh gives to a jump host is the file, and there the same holds.
        given = resolve_route(host).command[-1]
        alone = subprocess.run(
            ["ssh", "-F", given, "-G", "gate"], capture_output=True, text=True, check=True
        ).stdout
        assert "stricthostkeychecking true\n" in alone.replace(" yes\n", " true\n")
        assert "batchmode yes\n" in alone


def test_jump_hosts_are_named_in_order(tmp_path: Path) -> None:
    config = write(tmp_path, "Host intel\n  ProxyJump gate,me@[::1]:2202\n")
    assert resolve_route(Host(name="intel", ssh_args=("-F", config))).jumps == (
        "gate",
        "me@[::1]:2202",
    )
    for args in (("-J", "gate"), ("-Jgate",), ("-o", "ProxyJump=gate")):
        assert resolve_route(Host(name="other", ssh_args=("-F", config, *args))).jumps == ("gate",)


@pytest.mark.parametrize(
    ("command", "goes_on"),
    [
        ("ssh 10.156.0.4", True),
        ("exec /usr/bin/ssh -t inner", True),
        ("sudo -n TERM=xterm docker exec -it box bash", True),
        ("incus exec lab -- su - ops", True),
        ("tmux new -A -s lab", False),
        ("cd /srv && exec zsh -l", False),
        ("sudo -i", False),
        ("ssh-agent bash", False),
    ],
)
def test_a_remote_command_that_goes_on_elsewhere_is_refused(
    tmp_path: Path, command: str, goes_on: bool
) -> None:
    config = write(tmp_path, f"Host inner\n  HostName 192.0.2.9\n  RemoteCommand {command}\n")
    host = Host(name="inner", ssh_args=("-F", config))
    if goes_on:
        with pytest.raises(ConfigError, match=r"RemoteCommand .* from 192\.0\.2\.9, and"):
            resolve_route(host)
    else:
        assert settings(host).get("remotecommand", "none") == "none"


def test_without_a_file_of_the_inventory_the_operator_s_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the home that the system knows, as for ssh: the variable HOME does not count."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host intel\n  Port 2201\nHost other\n  Port 2202\n")
    user = SimpleNamespace(pw_dir=str(tmp_path))
    monkeypatch.setattr("launcher.hosts.ssh_config.getpwuid", lambda _uid: user)
    monkeypatch.setenv("HOME", "/nonexistent")
    assert settings(Host(name="intel"))["port"] == "2201"
    assert settings(Host(name="other"))["port"] == "2202"
    assert settings(Host(name="other", ssh_args=("-F", "none")))["port"] == "22"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-F", "/no/such/file"), "/no/such/file"),
        (("-o", "NoSuchOption=1"), "Bad configuration option"),
        (("-Z",), "option -Z not recognized"),
        (("-o",), "option -o requires argument"),
        (("-v", "elsewhere"), "elsewhere is not an option"),
    ],
)
def test_settings_that_ssh_does_not_take_are_one_line(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_route(Host(name="intel", ssh_args=args))
    assert str(caught.value).startswith("host intel: ")
    assert "\n" not in str(caught.value)


def test_options_that_change_what_ssh_does_are_left_out() -> None:
    args = ("-4NA", "-S", "/tmp/theirs", "-M", "-W", "a:1", "-E/tmp/log", "-w", "0", "-CXY", "-n")
    command = resolve_route(Host(name="intel", ssh_args=("-F", "none", *args))).command
    mine = command[-5:-2]
    assert mine[1:] == ("-4", "-C")
    assert settings(Host(name="intel", ssh_args=("-F", "none", *args)))["forwardagent"] == "no"


def test_a_mistake_is_said_with_the_operator_s_file_and_line(tmp_path: Path) -> None:
    config = write(tmp_path, "Host *\n  Nonsense yes\n")
    with pytest.raises(ConfigError, match=rf"{config}: line 2: Bad configuration option"):
        resolve_route(Host(name="intel", ssh_args=("-F", config)))


def test_a_file_that_its_group_may_write_counts_as_for_ssh(tmp_path: Path) -> None:
    config = write(tmp_path, "Host *\n  Port 2200\n")
    Path(config).chmod(0o664)
    assert settings(Host(name="intel", ssh_args=("-F", config)))["port"] == "2200"


def test_a_configuration_is_this_user_s_alone(tmp_path: Path) -> None:
    assert resolve_route(Host(name="intel", ssh_args=("-F", "none")))
    folder = tmp_path / "state" / "ssh"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]


def test_a_configuration_that_cannot_be_kept_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_STATE_DIR", "/proc/none")
    with pytest.raises(ConfigError, match="host intel: ssh's settings: /proc/none: No such file"):
        resolve_route(Host(name="intel", ssh_args=("-F", "none")))


def test_a_name_that_is_an_option_is_no_name() -> None:
    with pytest.raises(ConfigError, match="'-oProxyCommand=x' is not a host name"):
        resolve_route(Host(name="intel", address="-oProxyCommand=x"))


def test_without_ssh_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="host intel: `ssh` is missing here"):
        resolve_route(Host(name="intel"))


def test_ansible_s_own_arguments_count_before_the_host_s(tmp_path: Path) -> None:
    first = write(tmp_path, "Host *\n  User cfg\n", "first")
    host = Host(name="intel", ssh_port=22, ssh_first_args=("-F", first, "-p", "2200"))
    route = resolve_route(host)
    assert (route.port, route.user) == (2200, "cfg")
    own = write(tmp_path, "Host *\n  User own\n", "own")
    assert resolve_route(replace(host, ssh_args=("-F", own))).user == "own"


@pytest.mark.parametrize(
    ("text", "name", "where"),
    [
        (
            'Host "gpu*" !gpu-old\n HostName %h.lan\n User "ops"\n Port 2200\n',
            "gpu-1",
            ("gpu-1.lan", 2200, "ops"),
        ),
        (
            'Match originalhost box exec "test -d /tmp"\n HostName 10.1.2.3\n User m\n'
            "Match final host 10.1.2.3\n Port 2022\n",
            "box",
            ("10.1.2.3", 2022, "m"),
        ),
        ("Host=eq\n\tHostName=10.7.7.7\n\tUser = eq", "eq", ("10.7.7.7", 22, "eq")),
        ("Host dos\r\n HostName 10.6.6.6\r\n User dos\r\n", "dos", ("10.6.6.6", 22, "dos")),
        (
            "# Gr\udcfc\udcdfe\nHost old\n HostName 10.5.5.5\n User l1\n",
            "old",
            ("10.5.5.5", 22, "l1"),
        ),
    ],
)
def test_configurations_of_many_styles(
    tmp_path: Path, text: str, name: str, where: tuple[str, int, str]
) -> None:
    file = tmp_path / "config"
    file.write_bytes(text.encode(errors="surrogateescape"))
    route = resolve_route(Host(name=name, ssh_args=("-F", str(file))))
    assert (route.address, route.port, route.user) == where
    assert settings(Host(name=name, ssh_args=("-F", str(file))))["hostname"] == where[0]
