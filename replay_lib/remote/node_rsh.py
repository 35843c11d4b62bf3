"""The remote shell of rsync: run as a file, imports nothing of this package.

rsync calls it with a host and the words of its own remote half. The host is a placeholder; the ssh
command, as a list of words, and the lines that come before rsync's are in the environment.
"""

import base64
import json
import os
import shlex
import sys

if __name__ == "__main__":
    told = json.loads(os.environ["SPIKE_REPLAY_RSH"])
    script = told["before"] + "exec " + shlex.join(sys.argv[2:])
    letters = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode("ascii")
    os.execvp(told["ssh"][0], [*told["ssh"], f"exec sh -c 'eval \"$(echo {letters}|base64 -d)\"'"])
