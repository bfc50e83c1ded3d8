"""`trainer distill generate`: a teacher's answers to prompts, shard by shard."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from trainer.commands.device_options import columns_option, place_options
from trainer.commands.distill.teacher import Share, dtype_option, quantization_option
from trainer.config.limits import HOTTEST, MOST, MOST_ANSWERS, MOST_NEW_TOKENS
from trainer.system.commandline.number import Number
from trainer.system.commandline.options import PATH
from trainer.system.errors import InputError
from trainer.system.process.imports import speed_up_imports

if TYPE_CHECKING:
    from trainer.distill.answers.author import Generate
    from trainer.replica.backend import Compute


def _parse_gpu(_: click.Context, param: click.Parameter, given: str | None) -> str | None:
    if given is None:
        return None
    backend, *gpu = given.split(":", 1)
    if backend != "wgpu":
        raise click.BadParameter("expected wgpu or wgpu:ID, such as wgpu:0", param=param)
    return "".join(gpu)


@click.command("generate")
@click.argument("model")
@click.option(
    "--prompts",
    type=PATH,
    required=True,
    help="Data of any format: texts, or conversations whose last answer is written again.",
)
@columns_option
@click.option(
    "--out",
    "output",
    type=PATH,
    required=True,
    help="The folder of answers; an existing one is completed.",
)
@click.option(
    "--samples", type=click.IntRange(1, MOST_ANSWERS), default=1, help="Answers to each prompt."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1, MOST_NEW_TOKENS),
    default=512,
    help="Maximum number of tokens of an answer.",
)
@click.option(
    "--temperature",
    type=Number(min=0, max=HOTTEST),
    default=1.0,
    help="0 selects the most likely token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, MOST),
    help="Sample from this many of the most likely tokens.",
)
@click.option(
    "--top-p", type=Number(), help="Sample from the most likely tokens of this total probability."
)
@click.option(
    "--stop",
    "stops",
    multiple=True,
    help="A text that ends an answer, besides the model's end token; may be repeated.",
)
@click.option("--seed", type=click.IntRange(0, MOST), default=0, help="Seed of the sampling.")
@click.option(
    "--shard-prompts",
    "prompts_per_shard",
    type=click.IntRange(min=1),
    default=64,
    help="Prompts per shard.",
)
@click.option("--batch", type=click.IntRange(min=1), default=16, help="Answers generated at once.")
@click.option(
    "--workers",
    "share",
    type=Share(),
    default="1/1",
    help="Answer every Nth shard, starting with the Ith; other processes answer the rest.",
)
@click.option("--name", help="This process's name in the folder; default: host and part.")
@place_options("auto", "cuda", "wgpu", "cpu")
@dtype_option
@quantization_option
@click.option(
    "--kv-offload",
    "kv_gpu",
    metavar="wgpu[:ID]",
    callback=_parse_gpu,
    help="A spare Vulkan device (index, PCI address, name) for keys and values of layers.",
)
@click.option(
    "--kv-layers",
    type=click.IntRange(min=1),
    help="Number of layers for --kv-offload; default: as many as fit.",
)
@click.option("--kv-even-if-slower", is_flag=True, help="Use --kv-offload even if it is slower.")
def generate(
    samples: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    batch: int,
    share: tuple[int, int],
    name: str | None,
    compute: Compute,
    kv_gpu: str | None,
    kv_layers: int | None,
    kv_even_if_slower: bool,
    **request: Any,
) -> None:
    """Continue prompts with MODEL, any language model that Motley trains: a folder or a hub name.

    Complete shards are skipped, so the same command resumes where the last one ended. The folder is
    data for `trainer finetune` and `trainer distill teacher`.
    """
    if "/" in (name or ""):
        raise InputError(f"--name {name}: a file is named after it, so it must not contain a slash")
    if kv_gpu is None and (kv_layers is not None or kv_even_if_slower):
        raise InputError("--kv-layers and --kv-even-if-slower need --kv-offload")
    from trainer.distill.teacher.engines import read_weight_type
    from trainer.distill.teacher.generation import AnswerRequest, AnswerRun, assign_answers
    from trainer.distill.teacher.progress import open_teacher_view
    from trainer.replica.sampling import Sampling
    from trainer.system.process.interruption import Interrupted, Interruption

    sampling = Sampling(temperature, top_k, top_p, seed)
    interruption = Interruption()
    try:
        with ExitStack() as stack:
            stack.enter_context(interruption.handle_signals())
            stack.enter_context(interruption.allow_signals())
            assignment = assign_answers(
                AnswerRequest(samples=samples, sampling=sampling, **request)
            )
            view = open_teacher_view()
            stack.callback(view.close)

            def open_model() -> Generate:
                with speed_up_imports("torch"):
                    from trainer.distill.teacher.kv_offload import KVOffload
                    from trainer.distill.teacher.torch_author import open_generate
                offload, length = None, assignment.slots
                if kv_gpu is not None:
                    size = assignment.shard_answers, length
                    offload = KVOffload(kv_gpu, *size, kv_layers, kv_even_if_slower)
                weights = read_weight_type(assignment.description.teacher)
                return open_generate(
                    assignment.model_dir,
                    weights.dtype,
                    compute,
                    batch,
                    length,
                    offload,
                    weights.quantization,
                )

            progress = AnswerRun(
                assignment,
                open_model,
                share=share,
                name=name,
                on_progress=view.show_status,
                check=interruption.raise_if_interrupted,
            ).make_shards()
    except Interrupted as reason:
        click.echo(f"{reason}; the same command resumes from here", err=True)
        return
    answers = assignment.description.answers
    click.echo(f"{assignment.folder.path}: {progress.shards} shards of {answers:,} answers")
