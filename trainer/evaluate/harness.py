"""Tasks of EleutherAI's lm-evaluation-harness, on a model that transformers has loaded.

An extra: `pip install motley[lm-eval]`. Torch alone computes it, on CUDA or the CPU. The harness
refuses tasks that would run a model's code, since they are never confirmed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.checkpoint.trained_model import TrainedModel
from trainer.evaluate.base import Outcome
from trainer.replica.backend import Compute
from trainer.system.errors import InputError
from trainer.system.process.imports import speed_up_imports

_BATCH = 8


class Harness:
    """One task or group of the harness.

    Args:
        task: its name.
        folder: further tasks, in the harness's YAML.
        limit: samples of each task, None for all.

    Raises:
        InputError: the harness is not installed, or does not know the task.
    """

    def __init__(self, task: str, folder: Path | None, limit: int | None) -> None:
        self.name = f"lm-eval:{task}"
        if folder is not None and not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        self._task, self._limit = task, limit
        for defaults in (False, True):  # a user's own few first: reading all takes seconds
            self._tasks = _load_task_manager(folder, defaults)
            if task in self._tasks.all_tasks:
                return
        raise InputError(f"task {self.name}: lm-eval has no {task!r}; see `lm-eval ls tasks`")

    def run(self, trained: TrainedModel, compute: Compute) -> Outcome:
        """Return the harness's figures; those of a group's parts have the parts' names."""
        if trained.config.task != "causal-lm":
            raise InputError(f"{trained.path}: is a classifier, lm-eval takes language models")
        results: Any = _import_harness("lm_eval").simple_evaluate(
            model=_load_model(trained, compute),
            tasks=[self._task],
            task_manager=self._tasks,
            limit=self._limit,
            bootstrap_iters=0,
            log_samples=False,
        )
        found = dict(self._iter_figures(results["results"]))
        if not found:
            raise InputError(f"task {self.name}: lm-eval returned no metric")
        first = next(iter(found))
        directions = results["higher_is_better"].get(self._task, {})
        rising = directions.get(first.partition(",")[0])
        return Outcome(found, first, falling=rising is False)

    def _iter_figures(self, results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
        """Yield figures by their names, `acc` or, with a filter, `acc,filter`."""
        for task, metrics in sorted(results.items(), key=lambda item: item[0] != self._task):
            for key, value in metrics.items():
                metric, _, by = key.partition(",")
                if by and isinstance(value, int | float) and not metric.endswith("_stderr"):
                    name = metric if by == "none" else key
                    yield (name if task == self._task else f"{task}/{name}"), float(value)


@functools.cache
def _load_task_manager(folder: Path | None, defaults: bool) -> Any:
    tasks = _import_harness("lm_eval.tasks")
    return tasks.TaskManager(include_path=folder, include_defaults=defaults)


def _import_harness(module: str) -> Any:
    """Import a part of the harness, which takes seconds and is not part of Motley."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise InputError(
            "lm-eval is not installed, and its tasks need it: pip install 'motley[lm-eval]'"
        ) from None


def _load_model(trained: TrainedModel, compute: Compute) -> Any:
    """Return the harness's wrapper of the model on the first usable device."""
    with speed_up_imports("torch", "transformers"):
        import torch
        import transformers

        from trainer.replica.backend import UnusableError, find_cuda_device, first_usable
        from trainer.replica.torch.model import flatten_parameters
        from trainer.replica.torch.precision import compute_dtype
        from trainer.replica.torch.published_model import load_published

    if isinstance(compute.resident, int):
        raise InputError(
            f"--resident {compute.resident}: lm-eval computes with transformers' code, which keeps"
            " all layers; leave it out"
        )

    def load_to_device(name: str) -> Any:
        device = torch.device(name)
        if compute.threads is not None:
            torch.set_num_threads(compute.threads)
        config = compute.apply_storage(trained.config)
        model: Any = load_published(trained.base_dir, config, device)
        if not config.freezes_full(None):
            flatten_parameters(model, trained.layout, device, trained.weights)
        model.generation_config.eos_token_id = sorted(trained.open_encoder().stops)
        dtype = compute_dtype(trained.config, device)
        return _import_harness("lm_eval.models.huggingface").HFLM(
            pretrained=model.eval(),
            tokenizer=transformers.AutoTokenizer.from_pretrained(
                trained.tokenizer_dir, local_files_only=True, trust_remote_code=False
            ),
            batch_size=_BATCH,
            mixed_precision_dtype=None if dtype == torch.float32 else str(dtype)[6:],
        )

    def refuse_vulkan() -> Any:
        raise UnusableError("lm-eval needs torch")

    model, _, _ = first_usable(
        compute.backend,
        compute.gpu,
        {
            "cuda": lambda: load_to_device(find_cuda_device(compute.gpu)),
            "wgpu": refuse_vulkan,
            "cpu": lambda: load_to_device("cpu"),
        },
    )
    return model
