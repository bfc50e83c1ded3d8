"""pass@k against its definition, problems, and programs run in the sandbox."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from trainer.evaluate.code import Problem, compute_pass_rates, pass_at_k, read_problems, run_trials
from trainer.evaluate.sandbox import Sandbox
from trainer.system.errors import InputError

TRIANGLE = Problem(
    prompt='def triangle(n):\n    """Return 0 + 1 + ... + n."""\n',
    test="def check(f):\n    assert [f(n) for n in range(5)] == [0, 1, 3, 6, 10]\n",
    entry_point="triangle",
)


@pytest.mark.parametrize("samples", [1, 4, 6])
def test_the_estimate_is_the_mean_over_all_draws(samples: int) -> None:
    """Unbiased: k of n samples, drawn without putting back, hold one that passed so often."""
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_figures_are_means_over_problems() -> None:
    assert compute_pass_rates([0, 1, 2], 2) == {"pass@1": 0.5}
    found = compute_pass_rates([0, 5, 200], 200)
    assert list(found) == ["pass@1", "pass@10", "pass@100"]
    # 1 - prod(1 - k / i for i = n - c + 1 .. n), the form of the paper's figure 3.
    product = 1.0
    for i in range(196, 201):
        product *= 1 - 10 / i
    assert found["pass@10"] == pytest.approx((0 + (1 - product) + 1) / 3)


def test_problems_come_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({**vars(TRIANGLE), "task_id": "x\u2028"}) + "\n\n")
    assert read_problems(path) == [TRIANGLE]
    for content, message in (
        ("", "contains no problems"),
        ('{"prompt"', ":1: not JSON"),
        ("[]", "contains no problems"),
        ("[1]", ":1: expected an object"),
        ('{"prompt": "", "test": ""}', ": no key 'entry_point'; it has 'prompt', 'test'"),
        ('{"prompt": "", "test": 1, "entry_point": "f"}', ":1: .* must be strings"),
        ('{"prompt": "", "test": "", "entry_point": "f()"}', ":1: .* is not a name"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=message):
            read_problems(path)
    rows = [{**vars(TRIANGLE), "task_id": 1, "added": "x"}]
    path.write_text(json.dumps(rows))
    assert read_problems(path) == [TRIANGLE]
    with pytest.raises(InputError, match="no such data file"):
        read_problems(tmp_path / "none")


def test_tests_may_use_what_the_prompt_defines_before_the_function() -> None:
    prompt = "import math\n\ndef double(n):\n    return 2 * n\n\ndef half(n):\n"
    problem = Problem(prompt, "def check(f):\n    assert f(double(3)) == 3", "half")
    try:
        verdict = Sandbox().run(problem.build_trial("    return n / 2"))
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")
    assert verdict.passed, verdict.reason


def test_right_and_wrong_completions_are_told_apart() -> None:
    try:
        sandbox = Sandbox()
    except InputError as error:
        pytest.skip(f"needs bwrap: {error}")
    completions = {
        "    return n * (n + 1) // 2\n": True,
        "    return sum(range(n + 1))\n\nprint(triangle(": True,  # what follows the function is cut
        "    return n * n\n": False,
        "    return n *": False,
        "    import os; os._exit(0)\n": False,
    }
    trials = [TRIANGLE.build_trial(completion) for completion in completions]
    verdicts = run_trials(sandbox, trials, threads=2)
    assert [verdict.passed for verdict in verdicts] == list(completions.values())
    assert "AssertionError" in verdicts[2].reason
