"""The coordinator's actions in response to one event, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainer.exchange.protocol import messages
from trainer.exchange.protocol.actions import Action, Close, Emit, Send
from trainer.exchange.protocol.members import Member
from trainer.exchange.protocol.wire import Frame


class Outbox:
    """The actions of the event being handled."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def add(self, action: Action) -> None:
        """Append an action."""
        self._actions.append(action)

    def send(self, member: Member, message: messages.Message, step: int = 0) -> None:
        """Send a control message to a member."""
        self.send_frames(member, [message.to_frame(member.generation, step, member.rank)])

    def send_frames(self, member: Member, frames: Iterable[Frame]) -> None:
        """Send frames to a member; those to a joiner are counted until its link took them."""
        counted = frames if member.ready else member.delivery.count_stream(frames)
        self.add(Send(member.link, counted))

    def send_heartbeat(self, member: Member) -> None:
        """Send a heartbeat, unless other frames are queued already."""
        frame = messages.Heartbeat().to_frame(member.generation, rank=member.rank)
        self.add(Send(member.link, [frame], if_idle=True))

    def close_link(self, link: int, reason: str, *, notified: bool = False) -> None:
        """Close a link; if the peer was `told` the reason, it closes the link itself."""
        self.add(Close(link, reason, notified))

    def emit(self, event: str, **details: Any) -> None:
        """Log an event."""
        self.add(Emit({"event": event, **details}))

    def take_actions(self) -> list[Action]:
        """Return the collected actions and clear the box."""
        actions, self._actions = self._actions, []
        return actions
