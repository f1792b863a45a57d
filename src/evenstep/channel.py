"""The line between the launching process and its workers: messages, the go before main, and the life line.

A Unix socket in the run's private directory; nothing listens on a network. Each end notices at once when the
other one dies: the launching process then ends the remaining workers, and a worker ends itself, so that
``kill -9`` on the launching process leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import cloudpickle
from loguru import logger

from evenstep import log, sharedmem
from evenstep.errors import MachineError

_LOOK_EVERY_S = 0.1
_LAST_WORDS_S = 1.0
_GONE_TRIES, _GONE_EVERY_S = 20, 0.01


@dataclass
class Peer:
    """What the launching process knows of one worker.

    Attributes:
        rank: the worker's rank.
        pid: its process id.
        connection: the line to it.
        ready: whether it waits for the go.
        done: whether its main has returned or raised; its end is no surprise then.
        killed: whether this end has sent it SIGKILL.
        ended: when the line broke, as ``time.time()``; None while the worker lives.
    """

    rank: int
    pid: int
    connection: Connection
    ready: bool = False
    done: bool = False
    killed: bool = False
    ended: float | None = None


class Server:
    """The launching process's end: takes the workers' lines, passes messages on, ends workers that are left.

    Args:
        directory: the private directory of the run.
        key: the secret that a worker shows when it connects.
        num_workers: how many workers are started on this machine.
        on_message: called as ``on_message(rank, obj)`` for each message, one at a time, on a thread of ours.
        grace_s: seconds between a worker's death and SIGKILL for those that have not ended by then.
        on_connected: called when all workers of a start have connected, on a thread of ours.
        is_saving: whether a worker saves its state; it is not killed meanwhile.
    """

    def __init__(
        self,
        directory: str,
        key: bytes,
        num_workers: int,
        on_message: Callable[[int, Any], None] | None,
        grace_s: float,
        on_connected: Callable[[], None],
        is_saving: Callable[[], bool],
    ) -> None:
        self.values: dict[int, bytes] = {}
        self._on_connected = on_connected
        self._is_saving = is_saving
        self.num_workers = num_workers
        self._on_message = on_message
        # A notebook's cell is in it, below which is shown what on_message prints.
        self._context = contextvars.copy_context()
        self._grace_s = grace_s
        self._lock = threading.RLock()
        self._heard = threading.Condition(self._lock)
        self._callback_lock = threading.Lock()
        self._restart = 0
        self._peers: dict[int, Peer] = {}
        self._backlog: list[bytes] = []
        self._closed = threading.Event()
        self._stopping = False
        self._asked: int | None = None
        self._reaper: threading.Thread | None = None
        self._listener = Listener(
            os.path.join(directory, "channel"), "AF_UNIX", backlog=max(8, num_workers), authkey=key
        )
        self._key = key
        self._acceptor = threading.Thread(target=self._accept, name="evenstep-channel", daemon=True)
        self._acceptor.start()

    @property
    def peers(self) -> dict[int, Peer]:
        """The workers of the present start, by rank."""
        with self._lock:
            return dict(self._peers)

    @property
    def is_ending(self) -> bool:
        """Whether workers that still start are ended, too."""
        return self._stopping

    def begin(self, restart: int) -> None:
        """Forget the workers of the former start; those of start number ``restart`` come next."""
        with self._lock:
            self._restart = restart
            self._peers = {}
            if restart > 0:
                self._backlog = []
            self.values = {}
            self._reaper = None

    def send(self, obj: Any) -> None:
        """Send an object to every worker; one that has not connected yet gets it when it does."""
        frame = cloudpickle.dumps(("message", cloudpickle.dumps(obj)))
        with self._lock:
            if len(self._peers) < self.num_workers:
                self._backlog.append(frame)
            for peer in self._peers.values():
                self._put(peer, frame)

    def ask_to_stop(self, number: int, grace_s: float, is_saving: Callable[[], bool]) -> None:
        """Tell all workers to stop after the same step, those that still start, too; end them after a time.

        Args:
            number: the signal that asks for it.
            grace_s: seconds until SIGKILL for the workers that have not ended by themselves.
            is_saving: whether one of them is writing a checkpoint: the seconds count from the end of that.
        """
        with self._lock:
            if self._asked is not None:
                return
            self._asked = number
            self._heard.notify_all()
            for peer in self._peers.values():
                self._put(peer, cloudpickle.dumps(("stop", number)))
        threading.Thread(target=self._end_after, args=(grace_s, is_saving), daemon=True).start()

    def _end_after(self, seconds: float, is_saving: Callable[[], bool]) -> None:
        left = seconds
        while left > 0:
            if self._closed.wait(min(left, _LOOK_EVERY_S)):
                return
            left = seconds if is_saving() else left - _LOOK_EVERY_S
        if not self._closed.is_set():
            with self._lock:
                self._stopping = True
                self.signal_all(signal.SIGKILL)

    def let_go(self) -> None:
        """Have all workers save and leave, as after a death of one of them: another machine has died."""
        with self._lock:
            for peer in self._peers.values():
                self._put(peer, cloudpickle.dumps(("death", -1)))
            self._start_reaper()

    def kill(self) -> None:
        """End all workers at once, those that still start, too."""
        with self._lock:
            self._stopping = True
            self.signal_all(signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every worker that lives."""
        with self._lock:
            for peer in self._peers.values():
                if peer.ended is None:
                    peer.killed = peer.killed or number == signal.SIGKILL
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(peer.pid, number)

    def wait_until_heard(self, seconds: float | None = None) -> None:
        """Wait until all is taken that workers have sent, which have ended, and ``on_message`` is through.

        Args:
            seconds: for so long at most; None for no limit, but for a wish to stop, which may come from
                ``on_message`` itself.
        """

        def is_heard() -> bool:
            return all(peer.done or peer.ended is not None for peer in self._peers.values())

        with self._heard:
            self._heard.wait_for(lambda: is_heard() or (seconds is None and self._asked is not None), seconds)

    def close(self) -> None:
        """End what is left of the workers and the threads of this end."""
        self.signal_all(signal.SIGKILL)
        self.wait_until_heard(_LAST_WORDS_S)
        self._closed.set()
        with contextlib.suppress(OSError, EOFError):
            # Wakes the acceptor; a closed listener would leave it in accept() for ever.
            Client(self._listener.address, "AF_UNIX", authkey=self._key).close()
        self._acceptor.join(self._grace_s)
        self._listener.close()
        with self._lock:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.connection.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except Exception:  # a worker died while it connected, or a stranger without the key
                continue
            if self._closed.is_set():
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            _, (rank, pid, restart) = cloudpickle.loads(connection.recv_bytes())
        except (OSError, EOFError):
            return
        peer = Peer(rank, pid, connection)
        with self._lock:
            if restart != self._restart or self._stopping:
                connection.close()  # the worker takes a broken line as its order to end
                return
            self._peers[rank] = peer
            for frame in self._backlog:
                self._put(peer, frame)
            if self._asked is not None:
                self._put(peer, cloudpickle.dumps(("stop", self._asked)))
            all_connected = len(self._peers) == self.num_workers
        log.moment(f"rank {rank} connected", launching=True)
        if all_connected:
            self._on_connected()
        with contextlib.suppress(OSError, EOFError):
            while True:
                kind, content = cloudpickle.loads(connection.recv_bytes())
                self._take(peer, kind, content)
        peer.ended = time.time()
        log.moment(f"rank {rank} is gone", launching=True)
        with self._lock:
            self._heard.notify_all()
            if not peer.done and self._peers.get(rank) is peer:
                for other in self._peers.values():
                    self._put(other, cloudpickle.dumps(("death", rank)))
                self._start_reaper()

    def _take(self, peer: Peer, kind: str, content: Any) -> None:
        if kind == "message":
            self._call_back(peer.rank, content)
            return
        with self._lock:
            if kind == "ready":
                peer.ready = True
                if sum(p.ready for p in self._peers.values()) == self.num_workers:
                    for other in self._peers.values():
                        self._put(other, cloudpickle.dumps(("go", None)))
            elif kind == "value":
                self.values[peer.rank] = content
            elif kind == "failing":
                self._start_reaper()
            elif kind == "done":
                peer.done = True
                self._heard.notify_all()

    def _call_back(self, rank: int, content: bytes) -> None:
        if self._on_message is None:
            return
        try:
            message = cloudpickle.loads(content)
            with self._callback_lock:
                self._context.run(self._on_message, rank, message)
        except Exception:
            logger.exception("on_message failed for a message of rank {}; the run goes on", rank)

    def _put(self, peer: Peer, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # it has just died; its reader thread notices
            peer.connection.send_bytes(frame)

    def _start_reaper(self) -> None:
        if self._reaper is None and not self._closed.is_set():
            self._reaper = threading.Thread(target=self._reap, args=(self._restart,), daemon=True)
            self._reaper.start()

    def _reap(self, restart: int) -> None:
        """Kill what is left of a start some seconds after its first death.

        torch's agent waits 30 seconds before it kills a worker that ignores SIGTERM or sleeps in C, and for
        ever when a worker leaves with exit code 0 in the middle of the run.
        """
        wait_s = self._grace_s
        while not self._closed.wait(wait_s):
            if self._is_saving():
                wait_s = _LOOK_EVERY_S
                continue
            with self._lock:
                if restart == self._restart:
                    self.signal_all(signal.SIGKILL)
            return


class Line:
    """A worker's end; the channel of its World.

    Args:
        directory: the private directory of the run.
        key: the secret.
        rank: this worker's rank.
        restart: the number of this start of the workers.
    """

    def __init__(self, directory: str, key: bytes, rank: int, restart: int) -> None:
        self._address = os.path.join(directory, "channel")
        self._connection = Client(self._address, "AF_UNIX", authkey=key)
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._go = threading.Event()
        self._handlers: dict[str, Callable[[int], None]] = {}
        self._unheard: list[tuple[str, int]] = []
        self._write("hello", (rank, os.getpid(), restart))
        threading.Thread(target=self._read, name="evenstep-line", daemon=True).start()

    def send(self, obj: Any) -> None:
        """Send a picklable object to the parent's ``on_message``."""
        self._write("message", cloudpickle.dumps(obj))

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next object from the parent; TimeoutError after ``timeout_s`` seconds."""
        try:
            return cloudpickle.loads(self._messages.get(timeout=timeout_s))
        except queue.Empty:
            raise TimeoutError(f"world.receive: nothing came from the parent in {timeout_s} s.") from None

    def wait_for_go(self, timeout_s: float) -> None:
        """Tell the parent that this worker is ready, and wait until all are.

        Raises:
            MachineError: the others were not ready in time.
        """
        self._write("ready", None)
        if not self._go.wait(timeout_s):
            raise MachineError(
                f"not all workers were ready within {timeout_s} s. A slow or busy machine may need "
                f"--timeout-s {2 * timeout_s:g}."
            )

    def listen(self, *, on_stop: Callable[[int], None], on_death: Callable[[], None]) -> None:
        """Say what to do, on the thread of this line, when the parent passes something on.

        Args:
            on_stop: called with the number of the signal that asks this run to stop.
            on_death: called when another worker has died.
        """
        with self._lock:
            self._handlers = {"stop": on_stop, "death": lambda _: on_death()}
            unheard, self._unheard = self._unheard, []
        for kind, number in unheard:
            self._handlers[kind](number)

    def failing(self) -> None:
        """Tell the parent that this worker ends with an error, so that the others do not outlast it long."""
        self._write("failing", None)

    def finish(self, value: bytes | None) -> None:
        """Hand in main's value (pickled; None for none), and say that this worker's end is no surprise."""
        if value is not None:
            self._write("value", value)
        self._write("done", None)

    def _write(self, kind: str, content: Any) -> None:
        frame = cloudpickle.dumps((kind, content))
        with self._lock:
            self._connection.send_bytes(frame)

    def _read(self) -> None:
        # The thread stays until the process ends: a worker whose main has returned still waits for the
        # others, and must not outlive the launching process then, either.
        with contextlib.suppress(OSError, EOFError):
            while True:
                kind, content = cloudpickle.loads(self._connection.recv_bytes())
                if kind == "message":
                    self._messages.put(content)
                elif kind == "go":
                    self._go.set()
                else:
                    self._hear(kind, content)
        self._remove_what_the_dead_left()
        os.kill(os.getpid(), signal.SIGKILL)

    def _hear(self, kind: str, number: int) -> None:
        with self._lock:
            handler = self._handlers.get(kind)
            if handler is None:
                self._unheard.append((kind, number))
        if handler is not None:
            handler(number)

    def _remove_what_the_dead_left(self) -> None:
        """Remove the private directory if nobody listens in it any more: the launching process was killed."""
        # More than once: Linux closes the newest files of a killed process first, and the socket at which it
        # listened after its lines.
        with contextlib.suppress(OSError, EOFError):
            for _ in range(_GONE_TRIES):
                try:
                    Client(self._address, "AF_UNIX").close()
                except ConnectionRefusedError:
                    shutil.rmtree(os.path.dirname(self._address), ignore_errors=True)
                    sharedmem.remove_leftovers()
                    return
                time.sleep(_GONE_EVERY_S)
