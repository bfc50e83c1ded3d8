"""The engine openvino: transformers' model, exported, with int8 weights, on the CPU.

The weights of products are int8 with a scale for each output, the rest is computed in the dtype of
the forward. torch.export gives the graph once, with lengths that vary. OpenVINO's own converter
would do more, and reports its use to the package's makers: it is never imported.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.config.teacher_engines import TEACHER_ENGINES, check_teacher_backend
from trainer.distill.teacher.published_model import load_published
from trainer.distill.teacher.torch_engine import pad_windows, rows_at_once
from trainer.model.families import text_config
from trainer.model.safetensors_headers import (
    TensorHeader,
    read_config,
    read_headers,
    stored_dtype,
)
from trainer.planning.model_config import EXPERTS
from trainer.planning.teachers import int8_opening_bytes
from trainer.replica.backend import Compute
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError, is_out_of_memory

log = logging.getLogger(__name__)


class OpenVinoEngine:
    """A causal language model of transformers, computed by OpenVINO on the CPU.

    Args:
        dtype: of the forward; products in bfloat16 only on a CPU that has them.
        threads: None: as many as OpenVINO takes.

    Raises:
        InputError: the package is missing, or the model cannot be loaded or exported.
    """

    def __init__(self, model_dir: Path, dtype: str, threads: int | None = None) -> None:
        openvino = import_openvino(model_dir)
        self.device, self.place = torch.device("cpu"), "cpu"
        # As stored: such weights are mapped from the file, and take no memory of their own.
        stored = _as_loaded(read_headers(model_dir))
        parts = load_published(model_dir, stored, self.device)
        self.vocab_size = parts.vocab_size
        self._core = openvino.Core()
        self._settings: dict[str, Any] = {
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # other processes compute here too
            "INFERENCE_PRECISION_HINT": self._inference_precision(dtype),
        }
        if threads is not None:
            self._settings["INFERENCE_NUM_THREADS"] = threads
        ids = torch.zeros((2, 8), dtype=torch.int64)
        backbone = _Part(parts.model, parts.backbone, stored)
        with torch.no_grad():
            hidden = backbone(ids)[0]
        auto = torch.export.Dim.AUTO
        try:
            self._backbone = self._compile_part(backbone, ids, {0: auto, 1: auto})
            head = _Part(parts.model, parts.head, stored)
            self._head = self._compile_part(head, hidden, {0: auto})
        # torch.export and OpenVINO raise errors of many types for what they cannot express.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"--engine openvino: {model_dir} cannot be exported: {_first_reason(error)}; use"
                " --engine torch"
            ) from None
        del parts, backbone, head
        gc.collect()  # exported programs are cycles that hold the weights

    def iterate_logits(self, batch: Sequence[NDArray[np.int32]]) -> Iterator[Tensor]:
        """See `Engine`."""
        ids, rows, places = pad_windows(batch)
        hidden = _run_request(self._backbone, ids)[rows, places]
        for part in hidden.split(rows_at_once(self.vocab_size, self.device)):
            yield _run_request(self._head, part)

    def _inference_precision(self, dtype: str) -> str:
        able = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return "bf16" if dtype == "bfloat16" and "BF16" in able else "f32"

    def _compile_part(self, part: nn.Module, example: Tensor, dynamic: dict[int, Any]) -> Any:
        """Return a request that computes a part with int8 weights."""
        from openvino.frontend import (  # pyright: ignore[reportMissingImports] - of an extra
            FrontEndManager,
        )
        from openvino.frontend.pytorch.fx_decoder import (  # pyright: ignore[reportMissingImports] - as above
            TorchFXPythonDecoder,
        )
        from openvino.frontend.pytorch.torchdynamo.export_decompositions import (  # pyright: ignore[reportMissingImports] - as above
            ops_to_not_decompose,
        )
        from torch.export.decomp_utils import CustomDecompTable

        # As `TorchFXPythonDecoder.from_exported_program`, which logs a traceback for each operator
        # that this torch has no decomposition of.
        table = CustomDecompTable()
        for operator in ops_to_not_decompose():
            if operator in table:
                table.pop(operator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own copies
            exported = torch.export.export(
                part, (example,), dynamic_shapes=(dynamic,), strict=False
            ).run_decompositions(table)
            decoder = TorchFXPythonDecoder(exported.module(), dynamic_shapes=True)
        frontend = FrontEndManager().load_by_framework("pytorch")
        graph = frontend.convert(frontend.load(decoder))
        quantise_weights(graph)
        hold_constants(graph)
        return self._core.compile_model(graph, "CPU", self._settings).create_infer_request()


class _Part(nn.Module):
    """One of `ModelParts` as a module, as torch.export takes it: fp32 in and out.

    NumPy has no bf16, and OpenVINO's arrays of it read as another type.
    """

    def __init__(
        self, model: nn.Module, function: Callable[[Tensor], Tensor], stored: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self._function, self._stored = model, function, stored

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x.to(self._stored) if x.is_floating_point() else x).float()


def _as_loaded(headers: dict[str, TensorHeader]) -> torch.dtype:
    return torch.bfloat16 if stored_dtype(headers) == "BF16" else torch.float32


def needed_memory(headers: dict[str, TensorHeader]) -> int:
    """Return the most main memory that opening takes, in bytes: see `int8_opening_bytes`."""
    stored = {torch.bfloat16: "BF16", torch.float32: "F32"}[_as_loaded(headers)]
    sizes = [math.prod(header.shape) for header in headers.values()]
    loaded = sum(
        math.prod(header.shape) * (2 if stored == "BF16" else 4)
        for header in headers.values()
        if header.dtype != stored
    )
    return int8_opening_bytes(sum(sizes), max(sizes), loaded)


def quantise_weights(graph: Any) -> int:
    """Replace the weights of a graph's products by int8 with a scale for each output.

    Returns how many were replaced.
    """
    from openvino import (  # pyright: ignore[reportMissingImports] - of an extra
        opset13 as ops,
    )

    count = 0
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        weight = node.input_value(1).get_node()
        if weight.get_type_name() != "Constant" or len(weight.shape) != 2:
            continue
        sides = node.get_attributes()
        values = weight.get_data(dtype=np.float32)
        inner = 1 if sides["transpose_b"] else 0
        largest = np.maximum(
            values.max(axis=inner, keepdims=True), -values.min(axis=inner, keepdims=True)
        )
        scales = np.where(largest == 0, np.float32(1), largest / np.float32(127))
        values = values / scales
        whole = ops.constant(np.rint(values, out=values).astype(np.int8))
        scaled = ops.multiply(ops.convert(whole, "f32"), ops.constant(scales))
        # The graph's types are those of the file. OpenVINO computes in its own, and drops these.
        x = ops.convert(node.input_value(0), "f32")
        product = ops.matmul(x, scaled, sides["transpose_a"], sides["transpose_b"])
        stored = ops.convert(product, node.get_output_element_type(0))
        node.output(0).replace(stored.output(0))
        count += 1
    return count


def hold_constants(graph: Any) -> None:
    """Copy a graph's bf16 constants: the frontend's point at torch's memory, and do not hold it.

    Where a processor computes in bf16, OpenVINO reads them there, after the model is gone.
    """
    from openvino import (  # pyright: ignore[reportMissingImports] - of an extra
        Tensor as Array,
    )
    from openvino import (  # pyright: ignore[reportMissingImports] - as above
        Type,
        op,
    )

    for node in graph.get_ordered_ops():
        if node.get_type_name() == "Constant" and node.get_element_type() == Type.bf16:
            bits = node.data.copy()  # as fp16, which NumPy has
            held = op.Constant(Array(bits, list(node.shape), Type.bf16), shared_memory=False)
            node.output(0).replace(held.output(0))


def _run_request(request: Any, x: Tensor) -> Tensor:
    try:
        request.infer({0: x.contiguous().numpy()})
    except RuntimeError as error:
        if is_out_of_memory(error) or "bad_alloc" in str(error):
            raise MemoryError from None
        raise
    return torch.from_numpy(request.get_output_tensor(0).data)


def _first_reason(error: Exception) -> str:
    """Return an error's first line that is more than OpenVINO's place in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("Exception from ")]
    return next(iter(kept or lines), type(error).__name__)[:300]


def import_openvino(model_dir: Path) -> Any:
    """Return the package, without its converter.

    Raises:
        InputError: it is missing.
    """
    # An import of it fails then, as documented, and `openvino` goes on without.
    sys.modules.setdefault("openvino.tools.ovc", None)  # pyright: ignore[reportArgumentType]
    try:
        import openvino  # pyright: ignore[reportMissingImports] - of an extra
    except ImportError:
        raise InputError(
            f"{model_dir}: --engine openvino needs a package that is missing: pip install"
            " 'motley[openvino]'"
        ) from None
    return openvino


def open_openvino(model_dir: Path, dtype: str, compute: Compute) -> OpenVinoEngine:
    """Load a teacher on the CPU.

    Raises:
        InputError: see `OpenVinoEngine`; or a GPU is asked for, or the model has experts or
            recurrent layers, or does not fit.
    """
    check_teacher_backend("openvino", compute.backend, compute.gpu)
    config = text_config(read_config(model_dir))
    # Experts are chosen by an operator that OpenVINO lacks, or copied for each token. The loop of
    # recurrent layers over pieces of a window depends on its length: of two small layers no export
    # ended within a minute of processor time.
    reason = TEACHER_ENGINES["openvino"].explain_refusal(
        experts=any((config.get(key) or 1) > 1 for key in EXPERTS),
        recurrent="linear_attention" in (config.get("layer_types") or ()),
    )
    if reason is not None:
        raise InputError(f"{model_dir}: --engine openvino {reason}; use --engine torch")
    headers = read_headers(model_dir)
    need, free = needed_memory(headers), free_memory(psutil.virtual_memory().available)
    if need > free:
        kind = str(_as_loaded(headers)).removeprefix("torch.")
        raise InputError(
            f"--engine openvino: {model_dir} needs {need / 1e9:.1f} GB of main memory to open, and"
            f" {free / 1e9:.1f} GB are free; --engine torch --dtype {kind} reads the weights from"
            " their file and fits"
        )
    log.info("the teacher is on cpu, by OpenVINO with int8 weights")
    return OpenVinoEngine(model_dir, dtype, compute.threads)
