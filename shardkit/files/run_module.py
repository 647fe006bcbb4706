"""`python FILE MODULE ARGUMENTS…`, with the path of this file: run a module, as `python -m` does, but safely.

`python -m` searches the current directory first, where somebody else's `typing.py` may lie. Python 3.10 has no option
against it. A file is different: Python then searches the file's folder instead, which this one removes too.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != folder]
    sys.path.append(str(folder.parents[1]))  # for an interpreter that has no shardkit of its own
    import runpy

    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
