"""`launch init`: write a run config to edit."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from trainer.system.commandline.options import PATH

_ELSEWHERE = ("inputs/", "hf://")
"""Data that need not be on this machine: what `launch sync inputs` brings, and the hub's."""
_TEXT = """\
{head}
# Every setting: docs/config.md. Commented-out settings show their defaults.
name: run                       # prefix of the run id
task: {task:<26}# classify (with num_classes), causal-lm or dpo
{classes}method: lora                    # or full: all weights train
output: runs/output             # checkpoints, metrics and status
model:
  path: {model}
  # dtype: float32              # of the frozen weights; bfloat16 takes half the memory
  # quantization: none          # nf4 keeps frozen linears at 4 bits (QLoRA)
data:
  train: {data}
  # validation: null            # held-out data of the same kind; validation_fraction is then 0
  validation_fraction: {validation_fraction:<9}# of the samples are held out for validation
  max_seq_len: {max_seq_len:<17}# tokens; longer samples are cut
lora:
  lora_rank: {lora_rank}
  lora_alpha: {lora_alpha}
  # target_modules: null        # the linears that get an adapter, such as [q_proj, v_proj]
optimizer:
  learning_rate: {learning_rate:<15}# the peak, after warmup
  # scheduler: cosine          # or constant, linear, wsd
  # warmup_ratio: 0.05
training:
  epochs: {epochs}
  # max_steps: null             # so many steps instead of epochs
  batch_size: {batch_size:<18}# samples a step, over all workers together
  # seed: 0
  evaluate_every: {evaluate_every:<14}# steps between validations; 0: once, at the end
checkpoint:
  every: 50                     # steps
  # keep_last: 3
"""


@click.command()
@click.argument("file", type=PATH, default="run.yaml")
@click.option(
    "--model", type=click.Path(), default="model", metavar="DIR|NAME", help="The base model."
)
@click.option(
    "--data", type=click.Path(), default="train.jsonl", metavar="FILE", help="Training data."
)
@click.option(
    "--from",
    "source",
    type=PATH,
    metavar="CONFIG",
    help="A config of axolotl or LLaMA-Factory to take the settings from.",
)
@click.pass_context
def init(context: click.Context, file: Path, model: str, data: str, source: Path | None) -> None:
    """Write a commented run config to FILE (default: run.yaml).

    Settings are derived from data and model if these are on this machine; or taken from another
    trainer's config, whose other keys are listed.
    """
    from launcher.discovery.yaml_text import as_comment, as_yaml
    from launcher.views import render
    from trainer.config.run import load_config
    from trainer.data.sources import find_data, refuse_pipe
    from trainer.model.files import local_model
    from trainer.planning.defaults import HELD_OUT, derive_settings, provisional_settings

    if source is not None:
        given = {"model.path": model, "data.train": data}
        flags = {"model.path": "model", "data.train": "data"}
        chosen = {key for key, name in flags.items() if _is_given(context, name)}
        text, lines = _from_foreign(file, source, given, chosen)
        _write_config(file, text)
        for line in lines:
            render.print_line(line)
        return
    config = load_config(
        None, {"model.path": model, "data.train": data, **provisional_settings({})}
    )
    folder = local_model(Path(model))
    if _is_given(context, "data") and not data.startswith(_ELSEWHERE):
        refuse_pipe(Path(data))
        find_data(Path(data))
    found = {part.key: part.value for part in derive_settings(config, (), folder, ())}
    config = config.with_settings(found or {"data.validation_fraction": HELD_OUT})
    classes = "" if config.num_classes is None else f"num_classes: {config.num_classes}\n"
    if config.class_names is not None:
        names = as_yaml(list(config.class_names))
        classes += f"class_names: {names}  # in the order of the classes\n"
    text = _TEXT.format(
        head=as_comment(f"A run config of Motley; start the run with: {_up_command(file)}"),
        task=config.task,
        classes=classes,
        model=as_yaml(model),
        data=as_yaml(data),
        validation_fraction=config.data.validation_fraction,
        max_seq_len=config.data.max_seq_len,
        lora_rank=config.lora.lora_rank,
        lora_alpha=config.lora.lora_alpha,
        learning_rate=config.optimizer.learning_rate,
        epochs=config.training.epochs,
        batch_size=config.training.batch_size,
        evaluate_every=config.training.evaluate_every,
    )
    _write_config(file, text)
    render.print_line(f"{file}: {config.task}; edit it, then: {_up_command(file)}")


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _from_foreign(
    file: Path, source: Path, given: dict[str, str], chosen: set[str]
) -> tuple[str, list[str]]:
    """Return a config with what another trainer's has, and lines for people.

    Args:
        given: model and data; those that are not `chosen` only fill gaps.
    """
    from launcher.discovery.yaml_text import as_comment
    from launcher.errors import ConfigError
    from trainer.config.foreign_config import PROGRAMS, convert_config, detect_program
    from trainer.config.run import RunConfig
    from trainer.config.section import build_settings, format_yaml, read_yaml
    from trainer.system.errors import InputError

    tree = read_yaml(source)
    program = detect_program(tree)
    if program is None:
        known = " or ".join(one.name for one in PROGRAMS)
        raise ConfigError(f"{source}: not a config of {known}")
    taken = convert_config(program, tree, source.parent)
    settings = given | taken.settings | {key: given[key] for key in chosen}
    refused = ""
    try:
        body = build_settings(RunConfig, {}, dict(settings), source).to_yaml(exclude_unset=True)
    except InputError as error:  # what is there is worth more than nothing
        body, refused = format_yaml(settings), str(error).removeprefix(f"{source}: ")
    left = [f"{key}: {why}" for key, why in taken.skipped.items()]
    assumed = ", ".join(f"{key} {value}" for key, value in taken.assumed.items())
    head = [
        f"A run config of Motley, from {source} of {program.name}; start the run with:",
        f"  {_up_command(file)}",
        f"{program.name} counts a batch of each device; training.batch_size is of all together.",
        *([f"Motley refuses this config, change this first: {refused}"] if refused else []),
        *(["Not converted:", *(f"  {line}" for line in left)] if left else []),
        *([f"Not set there, so {program.name}'s defaults apply: {assumed}"] if assumed else []),
        "All other settings have Motley's defaults (docs/config.md).",
    ]
    text = "".join(f"{as_comment(line)}\n" for line in head) + body
    lines = [f"not converted: {line}" for line in left]
    if assumed:
        lines.append(f"not set, so {program.name}'s defaults apply: {assumed}")
    if refused:
        lines.append(f"Motley refuses this config, change this first: {refused}")
    done = f"{file}: {len(taken.settings)} settings of {program.name}, {len(left)} keys left"
    return text, [*lines, f"{done}; edit it, then: {_up_command(file)}"]


def _write_config(file: Path, text: str) -> None:
    from launcher.errors import ConfigError

    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file}: exists already; name another one: launch init FILE") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def _up_command(file: Path) -> str:
    return f"launch cluster up --config {shlex.quote(str(file))}"
