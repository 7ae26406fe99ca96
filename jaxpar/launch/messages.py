"""What a launch and its ranks know of each other; imports nothing."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "JAXPAR_LAUNCH"
"""Environment variable of the ranks, set by the launch alone."""

MAX_MESSAGE_BYTES = 2048


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in the launch.

    coordinator: host:port of JAX's coordinator. inbox: Unix socket that the launch listens on.
    """

    coordinator: str
    num_processes: int
    process_id: int
    inbox: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def tell(self, what: str, **more: Any) -> None:
        """Send one message, and never wait or fail: a launch that is gone ends its ranks anyway."""
        message = json.dumps({"rank": self.process_id, "what": what, **more}).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(message[:MAX_MESSAGE_BYTES], self.inbox)
        except OSError:
            return


def read_place() -> Place | None:
    """Where the launch has put this process, None outside of one. ValueError for nonsense."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Place(**json.loads(text))
