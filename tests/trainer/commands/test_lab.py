"""`trainer lab`: text, JSON, and errors of one line."""

import json

import pytest
from click.testing import CliRunner

from trainer.cli import trainer
from trainer.system.errors import InputError

CHEAP = ["topk", "feedback", "zero"]


def run(*words: str) -> str:
    done = CliRunner().invoke(trainer, ["lab", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", CHEAP)
def test_each_prints_its_table_and_the_sources_of_its_formulas(name: str) -> None:
    options = ["--steps", "5"] if name == "feedback" else []
    found = json.loads(run(name, "--json", *options))
    assert found["schema"] == "motley.lab/1"
    assert found["experiment"] == name
    text = run(name, *options)
    for column in found["rows"][0]:
        assert column in text
    assert found["formulas"]
    for formula in found["formulas"]:
        assert f"{formula['text']}   [{formula['source']}]" in text


def test_the_same_seed_prints_the_same() -> None:
    assert run("feedback", "--steps", "5") == run("feedback", "--steps", "5")
    assert run("feedback", "--steps", "5") != run("feedback", "--steps", "5", "--seed", "1")


def test_a_density_that_is_none_is_an_error() -> None:
    with pytest.raises(InputError, match=r"--density 1\.7: not a density"):
        run("topk", "--density", "1.7")
