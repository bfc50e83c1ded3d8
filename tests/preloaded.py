"""What the fork server of `tests.forked` imports, and no other process."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import weakref
from pathlib import Path

_LEFT_TO_THE_FORKED = ("wgpu", "published", "generator", "harness", "__main__")
"""Parts of names of modules that few import, open a device, or cost seconds."""
_IMPORTED_LATER = (
    "pandas",  # by pyarrow, with the first table
    "pytest",  # by the modules of tests whose functions run on ranks
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.record_writer",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "wgpu.backends.wgpu_native",
)
"""What most import only when they need it, for half a second."""

gc.disable()  # a search through all that imports make is a quarter of their time

# Libraries start threads as they are imported, and a fork has but one.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check opens the driver

for _package in map(importlib.import_module, ("trainer", "launcher")):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        if not any(part in _module.name for part in _LEFT_TO_THE_FORKED):
            importlib.import_module(_module.name)
for _name in _IMPORTED_LATER:
    importlib.import_module(_name)

import torch  # noqa: E402  # the trainer's modules decide how it is imported first

from trainer.replica.torch.linear import import_bitsandbytes  # noqa: E402  # as torch

if not torch.cuda.device_count():  # it opens every GPU, after which a fork cannot
    import_bitsandbytes()
torch.set_num_threads(1)
_threads = len(list(Path("/proc/self/task").iterdir()))
assert _threads == 1, f"{_threads} threads run after the imports"
for _finalizer in weakref.finalize._registry:  # pyright: ignore
    _finalizer.atexit = False  # torch's, of each operator that it has defined: only memory
gc.collect()
gc.freeze()  # a collection in a child would write to, and so copy, every page
gc.enable()
