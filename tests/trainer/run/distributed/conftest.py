"""Models, as for replicas."""

from tests.trainer.replica.torch.parallel.conftest import drawn_model

__all__ = ["drawn_model"]
