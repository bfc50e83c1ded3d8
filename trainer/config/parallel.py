"""How one model is spread over several processes: the strict section `parallel:` of a run config.

It affects only memory, speed and communication, not a run's result. Members therefore need not
agree on it, and a run may resume with other settings.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from trainer.config.section import Section
from trainer.system.errors import InputError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
GroupStrategy = Literal["ddp", "fsdp", "tensor"]
"""How the processes of one worker share its model."""
GROUP_STRATEGIES: tuple[GroupStrategy, ...] = get_args(GroupStrategy)


class PipelineConfig(Section):
    """Consecutive layers on different processes, which work on different micro-batches."""

    stages: Annotated[int, Field(gt=0)] = 1
    """Processes in a row; 1 is no pipeline."""
    schedule: Schedule = "1f1b"
    """Order of the forward and backward passes of micro-batches."""
    microbatches: Annotated[int, Field(gt=0)] | None = None
    """Parts of a step's batch; null: twice the stages."""

    @model_validator(mode="after")
    def _check_microbatches(self) -> Self:
        if self.stages == 1:
            return self
        least = self.stages if self.schedule == "1f1b" else 1
        if self.microbatch_count < least:
            raise ValueError(
                f"schedule {self.schedule} over {self.stages} stages needs {least} microbatches or"
                f" more, not {self.microbatch_count}"
            )
        if self.schedule == "interleaved" and self.microbatch_count % max(
            1, self.microbatch_count // self.stages
        ):
            raise ValueError(
                f"schedule interleaved over {self.stages} stages needs a multiple of {self.stages}"
                f" microbatches, not {self.microbatch_count}"
            )
        return self

    @property
    def microbatch_count(self) -> int:
        """Micro-batches of a step."""
        return self.microbatches or 2 * self.stages

    @property
    def stages_per_process(self) -> int:
        """Separate runs of layers on each process: two, for schedules that return to it."""
        return 2 if self.schedule in ("interleaved", "zbv") else 1

    def check_layers(self, num_layers: int) -> None:
        """Check that a model has a layer for each stage.

        Raises:
            InputError: it does not.
        """
        wanted = self.stages * self.stages_per_process
        if self.stages > 1 and num_layers < wanted:
            raise InputError(
                f"parallel.pipeline: schedule {self.schedule} over {self.stages} stages needs"
                f" {wanted} layers, the model has {num_layers}; set fewer stages"
                + (", or schedule 1f1b" if self.stages_per_process > 1 else "")
            )


class ParallelConfig(Section):
    """The strategies; data-parallel copies are the processes over `tensor` x `pipeline.stages`."""

    data: Literal["ddp", "fsdp"] = "ddp"
    """Copies of the model that share a step's samples: `ddp` whole ones, `fsdp` sharded ones.

    The layers of sharded ones are gathered as they are needed."""
    tensor: Annotated[int, Field(gt=0)] = 1
    """Processes that share each layer: attention heads, and columns of the MLP."""
    sequence: bool = False
    """The processes of `tensor` share the tokens of a row between the linears, too."""
    pipeline: PipelineConfig = PipelineConfig()
    timeout: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    """Seconds that a process waits for the others in a collective; then it ends, and names them.

    One that saves or loads keeps the others waiting."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence needs tensor 2 or more: its processes share the tokens")
        if self.tensor > 1 and self.pipeline.stages > 1:
            raise ValueError(
                f"tensor {self.tensor} with pipeline.stages {self.pipeline.stages} is not"
                " supported: set one of them to 1"
            )
        if self.data == "fsdp" and self.pipeline.stages > 1:
            raise ValueError(
                f"data fsdp with pipeline.stages {self.pipeline.stages} is not supported: set data"
                " ddp, or pipeline.stages 1"
            )
        return self

    @property
    def is_ddp_only(self) -> bool:
        """Whether every process holds the whole model: nothing but copies that share samples."""
        return self.data == "ddp" and self.tensor == 1 and self.pipeline.stages == 1

    def count_copies(self, world: int) -> int:
        """Return the number of data-parallel copies in a world of so many processes.

        Raises:
            InputError: the sizes do not multiply to the world size, or are not supported together.
        """
        model = self.tensor * self.pipeline.stages
        if world % model:
            raise InputError(
                f"parallel: tensor {self.tensor} x pipeline.stages {self.pipeline.stages} ="
                f" {model} does not divide the world of {world} processes; start a multiple of"
                f" {model}, or change them"
            )
        copies = world // model
        if self.tensor > 1 and copies > 1 and self.data == "ddp":
            raise InputError(
                f"parallel: tensor {self.tensor} in a world of {world} makes {copies} copies, which"
                " need data fsdp; set parallel.data=fsdp"
            )
        return copies
