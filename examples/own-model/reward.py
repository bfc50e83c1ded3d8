"""A reward model: transformers' class, and the loss of Bradley and Terry of one's own."""

import random

import torch
from torch.nn.functional import logsigmoid
from transformers import Qwen3Config, Qwen3ForSequenceClassification

TEXT = "sure here is the answer you asked for sorry no go away i will not help please wait"
WORDS = {word: index + 1 for index, word in enumerate(TEXT.split())}
POLITE = {"sure", "please", "here", "answer", "help"}


def model():
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
    )
    config.num_labels = 1
    return Qwen3ForSequenceClassification(config)


def dataset(split):
    """Return pairs of answers, the better first; in place of people a count compares them."""
    draw = random.Random(split)
    pairs = []
    while len(pairs) < (256 if split == "train" else 64):
        two = [draw.sample(sorted(WORDS), 8) for _ in range(2)]
        worse, better = sorted(two, key=lambda words: len(POLITE & {*words}))
        if len(POLITE & {*worse}) < len(POLITE & {*better}):
            pairs.append((better, worse))
    return pairs


def collate(pairs):
    rows = [answer for pair in zip(*pairs) for answer in pair]
    return torch.tensor([[WORDS[word] for word in row] for row in rows])


def margins(model, rows):
    chosen, rejected = model(rows).logits[:, 0].chunk(2)
    return chosen - rejected


def loss(model, rows):
    return -logsigmoid(margins(model, rows)).sum(), len(rows) // 2


def metrics(model, rows):
    return {"accuracy": (margins(model, rows) > 0).sum()}
