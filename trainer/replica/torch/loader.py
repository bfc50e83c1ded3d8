"""Load a model directory as a model that trains."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.config.lora import LINEARS
from trainer.config.run import Quantization, RunConfig
from trainer.model.architecture import Architecture, linear_path, read_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.initialization import read_tensor
from trainer.model.layout import check_stored, stored_name
from trainer.model.safetensors_headers import TensorHeader, read_config, read_headers
from trainer.planning.resident_layers import HEAD_STREAMED, streamed_layers
from trainer.replica.torch.decoder import TABLE, Decoder, Finish, Layer
from trainer.replica.torch.linear import Linear, nf4_linear
from trainer.replica.torch.model import (
    keep_nf4_order,
    prepare_for_training,
    report_load_errors,
    train_whole,
)
from trainer.replica.torch.precision import compute_dtype
from trainer.replica.torch.residence import reads_rows
from trainer.replica.torch.streaming import LayerStream, StreamedEmbedding, StreamedHead
from trainer.replica.weights.nf4_file import open_quantized
from trainer.system.process.imports import speed_up_imports


def load_model(
    model_dir: Path,
    config: RunConfig,
    device: torch.device,
    layers: range | None = None,
    cut: Finish | None = None,
    resident: int | None = None,
) -> nn.Module:
    """Return the model in train mode on `device`, with the method's trainable parameters.

    It has no dropout: gradients must not depend on the worker. The frozen base has
    `config.model.dtype` or NF4; trainable weights are fp32.

    Args:
        layers: of a stage of a pipeline, whose other weights are not read; None for all.
        cut: takes each layer, ready to train, before the next one is read: what it leaves is all
            that is kept of the file.
        resident: layers whose linears stay in memory; the others are read at each use, and nothing
            of a full model trains. None: all. `HEAD_STREAMED`: none, and the head is read, too.

    Raises:
        InputError: the weights cannot be loaded.
    """
    tree = read_config(model_dir)
    if explain_transformers_only(tree, config.data.max_seq_len):
        assert (layers, cut) == (None, None), "only our decoder is divided"
        with speed_up_imports("transformers"):
            from trainer.replica.torch.published_model import load_published
        return load_published(model_dir, config, device, resident)
    architecture = read_architecture(model_dir)
    dtype = base_dtype(config)
    nf4 = compute_dtype(config, device) if config.model.quantization == "nf4" else None

    streamed = streamed_layers(architecture.num_layers, resident)
    from_file = nf4 is not None and (bool(streamed) or config.method == "full")
    adapted = config.lora.select_layers(architecture.num_layers)

    def freeze_layer(number: int, layer: Layer) -> None:
        prepare_for_training(layer, model_dir, config, device, None if number in adapted else ())
        if cut is not None:
            cut(number, layer)

    with report_load_errors(model_dir, device, nf4=nf4 is not None):
        stored = StoredWeights(
            model_dir,
            dtype,
            device,
            nf4,
            mapped=cut is None,
            streamed=streamed,
            codes=_quantise_once(model_dir, architecture, dtype) if from_file else None,
            reads_rows=reads_rows(config, resident, tied=architecture.tied),
        )
        where = str(model_dir / "config.json")
        head = stored.open_head(architecture, resident)
        model = Decoder(
            architecture, tree, where, stored, config.num_classes, layers, freeze_layer, head
        )
    headers = read_headers(model_dir)
    # A run writes its weights later, but a full model that is only used keeps what is read here.
    if hasattr(model, "score") and (trained := stored_name(headers, "score.weight")) is not None:
        with torch.no_grad():
            model.score.weight.copy_(torch.from_numpy(read_tensor(headers[trained])))
    for name, part in (*model.model.named_children(), *model.named_children()):
        if name not in ("layers", "model"):
            part.requires_grad_(config.method == "full" or name == "score")
    if config.method == "lora":
        train_whole(model, config.lora.modules_to_save)
    elif config.freezes_full(resident):
        model.requires_grad_(False)
    return model


def _quantise_once(
    model_dir: Path, architecture: Architecture, dtype: torch.dtype
) -> AbstractContextManager[dict[str, TensorHeader]]:
    """Return the one file of a model's NF4 codes, which the wgpu engine reads, too."""
    headers = read_headers(model_dir)
    names = [
        f"model.layers.{layer}.{linear_path(linear)}.weight"
        for layer in range(architecture.num_layers)
        for linear in LINEARS
    ]
    stored = {name: headers[stored_name(headers, name) or name] for name in names}
    return open_quantized(model_dir, stored, through_bf16=dtype == torch.bfloat16)


def base_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of stored weights, and so of what passes between layers."""
    return torch.float32 if config.method == "full" else getattr(torch, config.model.dtype)


def load_frozen(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    resident: int | None = None,
    quantization: Quantization = "none",
) -> Decoder:
    """Return a language model for inference, unless it is `explain_transformers_only`.

    Args:
        dtype: of the weights that are not quantised, and of all products.
        resident: as of `load_model`.

    Raises:
        InputError: the weights are incomplete or cannot be loaded.
    """
    tree, architecture = read_config(model_dir), read_architecture(model_dir)
    check_stored(model_dir, architecture, read_headers(model_dir))
    nf4 = dtype if quantization == "nf4" else None
    with report_load_errors(model_dir, device, nf4=nf4 is not None):
        stored = StoredWeights(
            model_dir,
            dtype,
            device,
            nf4,
            codes=_quantise_once(model_dir, architecture, dtype) if nf4 else None,
            streamed=streamed_layers(architecture.num_layers, resident),
            reads_rows=not architecture.tied or resident == HEAD_STREAMED,
        )
        where, head = str(model_dir / "config.json"), stored.open_head(architecture, resident)
        model = Decoder(architecture, tree, where, stored, None, head=head)
    if nf4 is not None:
        keep_nf4_order(model, model_dir, device)
    return model.requires_grad_(False).eval()


class StoredWeights:
    """A model directory's weights as `decoder.Stored`.

    Args:
        nf4: the dtype of products whose weights are quantised to NF4; None quantises nothing.
        mapped: from the file on the CPU if their dtype fits, so that processes share them.
        streamed: the layers whose linears are read at each use. If there are any, nothing is
            mapped: a file that is cut must not fault.
        codes: opens all linears in NF4, so that none is quantised here.
        reads_rows: of the embedding, too, no more is in memory than the rows of a pass.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        nf4: torch.dtype | None = None,
        *,
        mapped: bool = True,
        streamed: frozenset[int] = frozenset(),
        codes: AbstractContextManager[dict[str, TensorHeader]] | None = None,
        reads_rows: bool = False,
    ) -> None:
        self._stream, self._streamed = LayerStream(dtype, device, nf4, codes), streamed
        self._headers = read_headers(model_dir)
        self._dtype, self._device, self._nf4 = dtype, device, nf4
        self._mapped, self._reads_rows = mapped and not streamed, reads_rows and bool(streamed)
        self._files: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; the layout has checked its presence and shape."""
        return self._read_tensor(name, mapped=self._mapped)

    def embedding(self, name: str) -> nn.Module:
        """Return what looks up rows of a tensor."""
        if self._reads_rows:
            stored = self._stored_name(name)
            return StreamedEmbedding(self._headers[stored], stored, self._dtype)
        # No padding index: if texts contain a model's padding token, it is trained too.
        return nn.Embedding.from_pretrained(self.tensor(name), freeze=False)

    def open_head(self, architecture: Architecture, resident: int | None) -> StreamedHead | None:
        """Return the head of a language model that is read at each use; None if it stays."""
        if resident != HEAD_STREAMED:
            return None
        stored = self._stored_name(TABLE if architecture.tied else "lm_head.weight")
        return StreamedHead(self._headers[stored], stored, self._dtype, self._device)

    def linear(self, name: str, *, biased: bool) -> nn.Module:
        """Return the product with `name.weight`."""
        if (layer := self._streamed_layer(name)) is not None:
            header = self._headers[self._stored_name(f"{name}.weight")]
            bias = self.tensor(f"{name}.bias") if biased else None
            return self._stream.linear(layer, header, f"{name}.weight", bias)
        bias = self.tensor(f"{name}.bias") if biased else None
        if f"{name}.weight" in self._stream.codes:
            shape = self._headers[self._stored_name(f"{name}.weight")].shape
            return self._stream.resident_linear(f"{name}.weight", shape, bias)
        weight = self._read_tensor(f"{name}.weight", mapped=self._mapped and self._nf4 is None)
        return Linear(weight, bias) if self._nf4 is None else nf4_linear(weight, bias, self._nf4)

    def _read_tensor(self, name: str, *, mapped: bool) -> Tensor:
        stored = self._stored_name(name)
        path = self._headers[stored].file
        if mapped:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt")
            kept = self._files[path].get_tensor(stored)  # nothing is read yet
            if kept.dtype == self._dtype or self._device.type != "cpu":
                return kept.to(self._device, self._dtype)
        # A mapping of its own: pages that were read stay as long as theirs does, and one tensor
        # that fits, such as a norm's, would keep those of all that are converted.
        file: Any = safe_open(path, framework="pt")
        return file.get_tensor(stored).to(self._device, self._dtype, copy=True)

    def _streamed_layer(self, name: str) -> int | None:
        """Return the layer of `model.layers.N.NAME` if its linears are read at each use."""
        part = name.split(".")[2] if name.startswith("model.layers.") else ""
        return int(part) if part.isdecimal() and int(part) in self._streamed else None

    def _stored_name(self, name: str) -> str:
        stored = stored_name(self._headers, name)
        assert stored is not None, f"{name}: the layout would have refused this"
        return stored
