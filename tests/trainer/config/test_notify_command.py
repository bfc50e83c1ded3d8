"""The operator's command: where it comes from, and that no config, job or checkpoint names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.trainer.tiny_run import tiny_config
from trainer.config import distill_job
from trainer.config import run as run_config
from trainer.config.notify_command import notify_file_path, read_notify_command
from trainer.system.errors import InputError
from trainer.system.process.notification import COMMAND_VARIABLE

REFUSAL = "notify: is not taken from a config, which people share, since it is executed"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of this user's command, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    path = tmp_path / "motley/notify.yaml"
    path.parent.mkdir()
    return path


def test_a_command_is_of_the_option_else_of_a_supervisor_else_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_notify_command(None) == ()
    file.write_text("command: [sh, -c, 'echo $MOTLEY_TEXT']\n")
    assert read_notify_command(None) == ("sh", "-c", "echo $MOTLEY_TEXT")
    file.write_text("command: curl -d @- 'https://a b'\n")
    assert read_notify_command(None) == ("curl", "-d", "@-", "https://a b")
    for handed, command in (('["tell", "me"]', ("tell", "me")), ("[]", ())):
        monkeypatch.setenv(COMMAND_VARIABLE, handed)
        assert read_notify_command(None) == command
        assert COMMAND_VARIABLE not in os.environ  # of no child
    monkeypatch.setenv(COMMAND_VARIABLE, '["tell"]')
    assert read_notify_command("mail 'to me'") == ("mail", "to me")
    assert COMMAND_VARIABLE not in os.environ
    assert read_notify_command("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command: curl 'x", "command: cannot be split into words: no closing quotation"),
        ("command: []", "command: "),
        ("notify: curl", "command: field required"),
        ("comand: curl", "command: field required"),
        ("[curl]", "is a mapping"),
    ],
)
def test_a_file_is_used_or_refused_by_name(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError, match=says) as error:
        read_notify_command(None)
    assert str(error.value).startswith(str(file))


def test_a_file_that_others_can_change_or_that_is_none_is_refused(file: Path) -> None:
    file.write_text("command: curl\n")
    file.chmod(0o666)
    with pytest.raises(InputError, match="other users can change this command"):
        read_notify_command(None)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match="not a regular file"):
        read_notify_command(None)


def test_a_relative_folder_of_configs_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "configs")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert notify_file_path() == tmp_path / ".config/motley/notify.yaml"


@pytest.mark.parametrize("value", ["touch /tmp/x", ["touch", "/tmp/x"], None])
def test_no_run_config_and_no_job_names_a_command(tmp_path: Path, value: object) -> None:
    own = tiny_config()
    path = tmp_path / "run.yaml"
    path.write_text(own.to_yaml() + f"notify: {value or 'null'}\n")
    for load in (
        lambda: run_config.load_config(path),
        lambda: own.with_settings({"notify": value}),
        lambda: run_config.load_config("quickstart", {"notify": value}),
        lambda: distill_job.load_job("albor-350m", {"notify": value}),
    ):
        with pytest.raises(InputError, match=REFUSAL) as error:
            load()
        assert "--notify COMMAND, or in ~/.config/motley/notify.yaml" in str(error.value)
    assert "notify" not in own.flatten_settings()
