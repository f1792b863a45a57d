"""How the agents of several machines meet, agree on the run, and notice that a machine is gone.

The meeting itself is torch's elastic rendezvous over one TCP store, which the machine of the endpoint holds.
Around it:

* One number for each start of the workers, the same on all machines. torch counts per machine, and does not
  count a start because a machine has come or gone.
* The machine of the endpoint gets rank 0: it is the one that must live anyway.
* A beat of each agent every half second. torch's agent does not look for machines that have gone, and a cut
  link resets no connection: the workers would wait for the timeout of the collective.
* No call on the store may hang the run. When the machine of the endpoint is gone, calls on it may block for
  many minutes, so they run on threads of their own, and HostLostError is raised.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evenstep import machines
from evenstep.errors import ConfigError, EvenstepError, MachineError, WorkerError
from evenstep.machines import Machines

BACKEND = "evenstep-machines"
BEAT_S = 0.5
LOST_AFTER_S = 5.0
"""Without a beat for so long a machine counts as gone. On cores with far more work than they can do, beats of
a machine that lives have come as late, so less would be too little."""
_FIRST_LOOK_S = 5.0
_CLOSE_S = 3.0
_OFFER_S = 10.0
_NOTICE_S = 5.0
_LOOK_S = 0.02
_STOPPED = "the run was stopped while it waited for other machines"

Result = TypeVar("Result")


class HostLostError(Exception):
    """The machines cannot go on together: the endpoint is gone, or too few machines are left."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one machine brings, and what it was asked for.

    Attributes:
        address: its address, which also names it.
        agent: the process id of its agent.
        nproc: its processes.
        is_host: whether it holds the store.
        lanes: the lanes it was asked for; None for the default.
        threads: the threads per process that it would take.
        threads_asked: whether they were asked for.
        resume: whether it is to go on from a checkpoint.
        run: further options that must be the same everywhere, as text by name.
    """

    address: str
    agent: int
    nproc: int
    is_host: bool
    lanes: int | None
    threads: int
    threads_asked: bool
    resume: bool
    run: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What the machines have settled at the first start; it holds for the whole life of the run."""

    lanes: int
    threads: int


def settle(offers: list[Offer], before: Agreed | None) -> Agreed:
    """Return what the machines agree on.

    Args:
        offers: of all machines, the host's first.
        before: what was settled at the first start; None if this is it.

    Raises:
        ConfigError: they were asked for different things, or there are more processes than lanes.
    """
    for name in ("lanes", *offers[0].run):
        asked = {o.address: _asked(o, name) for o in offers if _asked(o, name) is not None}
        if len(set(asked.values())) > 1:
            raise ConfigError(_differ(name, asked))
    resuming = [o.address for o in offers if o.resume]
    if before is None and 0 < len(resuming) < len(offers):  # a machine that comes later takes what there is
        others = [o.address for o in offers if not o.resume]
        raise ConfigError(
            f"--resume was given on {', '.join(resuming)}, but not on {', '.join(others)}: only some of the "
            "machines would go on from a checkpoint. Give --resume on all of them, or on none."
        )
    threads = {o.address: o.threads for o in offers if o.threads_asked}
    if before is not None:
        threads["the run"] = before.threads
    if len(set(threads.values())) > 1:
        raise ConfigError(_differ("threads", threads))
    num_processes = sum(offer.nproc for offer in offers)
    settled = before or Agreed(
        lanes=next((o.lanes for o in offers if o.lanes is not None), num_processes),
        threads=next(iter(threads.values()), min(offer.threads for offer in offers)),
    )
    if num_processes > settled.lanes:
        each = ", ".join(f"{offer.nproc} on {offer.address}" for offer in offers)
        raise ConfigError(
            f"{num_processes} processes ({each}) are above lanes {settled.lanes}: each process needs a lane "
            f"of its own. Use a smaller --nproc, or begin a new run with --lanes {num_processes}."
        )
    return settled


def _asked(offer: Offer, name: str) -> Any:
    return offer.lanes if name == "lanes" else offer.run.get(name)


def _differ(name: str, values: dict[str, Any]) -> str:
    each = ", ".join(f"{value} on {address}" for address, value in values.items())
    return (
        f"the machines were asked for different {name}: {each}. It changes the bits or the run, so it must "
        f"be the same everywhere. Give all of them the same --{name.replace('_', '-')}."
    )


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What a Meeting calls in the run of this machine.

    Attributes:
        before: before each meeting but the first; ends the run by what it raises.
        may_admit: whether the workers could save and leave, so that a machine that has come may take part.
        on_lost: called with a text when another machine is gone or has come, so that the workers save and
            leave, and with whether to wait for that; on a thread of ours, or the agent's.
    """

    before: Callable[[], None]
    may_admit: Callable[[], bool]
    on_lost: Callable[[str, bool], None]


class Meeting(RendezvousHandler):
    """The rendezvous handler of one machine's agent, for one run. Closed by :meth:`shutdown`.

    Args:
        where: the machines.
        offer: makes this machine's offer, given its address and whether it is the host.
        timeout_s: seconds to wait for the other machines.
        calls: what it calls in the run.
        interrupted: whether the run is to end; a meeting that waits for machines then ends.

    Attributes:
        address: the address of this machine.
        start: the number of the present start of the workers, the same on all machines.
        restarts: starts before it that a failure caused, and not a machine that came.
        agreed: what the machines have settled.
        change: which machines have come or gone since the last start; empty if none.
        lost_machine: which machine was the first that did not answer any more; None if all do.
    """

    def __init__(
        self,
        where: Machines,
        offer: Callable[[str, bool], Offer],
        *,
        timeout_s: float,
        calls: Calls,
        interrupted: Callable[[], bool],
    ) -> None:
        self.change = ""
        self._interrupted = interrupted
        self.start = -1
        self.restarts = 0
        self.agreed: Agreed | None = None
        self.address = machines.local_address(where.host)
        self._where = where
        self._timeout_s = timeout_s
        self._calls = calls
        self._members: dict[str, Offer] = {}
        self._waiting = 0
        self.lost_machine: str | None = None
        self._lost: str | None = None
        self._closed = threading.Event()
        self._reported = -1
        backend, self._store, self.is_host = self._open()
        self.offer = offer(self.address, self.is_host)
        self._name = f"{self.address}/{self.offer.agent}"
        self._handler = create_handler(self._store, backend, self._parameters(self.is_host, timeout_s))
        self._root = PrefixStore(f"evenstep/{where.run_id}", self._store)
        self._heard = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="evenstep-machines", daemon=True)
        self._watcher.start()

    # What torch's agent calls

    def get_backend(self) -> str:
        """The name under which torch's registry knows this class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return False: the workers meet under a name of their own for each start."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents, and agree on the run.

        Raises:
            HostLostError: the endpoint is gone, or too few machines are there.
            MachineError: the other machines have not come at the first start.
            ConfigError: the machines were asked for different things.
        """
        before, self._members = self._members, {}
        is_first = self.start < 0
        try:
            if is_first:
                self._within(self._announce)
            else:
                self._calls.before()
            return self._met(before)
        except RendezvousTimeoutError:
            least = self._where.least
            text = f"fewer than {least} machines were at {self._where.endpoint} within {self._timeout_s:g} s"
            if is_first:
                raise MachineError(
                    f"{text}. Start the same command on all {least}; a later start needs a longer "
                    f"--timeout-s, and fewer machines --nnodes 1:{self._where.most}."
                ) from None
            raise HostLostError(text) from None
        except RendezvousClosedError:
            failure = self.failure_elsewhere()
            if failure is not None:
                raise failure from None
            raise HostLostError("the run has ended on another machine") from None
        except (RendezvousError, RuntimeError) as error:
            self._lost = self._gone(error)
            raise HostLostError(self._lost) from None

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to take part, after which torch's agent ends the workers by SIGTERM.

        They have saved and left by then, or have had time for it. Never waits for another machine.

        Raises:
            HostLostError: the endpoint is gone; the workers have been told before.
        """
        silent_s = time.monotonic() - self._heard
        if self._lost is None and silent_s > LOST_AFTER_S:
            self._lost = self._gone(f"no answer for {silent_s:.1f} s")
        if self._lost is not None:
            self._calls.on_lost(self._lost, True)
            raise HostLostError(self._lost)
        waiting = self._waiting
        if waiting:
            self._calls.on_lost(f"{waiting} machine{'s' * (waiting > 1)} came to take part", True)
        return waiting

    def is_closed(self) -> bool:
        """Whether the run has ended for all machines."""
        return self._lost is not None or self._within(self._handler.is_closed)

    def set_closed(self) -> None:
        """End the run for all machines."""
        self._within(self._handler.set_closed)

    def get_run_id(self) -> str:
        """The name under which the machines meet."""
        return self._where.run_id

    def shutdown(self) -> bool:
        """Leave the meeting, and close it for all."""
        self._closed.set()
        if self._lost is not None:
            return False
        try:
            return self._within(self._handler.shutdown, _CLOSE_S)
        except (HostLostError, RendezvousError, RuntimeError, TimeoutError):
            return False

    # What the run calls

    def tell_failure(self, error: EvenstepError) -> None:
        """Tell the other machines why this one ends the run; the first word counts."""
        word = json.dumps(
            {"text": str(error), "code": error.exit_code, "where": self.address, "agent": self._name}
        )
        with contextlib.suppress(HostLostError, RuntimeError, TimeoutError):
            self._within(lambda: self._root.compare_set("failure", "", word), _CLOSE_S)

    # The rest

    def _parameters(self, is_host: bool, timeout_s: float) -> RendezvousParameters:
        return RendezvousParameters(
            backend="c10d",
            endpoint=self._where.endpoint,
            run_id=self._where.run_id,
            min_nodes=self._where.least,
            max_nodes=self._where.most,
            local_addr=self.address,
            is_host=is_host,
            read_timeout=max(1, int(timeout_s)),
            join_timeout=max(1, int(timeout_s)),
            last_call_timeout=3,
            keep_alive_interval=1,
            keep_alive_max_attempt=3,
        )

    def _open(self) -> tuple[Any, Any, bool]:
        """Return the backend, the store, and whether this process holds it."""
        here = machines.is_here(self._where.host)
        problem: Exception | None = None
        if here:
            try:
                return *create_backend(self._parameters(True, self._timeout_s)), True
            except RendezvousConnectionError as error:
                problem = error  # another agent of this machine may hold it
        patience_s = min(self._timeout_s, _FIRST_LOOK_S) if here else self._timeout_s
        try:
            return *create_backend(self._parameters(False, patience_s)), False
        except RendezvousConnectionError as error:
            cause = (problem or error).__cause__ or error
            reason = (str(cause).splitlines() or [""])[0][:200]
        if here:
            raise MachineError(
                f"port {self._where.port} of {self._where.host} cannot be opened: {reason}. Another program "
                "may have it. Choose another port in --rdzv-endpoint, the same on all machines."
            )
        raise MachineError(
            f"nobody answers at {self._where.endpoint} within {patience_s:g} s: {reason}. The machine of "
            "--rdzv-endpoint must run the same command; check the address, the port and the firewall."
        )

    def _announce(self) -> None:
        """Say that a machine comes later than the first start; raise ConfigError if it has no place."""
        if not self._root.check(["agreed"]):
            return
        agreed = Agreed(**json.loads(self._root.get("agreed")))
        num_processes = int(self._root.get("processes"))
        if self._where.most > 1 and num_processes + self.offer.nproc > agreed.lanes:
            raise ConfigError(
                f"the run at {self._where.endpoint} has {agreed.lanes} lanes and {num_processes} processes: "
                f"{self.offer.nproc} more would have no lane of their own. Begin a new run with "
                f"--lanes {num_processes + self.offer.nproc} or more."
            )
        self._root.set(f"joined/{self._root.get('start').decode()}", self._name)

    def _met(self, before: dict[str, Offer]) -> RendezvousInfo:
        """Meet and agree; again if a machine died in the middle of that."""
        end = time.monotonic() + self._timeout_s
        notice = threading.Timer(_NOTICE_S, self._say_what_it_waits_for)
        notice.daemon = True
        notice.start()
        while True:
            try:
                info = self._within(self._handler.next_rendezvous)
                return self._within(functools.partial(self._agree, info, before))
            except RuntimeError as error:
                if "timeout" not in str(error) or time.monotonic() > end:
                    raise
            finally:
                notice.cancel()

    def _say_what_it_waits_for(self) -> None:
        least = self._where.least
        sys.stderr.write(
            f"evenstep: waiting for other machines at {self._where.endpoint}: {least} must be there "
            f"(--nnodes), for at most {self._timeout_s:g} s (--timeout-s)\n"
        )

    def _agree(self, info: RendezvousInfo, before: dict[str, Offer]) -> RendezvousInfo:
        """Exchange the offers, and put the host first."""
        shared = PrefixStore("evenstep", info.store)
        shared.set(f"offer/{info.rank}", json.dumps(asdict(self.offer)))
        shared.wait(
            [f"offer/{rank}" for rank in range(info.world_size)],
            datetime.timedelta(seconds=min(self._timeout_s, _OFFER_S)),
        )
        offers = [Offer(**json.loads(shared.get(f"offer/{rank}"))) for rank in range(info.world_size)]
        order = sorted(range(info.world_size), key=lambda rank: (not offers[rank].is_host, rank))
        offers = [offers[rank] for rank in order]
        rank = order.index(info.rank)
        if rank == 0:
            # Also on an error, which all machines then raise in the same words.
            shared.set("plan", json.dumps(self._planned(offers)))
        plan = json.loads(shared.get("plan"))
        if plan["problem"]:
            raise ConfigError(plan["problem"])
        self.start, self.restarts = plan["start"], plan["restarts"]
        self.agreed = Agreed(**plan["agreed"])
        self._waiting = 0
        self.lost_machine = None
        self._members = {f"{offer.address}/{offer.agent}": offer for offer in offers}
        gone = [offer.address for name, offer in before.items() if name not in self._members]
        come = [offer.address for name, offer in self._members.items() if before and name not in before]
        texts = [f"the machine {address} was lost" for address in gone]
        self.change = ", ".join(texts + [f"the machine {address} came" for address in come])
        return RendezvousInfo(info.store, rank, info.world_size, RendezvousStoreInfo(offers[0].address, 0))

    def _planned(self, offers: list[Offer]) -> dict[str, Any]:
        before = Agreed(**json.loads(self._root.get("agreed"))) if self._root.check(["agreed"]) else None
        try:
            agreed = settle(offers, before)
        except ConfigError as error:
            return {"problem": str(error)}
        start = self._root.add("starts", 1) - 1
        joined = self._root.add("joins", int(start > 0 and self._root.check([f"joined/{start - 1}"])))
        self._root.set("agreed", json.dumps(asdict(agreed)))
        self._root.set("processes", str(sum(offer.nproc for offer in offers)))
        self._root.set("start", str(start))
        return {"problem": "", "start": start, "restarts": start - joined, "agreed": asdict(agreed)}

    def _watch(self) -> None:
        """Beat, and look for machines that have gone or wait, on a connection of our own."""
        beats: dict[str, tuple[bytes, float]] = {}
        number = 0
        try:
            store: Any = TCPStore(
                self._where.host,
                self._where.port,
                is_master=False,
                timeout=datetime.timedelta(seconds=LOST_AFTER_S),
            )
            store = PrefixStore(f"evenstep/{self._where.run_id}", store)
            while not self._closed.is_set():
                number += 1
                store.set(f"beat/{self._name}", str(number))
                members = dict(self._members)
                for name, offer in members.items():
                    if name != self._name:
                        self._hear(store, name, offer, beats)
                self._heard = time.monotonic()
                if members and members == self._members:
                    self._look(store, members)
                self._closed.wait(BEAT_S)
        except (RuntimeError, ValueError, RendezvousError) as error:
            if not self._closed.is_set():
                self._lost = self._gone(error)

    def _hear(self, store: Any, name: str, offer: Offer, beats: dict[str, tuple[bytes, float]]) -> None:
        beat = store.get(f"beat/{name}") if store.check([f"beat/{name}"]) else b""
        now = time.monotonic()
        if name not in beats or beats[name][0] != beat:
            beats[name] = beat, now
        elif now - beats[name][1] > LOST_AFTER_S:
            text = f"the machine {offer.address} has not answered for {now - beats[name][1]:.1f} s"
            self.lost_machine = self.lost_machine or text
            self._report(text)

    def _look(self, store: Any, members: dict[str, Offer]) -> None:
        if store.check(["failure"]):
            self._report("the run has failed on another machine")
        waiting = self._handler.num_nodes_waiting()
        if waiting and members == self._members and self._calls.may_admit():
            self._waiting = waiting

    def _report(self, text: str) -> None:
        """Have the workers of this start leave, once."""
        if self._reported != self.start:
            self._reported = self.start
            self._calls.on_lost(text, False)

    def _within(self, call: Callable[[], Result], limit_s: float = math.inf) -> Result:
        """Return what ``call`` returns, on a thread that may be left behind.

        Raises:
            HostLostError: the endpoint went while it ran.
            TimeoutError: it took longer than ``limit_s`` seconds.
        """
        results: list[Result] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            done.set()

        threading.Thread(target=work, name="evenstep-store", daemon=True).start()
        end = time.monotonic() + limit_s
        while not done.wait(_LOOK_S):
            if self._lost is not None:
                raise HostLostError(self._lost)
            if limit_s == math.inf and self._interrupted():
                raise HostLostError(_STOPPED)
            if time.monotonic() - self._heard > LOST_AFTER_S:
                self._lost = self._gone("no answer")
            if time.monotonic() > end:
                raise TimeoutError(f"no answer within {limit_s} s")
        if errors:
            raise errors[0]
        return results[0]

    def _gone(self, why: object) -> str:
        cause = getattr(why, "__cause__", None) or why  # torch's own text refers to its cause
        reason = (str(cause).splitlines() or [""])[0][:120].rstrip(". ")
        return f"the machine of the endpoint {self._where.endpoint} is gone ({reason})"

    def failure_elsewhere(self) -> WorkerError | None:
        """Return what another machine has said of its failure, if it has."""
        try:
            if not self._within(lambda: self._root.check(["failure"]), _CLOSE_S):
                return None
            word = json.loads(self._within(lambda: self._root.get("failure"), _CLOSE_S))
        except (HostLostError, RuntimeError, TimeoutError):
            return None
        if word["agent"] == self._name:
            return None
        return WorkerError(f"the run has failed on {word['where']}: {word['text']}", exit_code=word["code"])


def meet(
    where: Machines,
    offer: Callable[[str, bool], Offer],
    *,
    timeout_s: float,
    calls: Calls,
    interrupted: Callable[[], bool],
) -> Meeting:
    """Return a Meeting that has reached the endpoint; its waiting in C++ does not hold up signals.

    Raises:
        MachineError: nobody answers there, or its port cannot be opened.
        HostLostError: the run was stopped meanwhile.
    """
    found: list[Meeting] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(Meeting(where, offer, timeout_s=timeout_s, calls=calls, interrupted=interrupted))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="evenstep-meet", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if interrupted():
            raise HostLostError(_STOPPED)
    if errors:
        raise errors[0]
    return found[0]


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the Meeting that is in the configuration; for torch's registry."""
    meeting: RendezvousHandler = parameters.get("meeting")
    return meeting
