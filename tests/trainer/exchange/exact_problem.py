"""A training problem whose every bit is known beforehand, whoever computes which sample.

Gradients and losses are small integers: their sums are exact in fp32 (and, for batches of up to
8, in bf16) in any order and any partition. So there is one right sequence of weights, and whatever
faults a test injects, every member must be on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config.run import RunConfig, load_config
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.coordinator.prompt_generation import PromptSet
from trainer.exchange.protocol.actions import Save
from trainer.exchange.protocol.codecs import make_codec
from trainer.exchange.protocol.members import Job
from trainer.exchange.protocol.messages import JoinRequest
from trainer.exchange.protocol.schedule import StepPlan, flush_periods
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import Snapshot, TrainState
from trainer.optimizer.early_stopping import EarlyStopping
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.optimizer.nesterov import Update

NUM_CLASSES = 5
JOB = Job("run-1", "config", "layout", "model", "data", "version")


def tiny_layout() -> GradientLayout:
    """Return two layers of two tensors, a norm and a head: 30 elements."""
    shapes = {
        "layers.0": {"q": (2, 3), "v": (4,)},
        "layers.1": {"q": (2, 3), "v": (4,)},
        "norm": {"weight": (4,)},
        "head": {"weight": (3, 2)},
    }
    blocks: list[Block] = []
    start = 0
    for index, (name, tensors) in enumerate(shapes.items()):
        slots: list[TensorSlot] = []
        for tensor, shape in tensors.items():
            slots.append(TensorSlot(f"{name}.{tensor}", shape, start))
            start = slots[-1].stop
        blocks.append(Block(index, name, slots[0].start, start, tuple(slots)))
    return GradientLayout(tuple(blocks), 2)


def join_request(rank: int | None = None, **changes: Any) -> JoinRequest:
    """Return the request of a worker that fits `JOB`."""
    fields: dict[str, Any] = {
        "run_id": JOB.run_id,
        "rank": rank,
        "motley_version": JOB.motley_version,
        "config_digest": JOB.config_digest,
        "layout_digest": JOB.layout_digest,
        "model_digest": JOB.model_digest,
        "data_digest": JOB.data_digest,
        "host": f"host-{rank}",
        "backend": "cpu",
        "device": "cpu",
    }
    return JoinRequest(**{**fields, **changes})


class ExactProblem:
    """Samples, their gradients and losses, and the weights that must come out after every step."""

    def __init__(
        self,
        *,
        samples: int = 20,
        validation_samples: int = 7,
        questions: PromptSet | None = None,
        **overrides: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "training.epochs": 2,
            "training.batch_size": 8,
            "training.evaluate_every": 4,
            "exchange.split": "equal",
            "exchange.hash_every": 2,
            "checkpoint.every": 2,
            "optimizer.learning_rate": 0.01,
        }
        settings |= {key.replace("__", "."): value for key, value in overrides.items()}
        config = load_config("quickstart", settings)
        steps = settings.get("training.max_steps")  # the preset's own would win over the epochs
        training = config.training.model_copy(update={"max_steps": steps})
        self.config: RunConfig = config.model_copy(update={"training": training})
        exact = 8 if self.config.exchange.codec == "bf16" else 256
        assert self.config.training.batch_size <= exact, "sums of more powers of two are rounded"
        self.layout = self.make_layout()
        self.samples = samples
        self.validation_samples = validation_samples
        exchange = self.config.exchange
        self.plan = StepPlan(
            samples,
            training.batch_size,
            training.epochs,
            training.max_steps,
            flush_every=flush_periods(self.config),
        ).with_outer_steps(exchange.rounds)
        self.questions = questions
        self.trajectory: list[bytes] = []
        """The weights after 0, 1, ... updates, as bytes."""
        self.second_moments: list[bytes] = []
        """Of a run with rounds, likewise."""
        self.norms: list[float] = []
        self._compute()

    def make_layout(self) -> GradientLayout:
        """Return the layout of the gradient."""
        return tiny_layout()

    def fresh_state(self) -> TrainState:
        """Return the state before the first update."""
        weights = np.linspace(-1, 1, self.layout.size, dtype=np.float32)
        return TrainState.create(weights)

    def coordinator(self, workers: int, now: float, last: Save | None = None) -> Coordinator:
        """Return the coordinator of a run from its last checkpoint, or from the beginning."""
        state, generation = self.fresh_state(), 0
        if last:
            snapshot, generation = last.snapshot, last.generation
            assert isinstance(snapshot, Snapshot)
            arrays = (snapshot.weights, snapshot.first_moment, snapshot.second_moment)
            state = TrainState(*(array.copy() for array in arrays), step=snapshot.step)
            assert state.weights.tobytes() == self.trajectory[state.step]
        return Coordinator(
            config=self.config,
            job=JOB,
            layout=self.layout,
            plan=self.plan,
            validation_samples=self.validation_samples,
            state=state,
            expect_workers=workers,
            score=lambda table: {"count": sum(map(sum, table))},
            now=now,
            generation=generation,
            early=EarlyStopping(self.config.training.early_stopping_patience),
            questions=self.questions,
        )

    def gradient(self, epoch: int, position: int) -> np.ndarray:
        """Return a sample's gradient, fp32 `[N]`.

        The first element of each block is a power of two of its own within the step, so a sample
        that is missing or counts twice cannot be made up for by others.
        """
        index = np.arange(self.layout.size)
        flat = ((position * 31 + epoch * 17 + index * 7) % 9 - 4).astype(np.float32)
        for block in self.layout.blocks:
            flat[block.start] = 2.0 ** (position % 8)
        return flat

    def weight(self, position: int) -> int:
        """Return a sample's target tokens."""
        return 1 + position % 3

    def loss(self, epoch: int, position: int) -> float:
        """Return a sample's loss, summed over its tokens."""
        return float(1 + (epoch * 7 + position * 3) % 5)

    def shard_gradient(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the gradient sum over positions `start..stop`, fp32 `[N]`."""
        total = np.zeros(self.layout.size, np.float32)
        for position in range(start, stop):
            total += self.gradient(epoch, position)
        return total

    def shard_blocks(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return what a worker sends of positions `start..stop`, `[2 N]`.

        Behind the gradient sum stands, for a flush round, that of all absolute values.
        """
        second = np.zeros(self.layout.size, np.float32)
        for position in range(start, stop):
            second += np.abs(self.gradient(epoch, position))
        return np.concatenate([self.shard_gradient(epoch, start, stop), second])

    def wire_layout(self, step: int) -> GradientLayout:
        """Return the layout of what travels in a step."""
        flushes = self.plan.is_outer_step(step) and self.plan.flushes_residuals(step)
        return self.layout.with_second_moments if flushes else self.layout

    def shard_weight(self, start: int, stop: int) -> int:
        """Return the weight of positions `start..stop`."""
        return sum(self.weight(position) for position in range(start, stop))

    def shard_loss(self, epoch: int, start: int, stop: int) -> float:
        """Return the loss sum of positions `start..stop`."""
        return sum(self.loss(epoch, position) for position in range(start, stop))

    def step_loss(self, step: int) -> float:
        """Return the mean loss that a step must report."""
        at = self.plan.find_samples(step)
        return self.shard_loss(at.epoch, at.start, at.stop) / self.shard_weight(at.start, at.stop)

    def validation_loss(self) -> float:
        """Return the mean loss that a validation must report."""
        return self.shard_loss(0, 0, self.validation_samples) / self.validation_samples

    def confusion(self, start: int, stop: int) -> list[list[int]]:
        """Return the confusion matrix of validation samples `start..stop`."""
        table = [[0] * NUM_CLASSES for _ in range(NUM_CLASSES)]
        for position in range(start, stop):
            table[position % NUM_CLASSES][position * 2 % NUM_CLASSES] += 1
        return table

    def answer(self, prompt: Sequence[int], step: int) -> list[int]:
        """Return the answer that the weights of a step give to a prompt."""
        return [step, *prompt]

    def _compute(self) -> None:
        state = self.fresh_state()
        update = Update(self.config, self.layout)
        codec = make_codec(self.config.exchange.codec)
        total = self.plan.total_steps
        self._note(state)
        for step in range(total):
            at = self.plan.find_samples(step)
            weight = self.shard_weight(at.start, at.stop)
            layout = self.wire_layout(step)
            average = self.shard_blocks(at.epoch, at.start, at.stop)[: layout.size]
            np.divide(average, np.float32(weight), out=average)
            squares: list[float] = []
            for block in layout.blocks:
                span = average[block.start : block.stop]
                codec.decode(codec.encode(span), span)
                doubles = span.astype(np.float64)
                squares.append(float(np.dot(doubles, doubles)))
            norm = math.sqrt(math.fsum(squares[: len(self.layout.blocks)]))
            last = self.plan.find_inner_steps(step)[-1]
            rate = compute_learning_rate(last, self.plan.total_inner, self.config.optimizer)
            scale = update.clip_scale(norm, is_round=self.plan.is_outer_step(step))
            update.apply(state, average, rate, scale, self.plan.first_outer_step)
            self.norms.append(norm)
            self._note(state)

    def _note(self, state: TrainState) -> None:
        self.trajectory.append(state.weights.tobytes())
        self.second_moments.append(state.second_moment.tobytes())

    def check_event(self, event: dict[str, Any], applied: int) -> None:
        """Check what a step or a validation says of itself, after `applied` updates."""
        if event["event"] == "step":
            step = event["step"] - 1
            at = self.plan.find_samples(step)
            covered = at.start
            for _, start, stop in event["sample_ranges"]:
                assert start == covered < stop, f"step {step}: samples {event['sample_ranges']}"
                covered = stop
            assert covered == at.stop, f"step {step}: samples {event['sample_ranges']}"
            assert event["loss"] == self.step_loss(step)
            assert event["grad_norm"] == self.norms[step]
            assert applied == step + 1
        elif event["event"] == "validation":
            assert event["count"] == self.validation_samples
            assert event["loss"] == self.validation_loss()
            assert event["confusion"] == self.confusion(0, self.validation_samples)
            assert applied == event["at_step"]
        elif event["event"] == "answers":
            assert self.questions
            answers = [self.answer(prompt, applied) for prompt in self.questions.prompts]
            read = [self.questions.make_record(*each) for each in enumerate(answers)]
            assert event == {"event": "answers", "at_step": applied, "answers": read}
