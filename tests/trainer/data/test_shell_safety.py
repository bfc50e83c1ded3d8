import collections
import hashlib
import re
import shutil
import subprocess

import pytest

from trainer.data.shell_safety.family import (
    CLASSES,
    FAMILIES,
    NOISE,
    SAFE,
    SETTINGS,
    TITLES,
)
from trainer.data.shell_safety.generator import generate


def test_the_scripts_are_frozen():
    # Published figures are measured on these bytes. After a change on purpose: measure again.
    text = "\0".join(script.text for script in generate("train", 100, 0))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FROZEN


@pytest.mark.parametrize("count", [1, 7, 500])
def test_classes_are_balanced(count):
    labels = collections.Counter(script.label for script in generate("validation", count, 3))
    assert labels.total() == count
    assert max(labels.values()) - min(labels[label] for label in range(5)) <= 1


def test_train_and_validation_share_no_template_and_no_script():
    train, validation = generate("train", 4000, 0), generate("validation", 600, 0)
    ids = [{name for script in split for name in script.templates} for split in (train, validation)]
    assert not ids[0] & ids[1]
    texts = [{script.text for script in split} for split in (train, validation)]
    assert (len(texts[0]), len(texts[1])) == (4000, 600)
    assert not texts[0] & texts[1]
    every = {
        template.id
        for family in FAMILIES
        for label in (SAFE, family.defect)
        for split in (False, True)
        for template in family.list_templates(label, split)
    }
    scaffolds = {
        name
        for scaffold in (NOISE, SETTINGS, TITLES)
        for split in (False, True)
        for name, _ in scaffold.list_templates(split)
    }
    assert ids[0] <= every | scaffolds
    assert ids[1] <= every | scaffolds


def test_each_step_and_each_context_is_trained_on_but_no_held_out_pair():
    for family in FAMILIES:
        for label in (SAFE, family.defect):
            train, held_out = (family.list_templates(label, split) for split in (False, True))
            pairs = [{(each.text, each.context) for each in split} for split in (train, held_out)]
            assert not pairs[0] & pairs[1]
            assert {text for text, _ in pairs[1]} <= {text for text, _ in pairs[0]}
            assert {context for _, context in pairs[1]} <= {context for _, context in pairs[0]}
        assert len(set(family.sound + family.defective)) == 2 * len(family.sound)
        assert len(family.sound) == len(family.defective)


def test_a_script_has_exactly_the_defect_of_its_label():
    defects = {family.name: family.defect for family in FAMILIES}
    for script in generate("train", 500, 1) + generate("validation", 500, 1):
        found = [defects[name.split("/")[0]] for name in script.templates if "/defective/" in name]
        assert found == ([] if script.label == SAFE else [script.label])


def test_every_class_uses_the_same_names():
    # A path, user or variable that only one class has would give its label away.
    words = collections.defaultdict(set)
    for script in generate("train", 4000, 0):
        words[script.label].update(re.findall(r"/(?:srv|opt|mnt|data|home|var)/\w+", script.text))
    sizes = [len(words[label]) for label in range(len(CLASSES))]
    assert len(set.intersection(*words.values())) > 0.9 * max(sizes)


def test_the_scripts_are_valid_shell():
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    for script in generate("train", 250, 5) + generate("validation", 150, 5):
        result = subprocess.run([bash, "-n"], input=script.text.encode(), capture_output=True)
        assert result.returncode == 0, f"{script.text}\n{result.stderr.decode()}"
        assert not re.search(r"@(?:[dfvwnkmuhi]|word|step|cmd|ext|disk)\b", script.text)
        assert "\0" not in script.text


def test_every_template_is_valid_shell_on_its_own():
    # All of them in one bash: each in a function of its own.
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    import random

    from trainer.data.shell_safety.words import Names

    steps = []
    for family in FAMILIES:
        for text in family.sound + family.defective:
            step = Names(random.Random(0)).fill_placeholders(text)
            steps.append(f"step() {{\n{step}\n:\n}}\n")
    result = subprocess.run([bash, "-n"], input="".join(steps).encode(), capture_output=True)
    assert result.returncode == 0, result.stderr.decode()


FROZEN = "386a03ac09cd4639"
