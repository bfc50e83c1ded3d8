"""A folder of answers, see `distill.logits.shard_folder`; a shard's file is answers.parquet."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.distill.answers.answer import Answer
from trainer.distill.answers.description import AnswersDescription, find_answer_faults
from trainer.distill.logits.description import ShardPlan
from trainer.distill.logits.shard_folder import ShardFolder

ANSWERS_FILE = "answers.parquet"


class AnswersFolder(ShardFolder[AnswersDescription, Answer]):
    """Reads and writes one folder of answers; any number of processes may do so at once."""

    file = ANSWERS_FILE

    def _parse_description(self, text: bytes) -> AnswersDescription:
        return AnswersDescription.from_json(text)

    def _encode_shard(self, plan: ShardPlan, items: Sequence[Answer]) -> memoryview:
        from trainer.distill.answers.file import encode_answers

        return encode_answers(self.description.digest, plan, items)

    def _decode_shard(self, plan: ShardPlan, content: bytes) -> Sequence[Answer]:
        from trainer.distill.answers.file import decode_answers

        return decode_answers(self.description.digest, plan, content)

    def _find_faults(self, plan: ShardPlan, items: Sequence[Answer]) -> list[str]:
        return find_answer_faults(self.description, plan, items)
