"""The rendezvous of an agent on one machine, which has nobody to meet."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

BACKEND = "evenstep-one-machine"


class Alone(RendezvousHandler):
    """The rendezvous of an agent that is alone: itself, at once.

    torch's own waits up to 0.3 s at random before it joins, so that many machines do not come all at once,
    and keeps a thread that outlives an interrupted run.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """The name under which torch's registry knows this class."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a group of one agent. Workers meet through files, so address and port go unused."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        """Return False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """The id that the agent gave."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: nothing is held."""
        return True
