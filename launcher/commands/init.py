"""`launch init`: a run config to edit."""

from __future__ import annotations

from pathlib import Path

import click

_TEXT = """\
# A run of Motley; start it with: launch cluster up --config {file}
# Every setting: docs/config.md. What is commented out shows its default.
name: run                       # begins the run id
task: {task}{classes}
method: lora                    # or full: every weight trains
output: runs/output             # checkpoints, metrics and status
model:
  path: {model}
  # dtype: float32              # of the frozen weights; bfloat16 takes half the memory
  # quantization: none          # nf4 keeps frozen linears at 4 bits (QLoRA)
data:
  train: {data}
  # validation: null            # held-out data of the same kind
  max_seq_len: 512              # tokens; longer samples are cut
lora:
  lora_rank: 16
  lora_alpha: 32
  # target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
optimizer:
  learning_rate: 1.0e-4         # the peak, after warmup
  # warmup_ratio: 0.05
training:
  epochs: 1
  # max_steps: null             # stop earlier
  batch_size: 16                # samples a step, over all workers together
  # seed: 0
  # evaluate_every: 0           # steps between validations; 0: once, at the end
checkpoint:
  every: 50                     # steps
  # keep_last: 3
"""


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default="run.yaml")
@click.option("--model", type=click.Path(), default="model", metavar="DIR|NAME", help="The base.")
@click.option(
    "--data", type=click.Path(), default="train.jsonl", metavar="FILE", help="JSON Lines."
)
def init(file: Path, model: str, data: str) -> None:
    """Write a commented run config to edit: FILE, else run.yaml.

    The task follows from the data where it lies here: lines with a label are classified.
    """
    from launcher.errors import ConfigError
    from launcher.views import render
    from trainer.config.defaults import infer

    settings = infer(data) or {"task": "causal-lm"}
    classes = settings.get("num_classes")
    text = _TEXT.format(
        file=file,
        task=settings["task"],
        classes="" if classes is None else f"\nnum_classes: {classes}",
        model=_quoted(model),
        data=_quoted(data),
    )
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file}: exists already; name another file") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    render.say(f"{file}: {settings['task']}; edit it, then: launch cluster up --config {file}")


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)
