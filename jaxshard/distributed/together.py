"""Raise an error in all processes if any of them fails.

If only one process raises, the others wait forever in their next collective. So where an error may occur in only some
processes (each reads its own files, or only the first creates a folder), all processes tell each other which failed,
and raise together.

Every process calls these functions at the same point of the program, with the same text `point`, which names this point
in messages about missing processes. The processes first wait for each other through the coordinator, without a time
limit for late processes, and then all-gather four bytes per process (`gather_texts` reads texts from the coordinator
instead). If there is only one process, nothing is communicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshard.core.compat import delete_keys, list_keys, put_key
from jaxshard.core.tree import raise_all
from jaxshard.distributed.agree import all_peers

_rooms = itertools.count()  # equal in all processes, since all gather texts in the same order


def gather_ints(value: int, point: str) -> list[int]:
    """Collect one small integer from every process.

    Args:
      value: this process's integer, which fits into an int32.
      point: the name of this point of the program, for messages.

    Returns:
      The integers of all processes, by process index.
    """
    peers = all_peers()
    if peers is None:
        return [value]
    peers.meet(point)  # without a time limit; the collective below would time out for a slow process
    values: list[int] = np.asarray(multihost_utils.process_allgather(np.int32(value))).ravel().tolist()
    return values


def gather_texts(text: str, point: str) -> list[str]:
    """Collect a text from every process through the coordinator, without using devices.

    Args:
      text: this process's text, which must not be empty.
      point: the name of this point of the program, for messages.

    Returns:
      The texts of all processes, by process index.
    """
    peers = all_peers()
    if peers is None:
        return [text]
    room = next(_rooms)
    put_key(peers.store, f"jaxshard/gather/{room}/{peers.process}", text)
    peers.meet(point)
    if room and peers.process == peers.processes[0]:  # all processes that met here have read the texts before
        delete_keys(peers.store, f"jaxshard/gather/{room - 1}")
    found = list_keys(peers.store, f"jaxshard/gather/{room}/")
    return [found[str(process)] for process in peers.processes]


def failed_processes(failed: bool, point: str) -> list[int]:
    """Return the indices of the processes in which `failed` is True. All processes call it, and get the same list."""
    return [index for index, value in enumerate(gather_ints(failed, point)) if value]


def raise_together(problems: Iterable[str], error: type[Exception], headline: str, *, point: str) -> None:
    """Raise an error in all processes if any of them has found a problem. All processes call it.

    Args:
      problems: a message for each problem that this process found.
      error: the type of the error.
      headline: the first line of the error's message.
      point: the name of this point of the program, for messages.

    Raises:
      error: in all processes. The message has a line for each problem of this process, and a line for each other
        process that has found a problem.
    """
    found = list(problems)
    elsewhere = (index for index in failed_processes(bool(found), point) if index != jax.process_index())
    found += [f"process {index} found something wrong, and names it" for index in elsewhere]
    raise_all(found, error, headline)


def call_in_first_process(fn: Callable[[], int], point: str) -> int:
    """Call a function in process 0 only, and return its result in all processes. All processes call this.

    Args:
      fn: returns True or False, or a number that is not negative.
      point: the name of this point of the program, for messages.

    Raises:
      OSError, ValueError: the error of the function, in process 0; in other processes an OSError that names process 0.
    """
    answer, failure = 0, None
    if jax.process_index() == 0:
        try:
            answer = fn()
        except (OSError, ValueError) as error:
            failure = error
    status = getattr(failure, "exit_status", 1)
    first = gather_ints(int(answer) if failure is None else -status, point)[0]
    if first < 0 and failure is None:
        failure = OSError(f"{point}: process 0 failed, and says why")
        failure.exit_status = -first  # type: ignore[attr-defined]  # all processes end with the same status
    if failure is not None:
        raise failure
    return first
