"""The files of a tokenizer's folder, each used as transformers 5.23's `AutoTokenizer` uses it.

`tokenizer.json` decides how a text is split. The other files name the special tokens and add those
that it lacks, in the order in which transformers adds them, so that they get the same ids. One
difference remains: for a few classes (`GPT2Tokenizer`) transformers replaces the splitting of
`tokenizer.json` by the class's own, which is not done here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from trainer.model.formats import MORE_TEMPLATES, TEMPLATE_FILE, refuse_pointer
from trainer.model.safetensors_headers import read_object
from trainer.system.errors import InputError
from trainer.system.key_table import KeyTable, UnknownKeys
from trainer.system.regular_file import read_file

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
OLD_NAMES_FILE = "special_tokens_map.json"
OLD_ADDED_FILE = "added_tokens.json"

NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Every tokenizer may have these special tokens; a template gets them by name."""

_RESAVE = (
    "save the tokenizer again: python -P -c 'import transformers as t, sys;"
    " t.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' FOLDER"
)

FILES = KeyTable(
    "a tokenizer's folder",
    used=frozenset(
        (
            *(TOKENIZER_FILE, SETTINGS_FILE, OLD_NAMES_FILE, OLD_ADDED_FILE, TEMPLATE_FILE),
            *(MORE_TEMPLATES, "vocabulary.json"),
        )
    ),
    # What tokenizer.json was converted from.
    harmless=frozenset(
        (
            *("vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
            *("spiece.model", "sentencepiece.bpe.model", "original_tokenizer.model"),
            *("tokenizer.model", "tokenizer.model.v3"),
        )
    ),
)
_TOKENIZERS_FILE = re.compile(r"tok|vocab|merges|template|spiece|sentencepiece|tekken")
"""The names of a model folder's files that concern its tokenizer."""

SETTINGS = KeyTable(
    SETTINGS_FILE,
    used=frozenset(
        (
            *NAMES,
            *("chat_template", "added_tokens_decoder", "add_prefix_space"),
            *("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"),
        )
    ),
    harmless=frozenset(
        (
            # transformers does not use them where there is a tokenizer.json.
            *("add_bos_token", "add_eos_token", "tokenizer_class", "legacy", "from_slow"),
            *("use_fast", "sp_model_kwargs", "tokenizer_file", "vocab_file", "merges_file"),
            # The length, the side and the padding of a batch, and names of inputs: not of a text.
            *("model_max_length", "max_length", "padding_side", "truncation_side", "padding"),
            *("stride", "truncation", "truncation_strategy", "pad_to_multiple_of"),
            *("pad_token_type_id", "model_input_names", "return_token_type_ids"),
            # Decoding to text for people.
            *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors"),
            *("skip_special_tokens", "response_schema", "response_template"),
            # Where the files come from.
            *("backend", "is_local", "local_files_only", "name_or_path", "processor_class"),
            *("special_tokens_map_file", "transformers_version", "use_default_system_prompt"),
            *("device_map", "trust_remote_code", "unk_id", "files_loaded", "_commit_hash"),
            *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "do_lower_case"),
        )
    ),
    refused={
        "split_special_tokens": "makes markup ordinary text, which is not supported: remove it",
        "fast_tokenizer_files": f"replaces {TOKENIZER_FILE}, which is not supported: {_RESAVE}",
        "fix_mistral_regex": f"changes {TOKENIZER_FILE}, which is not supported: {_RESAVE}",
    },
)


class TokenizerFolder:
    """The settings beside a tokenizer.json.

    Raises:
        InputError: a file cannot be read, or a setting is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        settings = read_object(path / SETTINGS_FILE, optional=True)
        present = [key for key, value in settings.items() if value not in (None, False, "", [], {})]
        if refusal := SETTINGS.explain_refusal(present):
            raise InputError(f"{path / SETTINGS_FILE}: {refusal}")
        self._present = [key for key in present if not key.endswith("_token")]
        self._legacy = "added_tokens_decoder" not in settings
        if self._legacy:
            settings |= read_object(path / OLD_NAMES_FILE, optional=True)
        self.settings = settings
        """tokenizer_config.json, with the names of an older special_tokens_map.json."""
        named = {key: value for key, value in settings.items() if key.endswith("_token")}
        for more in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(settings.get(more), dict):
                named |= settings[more]
        self._named = {key: token for key, value in named.items() if (token := _parse_token(value))}

    @property
    def names(self) -> dict[str, str]:
        """The special tokens by their names, such as `eos_token`."""
        return {key: token.content for key, token in self._named.items()}

    def list_unused(self) -> list[str]:
        """Return a line for the unknown files, and one for the unknown settings."""
        files = sorted(file.name for file in self.path.iterdir())
        lines: list[str] = []
        for table, keys in (
            (FILES, [name for name in files if _TOKENIZERS_FILE.search(name)]),
            (SETTINGS, self._present),
        ):
            counts = UnknownKeys(table)
            counts.add(keys)
            if line := counts.report():
                lines.append(f"{self.path}: {line}")
        return lines

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer with all tokens of the folder, without truncation and padding.

        Raises:
            InputError: tokenizer.json is missing or damaged, or another file contradicts it.
        """
        path = self.path / TOKENIZER_FILE
        if not path.is_file():
            raise InputError(f"{path}: no such file; {self._suggest_remedy()}")
        refuse_pointer(path)
        try:
            tokenizer: Tokenizer = Tokenizer.from_buffer(read_file(path))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path}: not a usable tokenizer: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _keep_white_space(tokenizer)
        self._check_prefix_space(tokenizer)
        self._add_tokens(tokenizer)
        return tokenizer

    def _suggest_remedy(self) -> str:
        """Return what to do without a tokenizer.json."""
        older = [name for name in sorted(FILES.harmless) if (self.path / name).is_file()]
        if not older:
            return "a model folder needs a fast tokenizer"
        resave = _RESAVE.replace("FOLDER", shlex.quote(str(self.path)))
        return f"{' and '.join(older)} are an older form of it, {resave}"

    def _check_prefix_space(self, tokenizer: Tokenizer) -> None:
        """Check the one setting that some classes of transformers take from either file."""
        configured = self.settings.get("add_prefix_space")
        split = tokenizer.pre_tokenizer
        state = split.__getstate__() if split else b""
        done = re.search(rb'"add_prefix_space":(true|false)', state)
        if isinstance(configured, bool) and done and (done[1] == b"true") != configured:
            raise InputError(
                f"{self.path / SETTINGS_FILE}: 'add_prefix_space' is {str(configured).lower()}, but"
                f" {done[1].decode()} in {TOKENIZER_FILE}; set both to what the model was trained"
                " with"
            )

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """Add the tokens that tokenizer.json lacks.

        Raises:
            InputError: a file numbers a token otherwise than the tokenizer does.
        """
        named, extra = self._named, self._extra_tokens()
        special = {token.content for token in (*named.values(), *extra)}
        numbered: dict[int, AddedToken] = {}
        source = OLD_ADDED_FILE if self._legacy else SETTINGS_FILE
        if self._legacy:
            for content, number in read_object(self.path / OLD_ADDED_FILE, optional=True).items():
                kind = content in special
                numbered[number] = AddedToken(content, special=kind, normalized=not kind)
        else:
            for number, value in self.settings["added_tokens_decoder"].items():
                if token := _parse_token(value, special=False):
                    numbered[int(number)] = token
        there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        # One at a time: the library takes the special ones of a list apart from the others.
        for number, token in sorted(numbered.items()):
            if token.content not in there:
                tokenizer.add_tokens([token])
            found = tokenizer.token_to_id(token.content)
            if found != number:
                raise InputError(
                    f"{self.path / source}: token {token.content!r} is number {number}, but"
                    f" {found} in {TOKENIZER_FILE}; {_RESAVE}"
                )
            there.add(token.content)
        for token in (*named.values(), *extra):
            if token.content not in there:
                tokenizer.add_tokens([token])
                there.add(token.content)

    def _extra_tokens(self) -> list[AddedToken]:
        """Return the special tokens that have no name."""
        extra = self.settings.get("extra_special_tokens")
        if not extra:
            extra = self.settings.get("additional_special_tokens")
        listed = extra if isinstance(extra, list) else []
        return [token for value in listed if (token := _parse_token(value))]


def load_tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """Return the tokenizer of a folder; see `TokenizerFolder.tokenizer`."""
    return TokenizerFolder(tokenizer_dir).open_tokenizer()


def special_token(tokenizer_dir: Path, tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of a special token by its name, None without one."""
    token = TokenizerFolder(tokenizer_dir).names.get(name)
    return None if token is None else tokenizer.token_to_id(token)


def _parse_token(value: Any, *, special: bool = True) -> AddedToken | None:
    """Return a token from its text, or from an object with its properties."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{"special": special, **{key: value[key] for key in known if key in value}})


def _keep_white_space(tokenizer: Tokenizer) -> None:
    """Let each token have the place of all its characters in a text.

    Some post-processors cut white space off the places, and what is learned is found by places.
    """
    processor = tokenizer.post_processor
    if processor is None:
        return
    state: bytes = processor.__getstate__()
    whole = state.replace(b'"trim_offsets":true', b'"trim_offsets":false')
    if whole != state:
        processor.__setstate__(whole)
        tokenizer.post_processor = processor
