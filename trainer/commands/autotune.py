"""`trainer autotune`: find the fastest kernels of a GPU with Vulkan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.system.commandline.options import PATH

if TYPE_CHECKING:
    from trainer.planning.vulkan_buffers import Kind

_DEFAULT = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
"""Qwen3-0.6B."""


@click.command("autotune")
@click.option(
    "--gpu",
    default="",
    show_default=False,
    help="Index, UUID, PCI address or name; default: the first.",
)
@click.option(
    "--model", type=PATH, help="A model folder, for its sizes; default: those of Qwen3-0.6B."
)
@click.option(
    "--weights",
    type=click.Choice(["f32", "bf16", "nf4"]),
    default="nf4",
    help="Format of the frozen weights.",
)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=512, help="Tokens of the batch that is timed."
)
def autotune(gpu: str, model: Path | None, weights: Kind, tokens: int) -> None:
    """Time the matrix multiplication kernels on a GPU and store the fastest for later runs."""
    from trainer.model.architecture import parse_architecture, read_architecture
    from trainer.replica.wgpu.autotune import list_products, load_table, save_table, tune_device
    from trainer.replica.wgpu.gpu.device import Device
    from trainer.replica.wgpu.gpu.errors import DeviceError
    from trainer.replica.wgpu.gpu.vulkan_adapter import select_adapter
    from trainer.system.errors import InputError

    shape = read_architecture(model) if model else parse_architecture(_DEFAULT, "Qwen3-0.6B")
    try:
        device = Device(select_adapter(gpu, allow_software=True))
        load_table(device)  # keeps the results of other models
        click.echo(f"tuning {device.adapter}")
        for timings in tune_device(device, list_products(shape, weights, tokens)):
            best = timings[0]
            others = ", ".join(f"{each.variant.name} {each.gflops:.1f}" for each in timings[1:])
            click.echo(
                f"{best.product.key:<28} {best.gflops:8.1f} GF/s  {best.variant.name}  ({others})"
            )
        click.echo(f"stored in {save_table(device)}")
    except DeviceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"the table cannot be stored: {error.strerror}") from None
