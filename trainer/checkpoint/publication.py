"""A folder to publish: what a hub shows and PEFT or transformers load, and nothing else.

A checkpoint also has what a run needs to resume, which is twice as large as its weights. This
folder has the weights (the same bytes, linked where the file system can), the tokenizer, the names
of the classes and a model card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainer import __version__
from trainer.checkpoint.reader import RUN_FILE, read_run
from trainer.checkpoint.stored_state import OPTIMIZER_FILE
from trainer.config.run import SCRIPT, RunConfig
from trainer.model.formats import lasting_name
from trainer.model.hf_export import ADAPTER_CONFIG, CLASSIFIER_CONFIG, iter_file
from trainer.system.commandline.markdown_text import code_block, code_span, escape_markdown
from trainer.system.errors import StorageError
from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_folder import Disk, FolderWriter, read_manifest

CARD = "README.md"
"""The card of a model on a hub."""


def publication_folder(config: RunConfig) -> Path:
    """Return the folder in a run's output folder."""
    return Path(config.output) / ("adapter" if config.method == "lora" else "model")


def write_publication(checkpoint: Path, config: RunConfig, model_dir: Path) -> Path:
    """Write the folder from a checkpoint, in place of an older one, and return its path.

    Raises:
        StorageError: the checkpoint cannot be read, or the folder not be written.
    """
    target = publication_folder(config)
    records = read_manifest(checkpoint)
    kept = {name: record for name, record in records.items() if name not in _OF_A_RUN}
    texts = {CARD: model_card(read_run(checkpoint), config, model_dir)}
    if ADAPTER_CONFIG in kept and (name := _hub_name(config)):
        tree = json.loads(read_file(checkpoint / ADAPTER_CONFIG))
        texts[ADAPTER_CONFIG] = json.dumps({**tree, "base_model_name_or_path": name}, indent=2)
    try:
        writer = FolderWriter(Disk(), target.parent.resolve(), target.name)
        try:
            for name, record in kept.items():
                if name in texts:
                    continue
                try:
                    os.link(checkpoint / name, writer.prepare_path(name))
                    writer.adopt_file(name, record)
                except OSError:  # another file system, or one without links
                    writer.write_file(name, iter_file(checkpoint / name))
            for name, text in texts.items():
                writer.write_file(name, [text.encode()])
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from None


_OF_A_RUN = (RUN_FILE, OPTIMIZER_FILE)
"""Files of a checkpoint that only a run needs: to resume."""


def model_card(run: Mapping[str, Any], config: RunConfig, model_dir: Path) -> str:
    """Return the text of README.md: the metadata that a hub reads, facts, and how to use it."""
    if config.task == SCRIPT:
        return (
            f"# {escape_markdown(config.name)}\n\nWeights of a PyTorch module, trained with Motley"
            f" {__version__} for {run['step']:,} steps. Frozen parameters are those that its script"
            " makes: `model.load_state_dict(safetensors.torch.load_file(FILE), strict=False)`\n"
        )
    lora, classify, base = config.method == "lora", config.task == "classify", _hub_name(config)
    library = "peft" if lora else "transformers"
    about: dict[str, Any] = {"library_name": library}
    if base:
        about |= {"base_model": base, "base_model_relation": "adapter" if lora else "finetune"}
    about["pipeline_tag"] = f"text-{'classification' if classify else 'generation'}"
    about["tags"] = [*(["lora"] if lora else []), "motley"]
    training = config.training
    facts = {
        "base model": base or Path(config.model.path).name,
        "task": config.task,
        "steps": run["step"],
        "batch size": training.batch_size,
        "learning rate": config.optimizer.learning_rate,
        "longest sample": f"{config.data.max_seq_len} tokens",
        "seed": training.seed,
    }
    if lora:
        facts |= {"LoRA rank": config.lora.lora_rank, "LoRA alpha": config.lora.lora_alpha}
    if run.get("metric") is not None:
        # Higher is better, so a loss is kept with its sign turned.
        facts["validation"] = f"{abs(run['metric']):.4g}"
    if config.class_names:
        facts["classes"] = ", ".join(config.class_names)
    rows = "".join(f"| {name} | {escape_markdown(str(it))} |\n" for name, it in facts.items())
    what = "A LoRA adapter" if lora else "A model"
    found = lasting_name(config.model.path, model_dir)
    local = ""
    if lora and not base:
        local = (
            f" Its base is {code_span(found)}, a folder or file of this computer. Before you"
            " publish the adapter, put the base's name on the hub in place of this path, below and"
            f" as `base_model_name_or_path` in {ADAPTER_CONFIG}, and add `base_model:` above."
        )
    return (
        f"---\n{yaml.safe_dump(about, sort_keys=False, width=1 << 16)}---\n\n"
        f"# {escape_markdown(config.name)}\n\n{what}, trained with Motley"
        f" {__version__}. Its licence is for you to choose: add `license:` above.{local}\n\n"
        f"| | |\n|---|---|\n{rows}\n{code_block(_usage_lines(config, base or found), 'python')}\n"
    )


def _usage_lines(config: RunConfig, base: str) -> list[str]:
    """Return the lines of Python that load the folder, from inside it."""
    auto = "Sequence" + "Classification" if config.task == "classify" else "CausalLM"
    auto = f"AutoModelFor{auto}"
    lines = [f"from transformers import {auto}, AutoTokenizer", ""]
    if config.method == "lora" and base.endswith(".gguf"):
        lines.insert(0, "# PEFT has no GGUF as a base: trainer merge . -o merged")
        lines += [f'model = {auto}.from_pretrained("merged")']
    elif config.method == "lora" and config.task == "classify":
        lines[0] = f"from transformers import AutoConfig, {auto}, AutoTokenizer"
        lines.insert(1, "from peft import PeftModel")
        lines += [f'config = AutoConfig.from_pretrained("{CLASSIFIER_CONFIG}")']
        lines += [f"model = {auto}.from_pretrained({base!r}, config=config)"]
        lines += ['model = PeftModel.from_pretrained(model, ".")']
    elif config.method == "lora":
        lines.insert(1, "from peft import PeftModel")
        lines += [f"model = {auto}.from_pretrained({base!r})"]
        lines += ['model = PeftModel.from_pretrained(model, ".")']
    else:
        lines += [f'model = {auto}.from_pretrained(".")']
    return [*lines, 'tokenizer = AutoTokenizer.from_pretrained(".")']


def _hub_name(config: RunConfig) -> str | None:
    """Return the base's name on a hub; None for a folder or file of this machine."""
    path = config.model.path
    with suppress(OSError):
        if Path(path).expanduser().exists():
            return None
    return path if path.count("/") == 1 and not path.startswith((".", "/", "~")) else None
