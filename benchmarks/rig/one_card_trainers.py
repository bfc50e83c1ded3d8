"""The steps of one model on one device by Motley, by a plain loop with PEFT, and by TRL.

Each starts from the same weights, adapters too, and takes the same rows at the same learning rate
with AdamW and a clipped norm, so that all losses are equal but for rounding.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rig.step_clock import StepClock
from rig.training_step import random_rows, step_config
from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.data.tokens import Encoded
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout, read_headers
from trainer.optimizer.adamw import AdamW, TrainState, square_sum
from trainer.planning.model_config import read_shape
from trainer.planning.replica import plan_memory
from trainer.replica.torch.replica import TorchReplica

RATES = {"lora": 1e-4, "qlora": 1e-4, "full": 1e-5}


@dataclass(frozen=True)
class Job:
    """One model, method and size of step, for whichever trainer."""

    folder: str
    method: str
    rows: int
    tokens: int
    device: str
    recompute: bool

    @property
    def on_card(self) -> bool:
        """Whether it runs on a card, in bf16; on a CPU all is in fp32."""
        return self.device.startswith("cuda")

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES[self.method]

    def config(self) -> RunConfig:
        """Return Motley's settings."""
        settings: dict[str, Any] = {
            "training.gradient_checkpointing": "on" if self.recompute else "off",
            "training.precision": "bf16" if self.on_card else "fp32",
            "optimizer.weight_decay": 0.0,
            "optimizer.learning_rate": self.rate,
        }
        if not self.on_card:
            settings["model.dtype"] = "float32"
        return step_config(Path(self.folder), self.method, self.rows, self.tokens, settings)

    def batch(self, step: int) -> list[Encoded]:
        """Return the rows of a step."""
        tree = json.loads(Path(self.folder, "config.json").read_text(encoding="utf-8"))
        return random_rows(tree["vocab_size"], self.rows, self.tokens, step)

    def planned_bytes(self) -> int:
        """Return the memory that Motley plans for the device."""
        config, folder = self.config(), Path(self.folder)
        plan = plan_memory(
            read_shape(folder),
            read_headers(folder),
            build_layout(folder, config),
            config,
            accelerator=self.on_card,
            recompute=self.recompute,
        )
        return plan.fixed + self.rows * self.tokens * plan.per_token


def run_motley(job: Job, clock: StepClock) -> None:
    """Take the steps of a run of one worker: the gradient leaves the card, AdamW is the host's."""
    config, folder = job.config(), Path(job.folder)
    layout = build_layout(folder, config)
    replica = TorchReplica(folder, config, layout, job.device, torch.get_num_threads())
    state = TrainState.create(initial_weights(layout, folder, config))
    optimizer = AdamW(config.optimizer, layout)
    replica.write_trainable(state.weights)
    gradient = np.empty(layout.size, np.float32)

    def receive(index: int, values: np.ndarray) -> None:
        block = layout.blocks[index]
        gradient[block.start : block.stop] = values

    for step in range(clock.total):
        batch = job.batch(step)
        clock.begin()
        result = replica.forward_backward(batch, receive)
        norm = math.sqrt(square_sum(gradient)) / result.weight
        scale = optimizer.clip_scale(norm) / result.weight
        optimizer.apply(state, gradient, job.rate, scale)
        replica.write_trainable(state.weights)
        clock.losses.append(result.loss_sum / result.weight)
        clock.end()


def run_peft(job: Job, clock: StepClock) -> None:
    """Take the steps of the loop in PEFT's documentation, with torch's fused AdamW on a card.

    Norms stay in bf16 and no input needs a gradient unless layers are recomputed: the least memory
    that this loop takes.
    """
    model, device = _transformers_model(job), torch.device(job.device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job.rate, weight_decay=0.0, fused=job.on_card)
    for step in range(clock.total):
        rows = np.stack([row.input_ids for row in job.batch(step)])
        clock.begin()
        ids = torch.from_numpy(rows.astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=job.on_card):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.losses.append(float(loss.detach()))
        clock.end()


def run_trl(job: Job, clock: StepClock) -> None:
    """Take the steps of TRL's SFTTrainer."""
    import transformers
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")),
        pad_token="<pad>",
        eos_token="<pad>",
    )
    rows = [row.input_ids.tolist() for step in range(clock.total) for row in job.batch(step)]
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=_transformers_model(job),
            processing_class=tokenizer,
            args=SFTConfig(
                output_dir=output,
                max_steps=clock.total,
                max_length=None,
                per_device_train_batch_size=job.rows,
                learning_rate=job.rate,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                train_sampling_strategy="sequential",
                logging_steps=1,
                report_to=[],
                use_cpu=not job.on_card,
                bf16=job.on_card,
                gradient_checkpointing=job.recompute,
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            callbacks=[Clock()],
        )
        trainer.train()
    clock.losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]


TRAINERS: dict[str, Callable[[Job, StepClock], None]] = {
    "motley": run_motley,
    "peft": run_peft,
    "trl": run_trl,
}


def _transformers_model(job: Job) -> Any:
    """Return the model by transformers, with PEFT's adapters that begin as Motley's do."""
    import transformers

    narrow = torch.bfloat16 if job.on_card and job.method != "full" else torch.float32
    settings: dict[str, Any] = {"dtype": narrow, "device_map": {"": job.device}}
    if job.method == "qlora":
        settings["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=narrow
        )
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job.folder, **settings)
    if job.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.method != "full":
        model = _with_adapters(model, job)
    return model.train()


def _with_adapters(model: Any, job: Job) -> Any:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config, folder = job.config(), Path(job.folder)
    layout = build_layout(folder, config)
    weights = torch.from_numpy(initial_weights(layout, folder, config))
    lora = config.lora
    model = get_peft_model(
        model,
        LoraConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,
            target_modules=list(LINEARS),
            task_type="CAUSAL_LM",
        ),
    )
    tensors = {
        slot.name: weights[slot.start : slot.stop].view(slot.shape)
        for slot in layout.iter_tensors()
    }
    found = set_peft_model_state_dict(model, tensors)
    assert not found.unexpected_keys, found.unexpected_keys
    if job.recompute:
        model.enable_input_require_grads()
    return model
