"""Asked of every interpreter of a node: run as ``python -c``, so that older ones can answer too."""

import json
import os
import socket
import sys
from pathlib import Path


def _version(distribution: str, module: str) -> object:
    """The installed version; "" where nobody knows which, None where it is not installed."""
    try:
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec
    except ImportError:  # before Python 3.8
        return None
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = ""
    try:
        return found if find_spec(module) else None
    except ModuleNotFoundError:  # the package around it is absent
        return None


def _room(directory: Path) -> "tuple[int, str]":
    """Free bytes of the directory, which is made, and what is wrong with it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = os.statvfs(directory)
    except OSError as error:
        return 0, f"{directory} cannot be made there ({error.strerror})"
    writable = os.access(str(directory), os.W_OK)
    return room.f_bavail * room.f_frsize, "" if writable else f"{directory} is not writable there"


def _told(name: str, place: str, needs: str) -> "dict[str, object]":
    directory = Path.cwd() / Path(place).expanduser()
    free, fault = _room(directory)
    return {
        "python": name if "/" in name else sys.executable,
        "version": list(sys.version_info[:3]),
        "directory": str(directory),
        "free": free,
        "fault": fault,
        "host": socket.gethostname(),
        "versions": {each: _version(each, module) for each, module, _ in json.loads(needs)},
    }


if __name__ == "__main__":
    print(sys.argv[4] + json.dumps(_told(*sys.argv[1:4])))
