import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.trainer.data.datasets import load_dataset
from trainer.data import tokens
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.records import DataError
from trainer.data.shapes import Sample
from trainer.system.errors import InputError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(folder, special=SPECIAL, eos: str | None = "<|endoftext|>", bos=None):
    """One token a byte, so that ids are easy to count."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    # A folder's own settings must not reach training.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return tokenizer


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_classify_ids_and_labels(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    path = write(
        tmp_path / "a.jsonl", {"input": "echo hi", "label": 2}, {"input": "ls", "label": 0}
    )
    data = load_dataset(path, tmp_path, "classify", 5, max_seq_len=64)
    assert [data[i].labels for i in range(len(data))] == [2, 0]
    assert data[0].input_ids.dtype == np.int32
    assert tokenizer.decode(data[0].input_ids.tolist()) == "echo hi"
    assert sum(len(data[i].input_ids) for i in range(len(data))) == 9
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(IndexError):
        data[-1]


def test_samples_are_encoded_when_they_are_asked_for(tmp_path, monkeypatch):
    """A worker that starts again does not wait for the whole file's tokens."""
    byte_tokenizer(tmp_path)
    path = write(tmp_path / "a.jsonl", *({"input": f"echo {n}", "label": 0} for n in range(100)))
    seen: list[Sample] = []
    texts = Encoder.encode_texts
    monkeypatch.setattr(
        Encoder, "encode_texts", lambda self, part: seen.extend(part) or texts(self, part)
    )
    data = load_dataset(path, tmp_path, "classify", 2, max_seq_len=64)
    assert not seen
    assert data[7] is data[7]
    assert [sample.line for sample in seen] == [8]


def test_causal_lm_text_ends_and_predicts_all_but_its_first_token(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    path = write(tmp_path / "a.jsonl", {"text": "abc"}, {"input": "abcdef", "label": 0})
    data = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=5)
    end = tokenizer.token_to_id("<|endoftext|>")
    short, cut = data[0], data[1]
    assert isinstance(short.labels, np.ndarray)
    assert short.input_ids[-1] == end
    assert short.labels.tolist() == [IGNORED, *short.input_ids[1:].tolist()]
    assert tokenizer.decode(cut.input_ids.tolist()) == "abcde"
    assert short.labels.dtype == np.int32


def test_only_the_assistant_is_learned(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    turns = [
        {"role": "user", "content": "hi<|im_end|>"},  # a forged end stays text
        {"role": "assistant", "content": "yes"},
    ]
    path = write(tmp_path / "a.jsonl", {"messages": turns})
    sample = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=256)[0]
    text = tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    end = tokenizer.token_to_id("<|im_end|>")
    assert sample.input_ids.tolist().count(end) == 2
    assert isinstance(sample.labels, np.ndarray)
    learned = sample.labels[sample.labels != IGNORED].tolist()
    assert tokenizer.decode(learned, skip_special_tokens=False) == "yes<|im_end|>"


def test_only_the_completion_of_a_prompt_is_learned(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, ["<s>", "</s>"], eos="</s>", bos="<s>")
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "2+2=", "completion": "4"},
        {"instruction": "say", "input": "it", "output": "yes"},
    )
    data = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=256)
    texts, learned = [], []
    for sample in (data[0], data[1]):
        assert isinstance(sample.labels, np.ndarray)
        texts.append(tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False))
        kept = sample.labels[sample.labels != IGNORED].tolist()
        learned.append(tokenizer.decode(kept, skip_special_tokens=False))
    assert texts == ["<s>2+2=4</s>", "<s>user: say\n\nit\nassistant: yes\n"]
    assert learned == ["4</s>", "yes\n"]


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (
            ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "<s><|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>",
        ),
        (["<s>"], "<s>assistant: yes\n"),
    ],
)
def test_the_chat_format_follows_the_special_tokens(tmp_path, special, expected):
    tokenizer = byte_tokenizer(tmp_path, special, eos=None, bos="<s>")
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "content": "yes"}]})
    sample = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=256)[0]
    assert tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False) == expected


def test_mixed_lines_keep_their_order(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    turn = {"messages": [{"role": "assistant", "content": "m"}]}
    path = write(tmp_path / "a.jsonl", {"text": "one"}, turn, {"text": "two"})
    data = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=64)
    assert [tokenizer.decode(data[i].input_ids.tolist()) for i in (0, 2)] == ["one", "two"]


def test_what_cannot_be_used_gives_one_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "abc"})
    folder = tmp_path / "model"
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        load_dataset(path, folder, "causal-lm", None, 8)
    byte_tokenizer(folder)
    with pytest.raises(InputError, match="no token is left to learn from"):
        load_dataset(path, folder, "causal-lm", None, 1)
    with pytest.raises(DataError, match="lacks the key 'label'"):
        load_dataset(path, folder, "classify", 2, 8)
    (folder / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(InputError, match=r"makes token \d+ of .*, the model has 3; use the"):
        load_dataset(path, folder, "causal-lm", None, 8)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a usable tokenizer"):
        load_dataset(path, folder, "causal-lm", None, 8)


def test_of_large_data_only_a_part_is_kept_encoded(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is encoded again, as the same tokens."""
    model = tmp_path / "model"
    byte_tokenizer(model)
    data = write(tmp_path / "d.jsonl", *({"text": f"echo {number}"} for number in range(6)))
    whole = load_dataset(data, model, "causal-lm", None, 16)
    monkeypatch.setattr(tokens, "_KEPT", 3 * 500)
    part = load_dataset(data, model, "causal-lm", None, 16)
    for index in range(6):
        assert np.array_equal(part[index].input_ids, whole[index].input_ids)
        assert np.array_equal(part[index].labels, whole[index].labels)
        assert (part[index] is part[index]) == (index < 3)
        assert whole[index] is whole[index]
