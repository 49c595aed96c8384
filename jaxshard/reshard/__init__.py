"""Move the arrays of a run from one layout to another, also to other devices and other processes.

    blocks.py      find the blocks: the boxes of an array that a source shard and a target shard have in common
    schedule.py    cut the blocks into pieces, choose who sends each, and order them in rounds
    plan.py        the bytes and the peak memory of a transfer, before it runs (`js.plan_transfer`)
    programs.py    the compiled programs that cut, send and insert the pieces of an array
    transfer.py    `js.transfer`, for runs and parameters

Imports `core/`, `distributed/` and `training/`.
"""
