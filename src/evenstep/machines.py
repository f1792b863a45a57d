"""Several machines: what was asked for, and which address and interface of this machine the others reach.

Nothing here imports torch.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from dataclasses import dataclass

from evenstep import world
from evenstep.errors import ConfigError, MachineError

DEFAULT_PORT = 29400
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines of a run.

    Attributes:
        least: how many there must be for the run to go on.
        most: how many may take part.
        host: name or address of the machine where they meet.
        port: the TCP port there.
        run_id: the name under which they meet.
    """

    least: int
    most: int
    host: str
    port: int
    run_id: str

    @property
    def endpoint(self) -> str:
        """HOST:PORT, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def machines_of(nnodes: int | str, endpoint: str | None, run_id: str | None = None) -> Machines | None:
    """Return the machines that the options mean; None for this machine alone.

    Args:
        nnodes: a number, or MIN:MAX.
        endpoint: HOST or HOST:PORT.
        run_id: the name under which the machines meet.

    Raises:
        ConfigError: an option is wrong, or one is missing.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(nnodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(
            f"nnodes is {nnodes!r}; expected a number of machines above 0 or MIN:MAX, such as --nnodes 2 or "
            "--nnodes 1:2."
        )
    if endpoint is None:
        if most > 1:
            raise ConfigError(
                f"nnodes is {nnodes}, and no rdzv_endpoint is given: the machines would not find each other. "
                f"Give all of them the same --rdzv-endpoint HOST:{DEFAULT_PORT}, where HOST is one of them."
            )
        return None
    found = re.fullmatch(
        r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]/\s]+))(?::(?P<port>\d+))?", endpoint
    )
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise ConfigError(
            f"rdzv_endpoint is {endpoint!r}; expected HOST:PORT of one of the machines, such as "
            f"--rdzv-endpoint node1:{DEFAULT_PORT}; an IPv6 address stands in brackets."
        )
    host = found["six"] or found["host"]
    return Machines(least=least, most=most, host=host, port=port, run_id=run_id or "evenstep")


def addresses(host: str) -> list[str]:
    """Return the addresses of a host, IPv4 first.

    Raises:
        MachineError: its name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MachineError(
            f"the name {host!r} cannot be resolved on this machine: {error}. Give the address itself "
            "(--rdzv-endpoint 10.0.0.1:29400), or add the name to /etc/hosts."
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda e: e[0])))


def is_here(host: str) -> bool:
    """Return whether a host is this machine: whether one of its addresses can be bound here.

    A comparison of host names would be wrong in network namespaces and containers.
    """
    return any(_can_bind(address) for address in addresses(host))


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def local_address(host: str) -> str:
    """Return the address of this machine that the others reach, if they meet at ``host``.

    Raises:
        MachineError: no route leads there, or the name cannot be resolved.
    """
    found = addresses(host)
    means_loopback = host == "localhost" or _is_loopback(host)
    for address in found:
        # Debian lets a machine's own name mean 127.0.1.1, which no other machine reaches.
        if _can_bind(address) and (means_loopback or not _is_loopback(address)):
            return address
    if any(_can_bind(address) for address in found):
        return _towards("192.0.2.1", host)  # an address that nobody has: by the default route
    return _towards(found[0], host)


def _towards(address: str, host: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MachineError(
            f"no network interface of this machine leads to {host} ({address}): {error.strerror}. The "
            "machines have to reach each other. Check --rdzv-endpoint and the network."
        ) from None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address; None if it cannot be found out."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo" if _is_loopback(address) else None


def _interface_of_ipv6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def gloo_interface(address: str) -> dict[str, str]:
    """Return the variable that tells gloo which interface to use; one that is set already stays."""
    name = world.variable("GLOO_SOCKET_IFNAME") or interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
