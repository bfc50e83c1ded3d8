"""A teacher's answers: what to continue, and the pass that does, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.run import Quantization
from trainer.distill.answers.answer import Answer
from trainer.distill.answers.author import AnswerSlot, Author, Generate, Prompts
from trainer.distill.answers.description import (
    AnswersDescription,
    SamplingParams,
    plan_shards,
    prompts_digest,
)
from trainer.distill.answers.folder import AnswersFolder
from trainer.distill.logits.description import CorpusInfo, ShardPlan, TeacherInfo, TokenizerInfo
from trainer.distill.teacher.run import Make, ShardRun, check_same_model
from trainer.distill.tokenizer.vocabulary import tokenizer_digest, tokenizer_size
from trainer.model.architecture import read_positions, read_vocabulary
from trainer.model.files import model_digest, resolve_model
from trainer.replica.sampling import Sampling
from trainer.system.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A request to continue prompts."""

    model: str
    """A local folder, a GGUF file or a hub name."""
    prompts: Path
    """Data of any format, whose conversations may lack an answer."""
    output: Path
    sampling: Sampling
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    samples: int = 1
    """Answers to each prompt."""
    max_new_tokens: int = 512
    stops: Sequence[str] = ()
    """Texts that end an answer."""
    prompts_per_shard: int = 64
    """Prompts that a killed process loses at most."""
    dtype: str = "bfloat16"
    quantization: Quantization = "none"


@dataclass(frozen=True, eq=False)
class AnswerAssignment:
    """A request that fits its output folder."""

    model_dir: Path
    prompts: Prompts
    sampling: Sampling
    folder: AnswersFolder
    description: AnswersDescription

    @property
    def slots(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return len(self.prompts.tokens[self.prompts.longest]) + self.description.max_new_tokens

    @property
    def shard_answers(self) -> int:
        """Answers of the largest shard."""
        return max(
            self.description.samples * (plan.stop_document - plan.first_document)
            for plan in self.description.shards
        )


def assign_answers(request: AnswerRequest) -> AnswerAssignment:
    """Return what a request asks for, after comparing it with an existing output folder.

    Raises:
        InputError: model or prompts cannot be used, or a prompt is too long for the model.
        RefusedError: the folder's description differs; names both values.
    """
    model_dir = resolve_model(request.model)
    prompts = Prompts.read_prompts(request.prompts, request.columns, model_dir)
    new = request.max_new_tokens
    most, length = read_positions(model_dir), len(prompts.tokens[prompts.longest])
    if most is not None and length + new > most:
        raise InputError(
            f"{request.prompts}: prompt {prompts.longest + 1} has {length} tokens, with {new} new"
            f" ones more than the model's {most} positions; lower --max-new-tokens"
        )
    samples = prompts.samples
    description = AnswersDescription(
        teacher=TeacherInfo(
            name=request.model,
            digest=model_digest(model_dir),
            engine="torch",
            quantization=request.quantization,
            dtype=request.dtype,
            vocab_size=read_vocabulary(model_dir),
            tokenizer_size=tokenizer_size(model_dir),
        ),
        tokenizer=TokenizerInfo(digest=tokenizer_digest(model_dir), size=tokenizer_size(model_dir)),
        corpus=CorpusInfo(digest=prompts_digest(samples), documents=len(samples)),
        samples=request.samples,
        max_new_tokens=new,
        sampling=SamplingParams(**asdict(request.sampling)),
        stop_strings=tuple(request.stops),
        shards=plan_shards(len(samples), request.prompts_per_shard, request.samples, new),
    )
    folder = AnswersFolder(request.output)
    if folder.is_described:
        folder.compare_description(description)
    return AnswerAssignment(model_dir, prompts, request.sampling, folder, description)


class AnswerRun(ShardRun[Answer]):
    """Writes an assignment's shards, or each Nth of them; see `ShardRun`.

    Args:
        open_model: loads the model and returns what continues prompts.
    """

    def __init__(
        self, assignment: AnswerAssignment, open_model: Callable[[], Generate], **options: Any
    ) -> None:
        there = assignment.description

        def open_generator() -> Make[Answer]:
            author = Author(
                open_model(),
                assignment.prompts,
                assignment.sampling,
                there.max_new_tokens,
                there.stop_strings,
            )
            check_same_model(assignment.model_dir, there.teacher)
            assignment.folder.write_description(there)

            def make(plan: ShardPlan, on_tokens: Callable[[int], None]) -> list[Answer]:
                places = [
                    AnswerSlot(document, sample, document, document * there.samples + sample)
                    for document in range(plan.first_document, plan.stop_document)
                    for sample in range(there.samples)
                ]
                return author.write_answers(places, on_tokens)

            return make

        super().__init__(assignment.folder, there.shards, open_generator, **options)
