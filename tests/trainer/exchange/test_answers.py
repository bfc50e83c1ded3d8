"""Answers to prompts: when they come, from whom, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.staging import assign, open_round, saved, started
from trainer.exchange.coordinator.prompt_generation import PromptSet
from trainer.exchange.worker.session import make_result_message

pytestmark = pytest.mark.usefixtures("small_frames")


def asking(every: int = 0, **settings: Any) -> ExactProblem:
    """Return a problem of 6 steps with three prompts."""
    questions = PromptSet(
        prompts=[[7], [8, 9], [7, 7, 7]],
        stop=frozenset((1,)),
        vocabulary=10,
        every=every,
        new_tokens=4,
        make_record=lambda number, tokens: {"number": number, "text": str(list(tokens))},
    )
    return ExactProblem(questions=questions, **settings)


@pytest.mark.parametrize(
    ("every", "validation", "expected"),
    [(0, 7, [0, 6]), (2, 0, [0, 2, 4, 6]), (4, 7, [0, 4, 6]), (100, 0, [0, 6])],
)
def test_before_training_every_few_steps_and_at_the_end(
    every: int, validation: int, expected: list[int]
) -> None:
    """What they say is checked at every event; checkpoints and steps are those without them."""
    problem = asking(every, validation_samples=validation)
    cluster = SimulatedCluster(problem, workers=3)
    cluster.run_to_end()
    assert [event["at_step"] for event in cluster.named("answers")] == expected
    plain = SimulatedCluster(ExactProblem(validation_samples=validation), workers=3)
    plain.run_to_end()
    assert saved(cluster) == saved(plain)
    samples = [
        [event["sample_ranges"] for event in each.named("step")] for each in (cluster, plain)
    ]
    assert samples[0] == samples[1]


def test_the_time_of_an_answer_is_no_speed() -> None:
    """The workers say 9 s; all of it would be in the first one's shares."""
    problem = asking(1, exchange__split="measured")
    cluster = SimulatedCluster(problem, workers=2)
    cluster.run_to_end()
    speeds = cluster.machine.training.assigner.balancer.speeds
    assert all(speed.per_sample == pytest.approx(0.01) for speed in speeds.values())


def test_one_worker_answers_and_others_if_it_is_lost() -> None:
    cluster = started(asking())
    assert [shard.rank for shard in open_round(cluster).ledger.initial_shards] == [0]
    cluster.kill(cluster.workers[0])
    assert sum(shard.size for shard in open_round(cluster).ledger.list_open(1)) == 2
    cluster.run_to_end()
    assert [event["at_step"] for event in cluster.named("answers")] == [0, 6]


@pytest.mark.parametrize("answers", [None, [], [[5]] * 2, [[5]] * 4, [[5], [5], []], [[10]] * 3])
def test_what_answers_nothing_is_not_taken(answers: list[list[int]] | None) -> None:
    cluster = started(asking())
    worker = cluster.workers[0]
    cluster.deliver_down(worker)
    shard = open_round(cluster).make_assignment(open_round(cluster).ledger.initial_shards[0])
    assert worker.session
    worker.send(make_result_message(shard, 0.0, 0, 1, 1.0, answers=answers))
    cluster.deliver_up(worker)
    assert cluster.named("lost")[0]["reason"] == "answers that are not those to 3 prompts"
    cluster.run_to_end()


def test_a_stop_does_not_wait_for_answers() -> None:
    cluster = started(asking())
    assign(cluster)
    cluster.stop()
    cluster.pass_time(TICK)
    assert cluster.finish
    assert cluster.finish.exit_code == 0
    assert cluster.named("answers") == []


def test_a_run_that_ends_early_answers_at_its_end() -> None:
    settings = {"training__evaluate_every": 1, "training__early_stopping_patience": 2}
    cluster = SimulatedCluster(asking(**settings), workers=3)
    cluster.start()
    while cluster.finish is None:
        cluster.pass_time(TICK)
        cluster.settle_down()
    assert [event["at_step"] for event in cluster.named("answers")] == [0, 3]
    assert "in 2 validations" in cluster.finish.reason
