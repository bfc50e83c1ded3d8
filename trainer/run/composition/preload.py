"""The modules that a parent of workers imports before forking; imports nothing itself."""

from __future__ import annotations

import contextlib

from trainer.run.distributed.environment import silence_torch


def load_worker(backend: str, strategy: str | None) -> None:
    """Import what a worker needs without opening a device; what is missing is reported at use."""
    with contextlib.suppress(ImportError, OSError):
        import trainer.data.tokens
        import trainer.exchange.transport.client
        import trainer.replica.backend
        import trainer.run.composition.roles
        import trainer.run.loop

        if backend == "wgpu":
            import trainer.replica.wgpu.autotune
            import trainer.replica.wgpu.replica
            import trainer.replica.wgpu.selftest
        else:
            import trainer.replica.torch.replica
        if strategy is not None:
            import trainer.replica.torch.parallel.replica
            import trainer.run.composition.group
            import trainer.run.distributed.group.replica  # noqa: F401 - forked workers have it loaded


def load_rank() -> None:
    """Import what a rank of `--distributed` needs, likewise."""
    silence_torch()
    with contextlib.suppress(ImportError, OSError):
        import trainer.run.composition.distributed
        import trainer.run.composition.roles
        import trainer.run.distributed.run  # noqa: F401 - forked ranks have it loaded
