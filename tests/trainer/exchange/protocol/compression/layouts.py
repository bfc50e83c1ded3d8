"""Small layouts for the codecs' tests."""

from collections.abc import Sequence

from trainer.model.layout import Block, GradientLayout, TensorSlot


def one_block(*shapes: Sequence[int]) -> GradientLayout:
    """Return a layout of one block with tensors of these shapes."""
    slots: list[TensorSlot] = []
    start = 0
    for number, shape in enumerate(shapes):
        slots.append(TensorSlot(f"tensor{number}", tuple(shape), start))
        start = slots[-1].stop
    return GradientLayout((Block(0, "layers.0", 0, start, tuple(slots)),), num_layers=1)
