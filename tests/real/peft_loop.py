"""The loop that people write with transformers and PEFT: what Motley's runs are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.model.initialization import initial_weights
from trainer.model.layout import build_layout

Row = Mapping[str, Any]
_SKIPPED = -100


@dataclass(frozen=True)
class Encoded:
    """One row for transformers: ids `[1, T]`, and labels `[1, T]` or a class `[1]`."""

    ids: torch.Tensor
    labels: torch.Tensor


def encode(folder: Path, rows: Sequence[Row], longest: int) -> list[Encoded]:
    """Return conversations whose answer is the target, or labelled texts, by transformers alone."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found: list[Encoded] = []
    for row in rows:
        if "messages" in row:
            whole, prompt = (
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=asks, tokenize=True, return_dict=False
                )
                for messages, asks in ((row["messages"], False), (row["messages"][:-1], True))
            )
            end = len(whole) - 1 - whole[::-1].index(tokenizer.eos_token_id)
            labels = [_SKIPPED] * len(prompt) + whole[len(prompt) : end + 1]
            labels += [_SKIPPED] * (len(whole) - len(labels))  # the line break after the last turn
            found.append(Encoded(torch.tensor([whole]), torch.tensor([labels])))
        else:
            ids = tokenizer(row["input"])["input_ids"]
            found.append(Encoded(torch.tensor([ids]), torch.tensor([row["label"]])))
    assert max(row.ids.shape[1] for row in found) <= longest
    return found


class PeftLoop:
    """A model of transformers with adapters of PEFT, and torch's AdamW; one row at a time.

    Weights that do not come from the model's files begin as Motley's do.
    """

    def __init__(self, folder: Path, config: RunConfig, dtype: torch.dtype = torch.float32) -> None:
        import peft
        import transformers

        self._config = config
        classes = config.num_classes
        auto: Any = (
            transformers.AutoModelForCausalLM
            if classes is None
            else transformers.AutoModelForSequenceClassification
        )
        more = {} if classes is None else {"num_labels": classes}
        model = auto.from_pretrained(folder, dtype=dtype, **more)
        if config.model.quantization == "nf4":
            _round_to_nf4(model)
        if config.method == "lora":
            settings = peft.LoraConfig(
                r=config.lora.lora_rank,
                lora_alpha=config.lora.lora_alpha,
                use_rslora=config.lora.use_rslora,
                modules_to_save=list(config.lora.modules_to_save) or None,
                target_modules=list(config.lora.target_modules or LINEARS),
                task_type="CAUSAL_LM" if classes is None else "SEQ_CLS",
            )
            model = peft.get_peft_model(model, settings)
        self.model: Any = model.to(dtype).train()
        layout = build_layout(folder, config)
        trained = {
            _plain(name): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        slots = {_plain(slot.name): slot for slot in layout.iter_tensors()}
        assert slots.keys() == trained.keys(), slots.keys() ^ trained.keys()
        self._trained = [(slot, trained[name]) for name, slot in slots.items()]
        self.size = layout.size
        self.write(initial_weights(layout, folder, config))

    def write(self, weights: np.ndarray) -> None:
        """Set the trainable weights."""
        for slot, parameter in self._trained:
            values = torch.from_numpy(weights[slot.start : slot.stop].copy())
            parameter.data.copy_(values.view(parameter.shape))

    def backward(self, rows: Sequence[Encoded]) -> tuple[float, int]:
        """Add the gradient of the rows' summed loss; return that sum and the number of targets."""
        return self._forward(rows, torch.Tensor.backward)

    def _forward(
        self, rows: Sequence[Encoded], use: Callable[[torch.Tensor], None]
    ) -> tuple[float, int]:
        total, targets = 0.0, 0
        for row in rows:
            logits = self.model(input_ids=row.ids).logits
            if row.labels.ndim == 2:
                logits, labels = logits[0, :-1], row.labels[0, 1:]
            else:
                labels = row.labels
            loss = functional.cross_entropy(logits, labels, ignore_index=_SKIPPED, reduction="sum")
            use(loss)
            total += loss.item()
            targets += int((labels != _SKIPPED).sum())
        return total, targets

    def gradient(self) -> np.ndarray:
        """Return the summed gradient, flat, in Motley's order."""
        flat = np.zeros(self.size)
        for slot, parameter in self._trained:
            flat[slot.start : slot.stop] = parameter.grad.double().flatten().numpy()
        return flat

    def losses(self, rows: Sequence[Encoded], steps: int) -> list[float]:
        """Train on all rows in each step; return the mean loss of each."""
        chosen = self._config.optimizer
        parameters = [parameter for _, parameter in self._trained]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": chosen.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon
        )
        found: list[float] = []
        for step in range(steps):
            optimizer.zero_grad()
            loss, targets = self.backward(rows)
            for parameter in parameters:
                parameter.grad /= targets
            torch.nn.utils.clip_grad_norm_(parameters, chosen.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = self._rate(step, steps)
            optimizer.step()
            found.append(loss / targets)
        return found

    def mean_loss(self, rows: Sequence[Encoded]) -> float:
        """Return the mean loss; nothing is trained."""
        with torch.no_grad():
            total, targets = self._forward(rows, lambda loss: None)
        return total / targets

    def _rate(self, step: int, steps: int) -> float:
        """Return the rate after a warmup of one step: a cosine down to `final_ratio`."""
        chosen = self._config.optimizer
        if step == 0:
            return chosen.learning_rate
        shape = (1 + math.cos(math.pi * step / (steps - 1))) / 2
        return chosen.learning_rate * (chosen.final_ratio + (1 - chosen.final_ratio) * shape)


def _plain(name: str) -> str:
    """Return a parameter's name without what PEFT puts into it."""
    name = name.removeprefix("base_model.model.").removeprefix("base_model.")
    for word in (".default", ".modules_to_save"):
        name = name.replace(word, "")
    return name


def _round_to_nf4(model: Any) -> None:
    """Give every linear of the layers the values that bitsandbytes keeps of it in NF4."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
            packed, state = quantize_4bit(module.weight.data.float(), quant_type="nf4")
            module.weight.data.copy_(dequantize_4bit(packed, state))
