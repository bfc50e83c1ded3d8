"""A run writes into its output folder alone, also into one that came from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.model.output_folder import check_output
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "spend.jsonl", "status.json", ".status.json.tmp", "run.yaml", "tensorboard"],
)
def test_a_link_in_an_output_folder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    output, victim = tmp_path / "output", tmp_path / "victim"
    check_output(output)  # not there yet
    output.mkdir()
    (output / "checkpoints").symlink_to(tmp_path / "share")  # as a run itself makes it
    check_output(output)
    victim.write_text("no line end")
    (output / name).symlink_to(victim)
    with pytest.raises(InputError, match="is a link, and nothing is written through one") as error:
        check_output(output)
    assert str(output / name) in str(error.value)
