"""Over which network the processes of torchrun talk, from what torchrun told this one."""

import os
import socket
import struct
import sys


def how_they_met() -> str:
    """The line said at the start: how many, where, and that nobody is asked for a password."""
    count, machines = (int(os.environ[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    where = "here, over loopback" if machines == 1 else f"on {machines} machines"
    return (
        f"{count} processes {where}; torchrun's rendezvous at {place} listens on every address, "
        "asks for no password and encrypts nothing: keep it to a network you trust"
    )


def towards_the_others() -> str | None:
    """The interface to talk over: loopback on one machine, else the one towards the rendezvous."""
    names = [name for _, name in socket.if_nameindex()]
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        return next((name for name in names if name.startswith("lo")), None)
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:  # sends nothing: it only asks for the way
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        found = [name for name in names if _address(probe, name) == own]
    # A name that means loopback on its own machine would keep the others out.
    return next((name for name in found if not name.startswith("lo")), None)


def _address(probe: socket.socket, interface: str) -> bytes | None:
    import fcntl  # not on Windows

    siocgifaddr = 0x8915
    try:
        return fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", interface.encode()))[20:24]
    except OSError:
        return None  # it has no address
