"""`trainer distill teacher`: score a corpus, shard by shard."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.commands.device_options import corpus_options, lost_text_option, place_options
from trainer.config.limits import HOTTEST, MOST, MOST_DRAWS, SHORTEST_WINDOW
from trainer.config.teacher_engines import (
    TEACHER_ENGINES,
    explain_quantization,
    explain_resident,
)
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH
from trainer.system.errors import InputError
from trainer.system.process.imports import speed_up_imports

if TYPE_CHECKING:
    from trainer.distill.logits.scores import Kind
    from trainer.distill.teacher.scoring import Teacher
    from trainer.replica.backend import Compute


dtype_option = click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    help="Type of the weights and of the computation.",
)
quantization_option = click.option(
    "--quantization",
    type=click.Choice(["none", "nf4"]),
    default="none",
    help="nf4: linears and experts in 4 bits, as model.quantization.",
)


class Share(click.ParamType):
    """Which part of the shards one of several teachers scores, as `2/3`."""

    name = "I/N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Return the part's number, from 1, and how many parts there are."""
        if isinstance(value, tuple):
            return value
        index, slash, count = str(value).partition("/")
        if not (
            slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)
        ):
            self.fail(f"{value!r} is not a part I/N, such as 1/2", param, ctx)
        return int(index), int(count)


@click.command("teacher")
@click.argument("model")
@corpus_options(required=False)
@click.option(
    "--out",
    "output",
    type=PATH,
    required=True,
    help="The folder of logits; an existing one is completed.",
)
@click.option(
    "--tokenizer",
    type=PATH,
    help="The student's tokenizer folder; default: the teacher's own tokenizer.",
)
@click.option(
    "--scheme",
    type=click.Choice(["topk", "sampled", "full"]),
    default="topk",
    help="Stored scores: the likeliest tokens and a sample, a sample, or all.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, MOST),
    default=64,
    help="For topk: tokens kept exactly per position.",
)
@click.option(
    "--tail-samples",
    type=click.IntRange(0, MOST_DRAWS),
    default=8,
    help="For topk: samples from the remaining tokens.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, MOST_DRAWS),
    default=50,
    help="For sampled: samples per position.",
)
@click.option(
    "--temperature",
    type=Number(min=0, min_open=True, max=HOTTEST),
    default=1.0,
    help="Temperature of the kept probabilities.",
)
@click.option(
    "--values",
    type=click.Choice(["float16", "float32"]),
    default="float16",
    help="Precision of the stored probabilities.",
)
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=SHORTEST_WINDOW),
    help="Tokens of a window; longer documents become several. Default: 1024, or the teacher's "
    "limit.",
)
@lost_text_option
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    callback=lambda _, __, day: day and day.date().isoformat(),
    help="Today's date for a chat template that asks; default: that of `data.date`.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    help="Tokens per forward pass; default: 4096, on a GPU 32768.",
)
@click.option(
    "--shard-bytes", type=click.IntRange(min=1), default=1 << 19, help="Bytes of text per shard."
)
@click.option(
    "--workers",
    "share",
    type=Share(),
    default="1/1",
    help="Score every Nth shard, starting with the Ith; other processes score the rest.",
)
@click.option("--name", help="This teacher's name in the folder; default: host and part.")
@click.option(
    "--stay", is_flag=True, help="When finished, wait for students' requests until SIGTERM."
)
@click.option(
    "--until",
    type=PATH,
    metavar="STATUS",
    help="End early once the student's run is over, according to this status.json.",
)
@click.option(
    "--with-student",
    is_flag=True,
    help="With --until: end at once then, or 15 minutes after the student's last heartbeat.",
)
@click.option("--seed", type=click.IntRange(0, MOST), default=0, help="Seed of the sampling.")
@place_options("auto", "cuda", "wgpu", "cpu")
@dtype_option
@quantization_option
@click.option(
    "--engine",
    type=click.Choice([*TEACHER_ENGINES]),
    default="torch",
    help="Engine; on the CPU also openvino (int8) and gguf (a GGUF file as it is), on Vulkan wgpu.",
)
def teacher(
    model: str,
    scheme: Kind,
    top_k: int,
    tail_samples: int,
    samples: int,
    temperature: float,
    share: tuple[int, int],
    name: str | None,
    stay: bool,
    until: Path | None,
    with_student: bool,
    compute: Compute,
    batch_tokens: int | None,
    **request: Any,
) -> None:
    """Score texts with MODEL, any causal language model: a folder, a GGUF file or a hub name.

    The answers of students that learn on-policy are scored, too, with --stay also after the corpus;
    without --data nothing else is.

    Complete shards are skipped, so the same command resumes where the last one ended.
    """
    if "/" in (name or ""):
        raise InputError(f"--name {name}: a file is named after it, so it must not contain a slash")
    if "," in compute.gpu:
        raise InputError("--gpu: one teacher takes one GPU; start several with --workers I/N")
    if reason := explain_resident(request["engine"], compute.resident):
        raise InputError(f"--resident {compute.resident}: {reason}")
    if reason := explain_quantization(request["engine"], request["quantization"]):
        raise InputError(f"--quantization {request['quantization']}: {reason}")
    if with_student and until is None:
        raise InputError("--with-student: give --until STATUS, which is in the student's folder")
    if not request["data"] and not stay:
        raise InputError(
            "give --data PATH, or --stay without it: then it scores the answers that students write"
        )
    from trainer.distill.logits.scores import Scheme
    from trainer.distill.teacher.assignment import ScoringRequest, assign_request
    from trainer.distill.teacher.progress import open_teacher_view
    from trainer.distill.teacher.run import TeacherRun
    from trainer.system.process.interruption import Interrupted, Interruption
    from trainer.tracking.status import says_over
    from trainer.tracking.student_watch import StudentWatch, ends_with_student

    interruption = Interruption()
    try:
        with ExitStack() as stack:
            stack.enter_context(interruption.handle_signals())
            if with_student and until is not None:
                stack.enter_context(ends_with_student(StudentWatch(until.parent), interruption))
            stack.enter_context(interruption.allow_signals())
            kept = Scheme(
                kind=scheme,
                top_k=top_k,
                tail_samples=tail_samples,
                samples=samples,
                temperature=temperature,
            )
            assignment = assign_request(ScoringRequest(model=model, scheme=kept, **request))
            view = open_teacher_view()
            stack.callback(view.close)

            def open_model() -> Teacher:
                with speed_up_imports("torch"):
                    from trainer.distill.teacher.scoring import open_teacher
                return open_teacher(
                    assignment.model_dir,
                    assignment.vocabulary,
                    assignment.description,
                    compute,
                    batch_tokens=batch_tokens,
                )

            teacher_run = TeacherRun(
                assignment,
                open_model,
                share=share,
                name=name,
                over=lambda: until is not None and says_over(until),
                on_progress=view.show_status,
                check=interruption.raise_if_interrupted,
            )
            progress = teacher_run.make_shards(stay=stay)
    except Interrupted as reason:
        click.echo(f"{reason}; the same command resumes from here", err=True)
        return
    click.echo(f"{assignment.folder.path}: {progress.shards} shards, {progress.tokens:,} tokens")
