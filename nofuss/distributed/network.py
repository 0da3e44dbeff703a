"""The network over which the processes of torchrun talk, from the variables that torchrun sets."""

import os
import socket
import struct
import sys


def describe_meeting() -> str:
    """Return the line shown at the start: how many processes, where, and that access is open."""
    count, machines = (int(os.environ[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    where = "on this machine, over loopback" if machines == 1 else f"on {machines} machines"
    return (
        f"{count} processes {where}; torchrun's rendezvous at {place} listens on every address, "
        "asks for no password and encrypts nothing: keep it to a network you trust"
    )


def interface_to_peers() -> str | None:
    """Return the interface to use: loopback on one machine, else the one to the rendezvous."""
    names = [name for _, name in socket.if_nameindex()]
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        return next((name for name in names if name.startswith("lo")), None)
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:  # connecting a UDP socket sends nothing; it only chooses the route
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            return None
        address = socket.inet_aton(probe.getsockname()[0])
        matching = [name for name in names if _address(probe, name) == address]
    # The rendezvous's name may mean loopback on its own machine, where others can't connect.
    return next((name for name in matching if not name.startswith("lo")), None)


def _address(probe: socket.socket, interface: str) -> bytes | None:
    import fcntl  # not on Windows

    siocgifaddr = 0x8915
    try:
        return fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", interface.encode()))[20:24]
    except OSError:
        return None  # the interface has no address
