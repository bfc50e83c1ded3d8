"""The settings of a run's data."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from trainer.config.section import Section
from trainer.config.training import Positive

LostText = Literal["refuse", "accept"]
TEMPLATE_DATE = "2024-07-26"
"""The day that Llama 3's chat templates write where there is no clock."""


def _read_day(value: Any) -> str:
    """Return a day as text; YAML reads one without quotes as a date."""
    if type(value) is date:
        return value.isoformat()
    try:
        return date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        raise ValueError("give a day, such as 2026-01-31") from None


Day = Annotated[str, BeforeValidator(_read_day)]


class DataConfig(Section):
    """Files of `trainer.data.formats`, folders of them, or data sets of the hub.

    The shapes of a record are in `trainer.data.shapes`.
    """

    SHORTHAND_KEY = "train"
    train: str = Field(min_length=1)
    """A file, folder or hub name with lines of a known shape; with `distillation` a folder of a
    teacher's logits."""
    validation: str | None = None
    """Held-out data of the same kind."""
    validation_fraction: float = Field(default=0.0, ge=0, le=0.5)
    """Fraction of the distinct samples of `data.train` that are held out for validation."""
    max_seq_len: Positive = 512
    """Tokens of a sample; longer ones are cut at the end, conversations from their oldest part on.

    The default is lowered to the model's positions; a value above them is refused."""
    lost_text: LostText = "refuse"
    """For a conversation of which the chat template leaves out text: `refuse` it, or use the
    rest."""
    date: Day = TEMPLATE_DATE
    """Today's date for a chat template that asks for it (`strftime_now`).

    The same on every machine and day, so that a resumed run has the same tokens."""
    columns: dict[str, str] = Field(default_factory=dict[str, str])
    """The names of a line's keys in the data: `{input: body, label: intent}`; no others are
    read."""

    @model_validator(mode="after")
    def _check_validation_source(self) -> Self:
        if self.validation is not None and self.validation_fraction:
            raise ValueError("a validation file is given, so validation_fraction must be 0")
        return self
