"""One process of a peer, in the interpreter that has its packages: `python worker.py TASK`, TASK a JSON object.

It answers on standard output: after the first step what it took to get there, then one line for each number of steps
that it reads from standard input.
"""

import importlib
import json
import os
import resource
import sys
import time

BEGAN = time.perf_counter()


def peak_bytes():
    """The most memory that this process ever held, of what it was given at the start too."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main():
    task = json.loads(sys.argv[1])
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"])  # before a library counts the cores to size its thread pools
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may be taken for an answer

    def answer(**facts):
        print(json.dumps(facts), file=answers, flush=True)

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from shape import Shape

    program = importlib.import_module(task["program"])
    imported = peak_bytes()
    step, count = program.build(Shape(**task["shape"]), task["rank"], task["meeting"], **task["options"])
    built = time.process_time()
    loss = step()
    answer(
        first_loss=loss,
        parameters=count() if callable(count) else count,
        first_step_cpu=time.process_time() - built,
        cpu=time.process_time(),
        wall=time.perf_counter() - BEGAN,
        imported_bytes=imported,
    )
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        losses = [step() for _ in range(int(line))]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        answer(cpu=cpu, wall=wall, loss=losses[-1], peak_bytes=peak_bytes())
    os._exit(0)  # the other ranks may be gone already, and libraries wait for them on the way out


main()
