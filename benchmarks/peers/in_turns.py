"""Lets a trainer that owns its loop take one step at a time: it runs in a thread and waits after each step."""

import queue
import threading


class InTurns:
    """Runs `train(hook)` in a thread; `hook(loss)` is what the trainer calls after every step.

    `step()` lets it take one step and returns that step's loss.
    """

    def __init__(self, train):
        self._turns, self._losses = queue.Queue(), queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)

    def step(self):
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turns.put(None)
        loss = self._losses.get()
        if isinstance(loss, BaseException):
            raise loss
        return float(loss)

    def _run(self, train):
        try:
            train(self._hook)
        except BaseException as error:
            self._losses.put(error)

    def _hook(self, loss):
        self._losses.put(loss)
        self._turns.get()
