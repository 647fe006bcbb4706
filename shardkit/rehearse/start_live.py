"""Start the live ranks of a rehearsal: `start_live.py RANKS.json COMMAND…`, one process for each.

Runs as a file of its own, in the rehearsal's network, and imports nothing of shardkit. It ends when all ranks have, or
with the exit code of the first that fails.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def main() -> int:
    variables, command = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = {
        process.pid: process
        for process in (subprocess.Popen(command, env={**os.environ, **address, **rank}) for rank in variables)
    }
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if ranks.pop(pid, None) is not None and code:
            return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
