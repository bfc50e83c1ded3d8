"""The program `trainer`, whose coordinator fails when it has half of a block of a step:

python -m tests.cluster.half_server STEP:kill|stall|cut finetune --role coordinator ...
"""

from __future__ import annotations

import sys

from tests.cluster.half_blocks import fail
from trainer import cli
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.transport import server
from trainer.exchange.transport.link import Link


class HalfServer(server.GradientServer):
    """A coordinator that fails between the halves of a block."""

    step: int
    fault: str

    def _on_frame(self, link: Link, frame: Frame) -> None:
        super()._on_frame(link, frame)
        training = self._coordinator.training
        if frame.type is MessageType.GRADIENT and frame.step == self.step and training.task:
            assert training.task.sums is not None
            if (frame.block, frame.shard) in training.task.sums.partial:
                fail(self.fault, link)


def main() -> None:
    step, HalfServer.fault = sys.argv.pop(1).split(":")
    HalfServer.step = int(step)
    server.GradientServer = HalfServer
    cli.main()


if __name__ == "__main__":
    main()
