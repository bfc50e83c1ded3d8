"""Text generation by ranks that share each layer, and each the keys and values of its own heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainer.config.run import RunConfig
from trainer.model.families import explain_transformers_only
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config
from trainer.replica.torch.generator import TorchGenerator
from trainer.replica.torch.linear import local_weight
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import trainable_parameters
from trainer.replica.torch.parallel import flat_vector
from trainer.replica.torch.parallel.tensor_parallel import TensorParallel
from trainer.system.errors import InputError


def load_parallel_generator(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    weights: np.ndarray | None,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    batch: int = 8,
) -> TorchGenerator:
    """Return this rank's part of a generator; every rank of the mesh calls this.

    Args:
        weights: fp32 `[layout.size]`; None: those of `model_dir`.
        mesh: one dimension.
        batch: the most samples that are continued together.

    Raises:
        InputError: the model cannot be loaded, or not be cut.
    """
    if reason := explain_transformers_only(read_config(model_dir), config.data.max_seq_len):
        raise InputError(
            f"{model_dir}: {reason}, which --parallel does not cut; generate without it"
        )
    tensor = TensorParallel(mesh, sequence=False)
    model: Any = load_model(model_dir, config, device, cut=tensor.cut_layer)
    vocabulary = len(model.lm_head.weight)
    tensor.cut_ends(model)
    if weights is not None:
        parameters = dict(trainable_parameters(model))
        flat_vector.scatter_tensors(
            layout, lambda slot: weights[slot.start : slot.stop], parameters
        )

    def head(hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, local_weight(model.lm_head.weight)).float()
        most = -(-vocabulary // mesh.size())  # the first ranks' part
        mine = F.pad(logits, (0, most - logits.shape[1]))
        every = [torch.empty_like(mine) for _ in range(mesh.size())]
        dist.all_gather(every, mine, group=mesh.get_group())
        return torch.cat(every, 1)[:, :vocabulary]

    return TorchGenerator(model, config, device, batch=batch, ranks=mesh.size(), head=head)
