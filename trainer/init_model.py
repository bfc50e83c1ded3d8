"""Create a small Qwen3: random weights and a tokenizer trained on the given data.

A first run needs no download. The folder is an ordinary Hugging Face model. Torch-free and
deterministic: the same data, sizes and seed give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.samples import read_samples
from trainer.model.hf_export import iter_safetensors
from trainer.model.initialization import WEIGHT_STD, random_weights
from trainer.system.errors import InputError
from trainer.system.storage.new_folder import check_new, write_new

END, PAD = "<|endoftext|>", "<|pad|>"
# The last two let a conversation be laid out as ChatML (trainer.data.chat).
SPECIAL_TOKENS = (END, PAD, "<|im_start|>", "<|im_end|>")
_BYTES = 256


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a small Qwen3; by default the demo's, chosen by measured accuracy."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    vocab_size: int = 1024
    """At most; a small data file yields fewer tokens."""
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise InputError(f"{name} must be positive, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        least = _BYTES + len(SPECIAL_TOKENS)
        if self.vocab_size < least:
            raise InputError(f"vocab_size must be at least {least}: all bytes and special tokens")


def init_model(data: Path, output: Path, sizes: ModelSizes | None = None, seed: int = 0) -> Path:
    """Write a new model folder and return its path; it appears whole or not at all.

    Args:
        data: that the tokenizer is trained on, of any format.

    Raises:
        InputError: the data is unusable, or `output` already holds something.
        StorageError: the write failed.
    """
    sizes = sizes or ModelSizes()
    check_new(output)
    tokenizer = train_tokenizer(_iter_texts(data), sizes.vocab_size)
    config = model_config(sizes, tokenizer)
    weights = random_weights(config, seed)
    files: dict[str, Iterable[bytes | memoryview]] = {
        "config.json": [_format_json(config)],
        "generation_config.json": [_format_json({"eos_token_id": 0, "pad_token_id": 1})],
        "tokenizer.json": [tokenizer.to_str(pretty=True).encode()],
        "tokenizer_config.json": [_format_json(tokenizer_config(sizes.max_position_embeddings))],
        "model.safetensors": iter_safetensors(weights, {"format": "pt"}),
    }
    return write_new(output, files)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer (Sennrich et al., arXiv:1508.07909): no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits, and runs of spaces kept apart, for code.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def model_config(sizes: ModelSizes, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a Qwen3 with tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "initializer_range": WEIGHT_STD,
        "dtype": "float32",
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return the tokenizer_config.json that AutoTokenizer reads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "right",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }


def _iter_texts(data: Path) -> Iterator[str]:
    for sample in read_samples(data, "causal-lm"):
        yield from filter(None, (sample.prompt, sample.text))
        for message in sample.messages:
            yield message.content


def _format_json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
