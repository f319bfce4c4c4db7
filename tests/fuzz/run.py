"""python tests/fuzz/run.py [--cases N] [--seed S] [--only WORD]: draws calls of every mechanism and holds them.

A failing call is printed with the lines that repeat it; the exit status is 1.
"""

import argparse
import collections
import pathlib
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fuzz.draw import DRAWS, drawn
from fuzz.hold import check
from fuzz.malformed import complaints

REPRODUCER = """
import sys; sys.path.insert(0, "tests")
from fuzz.draw import drawn
from fuzz.hold import check
call = drawn({mechanism!r}, {seed})
print(call)
check(call)
"""


def fault(mechanism, seed):
    """None, or what is wrong with the call of this seed."""
    call = drawn(mechanism, seed)
    if call is None:
        return None
    try:
        check(call)
    except Exception as error:
        where = [
            f for f in traceback.extract_tb(error.__traceback__) if "refattn" in f.filename or "backends" in f.filename
        ]
        at = f"\n    at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
        return f"{type(error).__name__}: {error}{at}\n    {call}{REPRODUCER.format(mechanism=mechanism, seed=seed)}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="")
    parser.add_argument("--brief", action="store_true", help="count faults by their first line")
    options = parser.parse_args()
    names = [n for n in DRAWS if options.only in n]
    print(f"seed {options.seed}, {options.cases} calls of {len(names)} mechanisms")
    found = []
    for i in range(options.cases):
        text = fault(names[i % len(names)], options.seed + i // len(names))
        if text:
            found.append((names[i % len(names)], text))
            if not options.brief:
                print(f"\n--- fault {len(found)}\n{text}")
    found += [(n, text) for n in names for text in complaints(n)]
    counts = collections.Counter((n, text.split("\n")[0][:110]) for n, text in found)
    for (name, line), count in counts.most_common():
        print(f"{count:5} {name}: {line}")
    print(f"{len(found)} faults")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
