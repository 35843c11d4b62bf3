"""Commands on a node, through ssh. Nothing that varies is ever read by a shell as it is written.

The ssh command is split into words here and started without a local shell. On the node the login
shell, whichever it is, sees one fixed form: ``exec sh -c 'eval "$(echo LETTERS|base64 -d)"'``. What
the letters stand for is a script for POSIX ``sh``, in which every value is quoted by
:func:`quoted`. So paths may hold spaces, quotes, newlines and dollar signs.
"""

from __future__ import annotations

import base64
import shlex
import subprocess
from dataclasses import dataclass

from replay_lib.errors import NodeError, UsageError

#: A command that only looks at the node or prepares it; a slow shared file system takes seconds.
SECONDS = 120
#: ssh's own exit status where the connection failed or broke.
SSH_FAILED = 255
_LAST = 600  # characters of what was said on stderr


@dataclass(frozen=True)
class Node:
    """``ssh`` is the command up to the node's name, as words; a remote command is added to it."""

    ssh: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Node:
        """From what ``--ssh`` takes, as in ``ssh -p 26461 root@host``; UsageError if it is none."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--ssh: found {text!r} ({error}), expected {_FORM}") from error
        if len(words) < 2 or "\0" in text:
            raise UsageError(f"--ssh: found {text!r}, expected {_FORM}")
        return cls(tuple(words))

    @property
    def told(self) -> str:
        """The ssh command as somebody would type it."""
        return shlex.join(self.ssh)

    def command(self, script: str) -> list[str]:
        """The local command, as words, that runs ``script`` under ``sh`` on the node."""
        return [*self.ssh, wrapped(script)]

    def run(self, script: str, *, given: bytes = b"", seconds: float = SECONDS) -> str:
        """What ``script`` prints; ``given`` is its stdin.

        NodeError where there is no connection, it takes longer than ``seconds``, or it fails.
        """
        done = self.attempt(script, given=given, seconds=seconds)
        if done.returncode != 0:
            raise NodeError(
                f"node {self.told}: a command there failed with status {done.returncode}: "
                f"{last_words(done.stderr)}"
            )
        return done.stdout.decode("utf-8", "replace")

    def attempt(
        self, script: str, *, given: bytes = b"", seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        """As :meth:`run`, but a script that fails is the caller's matter."""
        try:
            done = subprocess.run(
                self.command(script), input=given, capture_output=True, timeout=seconds, check=False
            )
        except OSError as error:
            found = f"{self.ssh[0]!r} cannot be started ({error.strerror})"
            raise UsageError(f"--ssh: {found}; expected {_FORM}") from error
        except subprocess.TimeoutExpired as error:
            raise NodeError(
                f"node {self.told}: no answer within {seconds:g} s; is it up, and does this "
                "command log in without asking anything?"
            ) from error
        if done.returncode == SSH_FAILED:
            raise NodeError(f"node {self.told}: no connection: {last_words(done.stderr)}")
        return done


_FORM = 'an ssh command with the node\'s name, as in "ssh -p 26461 root@host"'


def quoted(value: object) -> str:
    """``value`` as one word of a POSIX shell script."""
    return shlex.quote(str(value))


def wrapped(script: str) -> str:
    """``script`` as a command line that means the same to every login shell."""
    letters = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode("ascii")
    return f"exec sh -c 'eval \"$(echo {letters}|base64 -d)\"'"


def last_words(said: bytes) -> str:
    """The end of what a command said on stderr, for an error."""
    text = said.decode("utf-8", "replace").strip()
    return text[-_LAST:] if text else "it said nothing"
