"""llama.cpp's C interface, in the library of the package xllamacpp.

The package's own classes reach llama.cpp's server alone, which gives no logits of a prompt. The
structures here are passed by value and change between versions, so only that version of the
package is taken whose llama.h (in llama.cpp: include/llama.h) they copy.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.system.errors import InputError

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR = 4
"""Level of llama.cpp's log."""
_F32 = 0
"""Type of ggml."""
_NO_MEMORY = -2
"""Result of llama_decode if a buffer could not be allocated."""


class _ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


class _ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int),
        ("rope_scaling_type", ctypes.c_int),
        ("pooling_type", ctypes.c_int),
        ("attention_type", ctypes.c_int),
        ("flash_attn_type", ctypes.c_int),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("unknown", ctypes.c_uint64),  # zero by default, and left so
        ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool),
        ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool),
        ("kv_unified", ctypes.c_bool),
        ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", ctypes.c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    )


class LlamaCpp:
    """The library, with what it last reported as an error."""

    def __init__(self, path: Path) -> None:
        self.errors: list[str] = []
        self._library = library = ctypes.CDLL(str(path))
        for name, returned, arguments in (
            ("llama_backend_init", None, ()),
            ("llama_log_set", None, (_LOG, ctypes.c_void_p)),
            ("llama_model_default_params", _ModelParams, ()),
            ("llama_context_default_params", _ContextParams, ()),
            ("llama_load_mode_from_str", ctypes.c_int, (ctypes.c_char_p,)),
            (
                "llama_model_load_from_file",
                ctypes.c_void_p,
                (ctypes.c_char_p, _ModelParams),
            ),
            ("llama_model_free", None, (ctypes.c_void_p,)),
            ("llama_model_get_vocab", ctypes.c_void_p, (ctypes.c_void_p,)),
            ("llama_vocab_n_tokens", ctypes.c_int32, (ctypes.c_void_p,)),
            ("llama_init_from_model", ctypes.c_void_p, (ctypes.c_void_p, _ContextParams)),
            ("llama_free", None, (ctypes.c_void_p,)),
            ("llama_get_memory", ctypes.c_void_p, (ctypes.c_void_p,)),
            ("llama_memory_clear", None, (ctypes.c_void_p, ctypes.c_bool)),
            ("llama_decode", ctypes.c_int32, (ctypes.c_void_p, _Batch)),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), (ctypes.c_void_p,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = returned, arguments
        self._log = _LOG(self._on_log)  # the library keeps no reference of its own
        library.llama_log_set(self._log, None)
        library.llama_backend_init()

    def _on_log(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            self.errors.append(text.decode(errors="replace").strip())

    def open_model(self, file: Path) -> int:
        """Map a GGUF file; 0 if that fails, see `errors`."""
        self.errors.clear()
        params = self._library.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = self._library.llama_load_mode_from_str(b"mmap")
        # Else weights of some types are copied, laid out for the processor.
        params.use_extra_bufts = False
        return self._library.llama_model_load_from_file(bytes(file), params) or 0

    def close_model(self, model: int) -> None:
        """Unmap a model, which has no open context."""
        self._library.llama_model_free(model)

    def vocab_size(self, model: int) -> int:
        """Return a model's tokens, padding included."""
        return self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(model))

    def open_context(self, model: int, *, cells: int, rows: int, windows: int, threads: int) -> int:
        """Return memory for keys and values and for one forward.

        Args:
            cells: tokens with keys and values.
            rows: tokens of one forward.
            windows: sequences that may be there at once.

        Raises:
            MemoryError: it does not fit.
        """
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = cells, windows, True
        params.n_batch = params.n_ubatch = params.n_outputs_max = rows
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = _F32
        params.flash_attn_type = 0
        context = self._library.llama_init_from_model(model, params)
        if not context:
            raise MemoryError
        return context

    def close_context(self, context: int) -> None:
        """Free a context."""
        self._library.llama_free(context)

    def clear_cache(self, context: int) -> None:
        """Empty a context's keys and values."""
        self._library.llama_memory_clear(self._library.llama_get_memory(context), False)

    def compute_logits(
        self,
        context: int,
        tokens: NDArray[np.int32],
        places: NDArray[np.int32],
        windows: NDArray[np.int32],
        vocab_size: int,
    ) -> NDArray[np.float32]:
        """Return the logits of tokens, `[n, vocab_size]`, valid until the next call.

        Args:
            places: of each token in its window.
            windows: number of each token's window.

        Raises:
            MemoryError: it does not fit.
            InputError: llama.cpp failed; says what it reported.
        """
        self.errors.clear()
        count = len(tokens)
        token, place, window = (
            np.ascontiguousarray(part, np.int32) for part in (tokens, places, windows)
        )
        ones, wanted = np.ones(count, np.int32), np.ones(count, np.int8)
        pointers = window.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        batch = _Batch(
            count,
            token.ctypes.data,
            None,
            place.ctypes.data,
            ones.ctypes.data,
            pointers.ctypes.data,
            wanted.ctypes.data,
        )
        result = self._library.llama_decode(context, batch)
        if result == _NO_MEMORY:
            raise MemoryError
        if result != 0:
            raise InputError(
                f"llama.cpp cannot compute this model ({result}): {last_error(self.errors)}; use"
                " --engine torch"
            )
        return np.ctypeslib.as_array(self._library.llama_get_logits(context), (count, vocab_size))


def last_error(errors: Sequence[str]) -> str:
    """Return the last thing that llama.cpp reported."""
    return errors[-1] if errors else "no reason is given"


@lru_cache(maxsize=1)
def _load_library(path: Path) -> LlamaCpp:
    return LlamaCpp(path)


def load_llama_cpp(where: str) -> LlamaCpp:
    """Return the library, loaded once a process.

    Args:
        where: what messages begin with.

    Raises:
        InputError: it is missing, of another version, or cannot be loaded.
    """
    spec: Any = importlib.util.find_spec(PACKAGE)  # its own import would load twice as much
    if spec is None:
        raise InputError(
            f"{where} needs a package that is missing: pip install 'motley[gguf-engine]'"
        )
    found = importlib.metadata.version(PACKAGE)
    if found != VERSION:
        raise InputError(
            f"{where} needs {PACKAGE} {VERSION}, {found} is installed: pip install"
            " 'motley[gguf-engine]'"
        )
    (folder,) = spec.submodule_search_locations
    try:
        return _load_library(next(Path(folder).glob(f"{PACKAGE}.*.so")))
    except (OSError, StopIteration, AttributeError) as error:
        raise InputError(f"{where} cannot load {folder}: {error}") from None
