"""Find the newest step that processes can restore from memory: each shard (block) is in the memory of some process.

Example: of 4 processes under hsdp, process 1 was killed after step 7, before it wrote the step to memory, and the
memory of process 2 is lost. Processes 0 and 2 are replicas, which need the same blocks, and so are processes 1 and 3:

    process   in memory    step 7                            step 6
    0         steps 6, 7   has its blocks                    has its blocks
    1         steps 5, 6   lacks its blocks                  has its blocks
    2         nothing      lacks its blocks, process 0 has   lacks its blocks, process 0 has
    3         steps 6, 7   has its blocks                    has its blocks

Step 7 is complete, since process 3 has the blocks that process 1 needs. If process 3 had not written step 7 either, the
result would be step 6. A process reads the segments (files) of all processes that share its folder, its own first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.memory.segment import SLOTS, Bytes, Record, Segment
from jaxshard.core.text_table import first_words
from jaxshard.distributed.together import gather_texts

POINT = "js.MemoryCheckpointer.restore"


class Recalled(NamedTuple):
    """A step that can be restored from the memory of all processes together.

    Attributes:
      run: the random name of the training run.
      step: the number of the step.
      saves: how often the training run had been copied to memory, up to this step.
      data: the position of the data.
      found: {name: bytes} of the blocks (shards) that this process has in memory.
      missing: for each process the names of the blocks that it needs and lacks.
      holders: {name of a missing block: index of a process that has the block}.
      damaged: the files of segments in which blocks of this step are damaged.
      notes: a message for each segment with damaged blocks of this or a newer step.
    """

    run: str
    step: int
    saves: int
    data: Any
    found: dict[str, Bytes]
    missing: list[frozenset[str]]
    holders: dict[str, int]
    damaged: frozenset[Path]
    notes: list[str]


def recall(segments: Sequence[Segment], needed: Callable[[int], Set[str]], process: int) -> Recalled | None:
    """Find the newest step whose blocks are all in memory, and read the blocks that this process needs.

    Every process calls this. A block is a shard; it may be in the memory of any process.

    Args:
      segments: the segments (files in shared memory) on this process's machine, its own first.
      needed: `needed(process)` returns the names of the blocks that a process needs.
      process: the index of this process.

    Returns:
      The step; None if nothing usable was saved: no step, or only an incomplete first step.

    Raises:
      ValueError: there are segments of several training runs.
      Damaged: steps were saved, but blocks of each are lost; the message names the first lost blocks of each step.
    """
    slots = [(one, slot, record) for one in segments for slot in range(SLOTS) if (record := one.record(slot))]
    mine = [(one.file.name, record.run, record.step, record.saves) for one, _, record in slots]
    seen = [tuple(row) for text in gather_texts(json.dumps(mine), POINT) for row in json.loads(text)]
    runs = sorted({run for _, run, _, _ in seen})
    if len(runs) > 1:
        steps = {run: sorted({f"step {step} in {file}" for file, of, step, _ in seen if of == run}) for run in runs}
        lines = "".join(f"\n  - run {run}: {first_words(words)}" for run, words in steps.items())
        raise ValueError(f"the memory holds steps of {len(runs)} runs; delete what all but one have left there{lines}")
    problems: list[str] = []
    notes: list[str] = []
    own = needed(process)
    for step in sorted({step for _, _, step, _ in seen}, reverse=True):
        found, damaged = _read(slots, step, own)
        notes += damaged.values()
        record = next((record for _, _, record in slots if record.step == step), None)
        about = None if record is None else [record.data, record.saves]
        texts = gather_texts(json.dumps([sorted(own - found.keys()), about]), POINT)
        answers = [json.loads(text) for text in texts]
        missing = [frozenset(names) for names, _ in answers]
        holders = find_holders(needed, missing)
        if not (lost := sorted({name for names in missing for name in names} - holders.keys())):
            data, saves = next(about for _, about in answers if about is not None)
            return Recalled(runs[0], step, saves, data, found, missing, holders, frozenset(damaged), notes)
        problems.append(f"\n  - step {step}: {first_words(lost)}")
    if all(saves <= 1 for _, _, _, saves in seen):
        return None
    raise Damaged(
        "no step is complete in memory: the memory of some processes is lost or damaged, and none has their blocks, "
        f"as under js.hsdp; go on from a checkpoint on disk{''.join(problems)}"
    )


def _read(
    slots: Sequence[tuple[Segment, int, Record]], step: int, needed: Set[str]
) -> tuple[dict[str, Bytes], dict[Path, str]]:
    """Read the needed blocks (shards) of a step from the memory segments (files) that this process sees.

    Args:
      slots: (segment, index of a slot in it, record of the slot), for every slot that contains a complete step.
      step: the number of the step.
      needed: the names of the blocks to read.

    Returns:
      ({name: bytes} of intact blocks, {file of a segment with damaged blocks: message}).
    """
    found: dict[str, Bytes] = {}
    problems: dict[Path, str] = {}
    for segment, slot, record in slots:
        if record.step != step or needed <= found.keys():
            continue
        blocks, damaged = segment.read(slot, record, [name for name in needed if name not in found])
        found |= blocks
        if damaged:
            names = first_words(sorted(damaged))
            problems[segment.file] = f"{segment.file}: step {step}: other bytes than were written, of {names}"
    return found, problems


def find_holders(needed: Callable[[int], Set[str]], missing: Sequence[frozenset[str]]) -> dict[str, int]:
    """Return {name of a missing block: lowest index of a process that has it}; omit blocks that no process has.

    `needed(process)` is the set of blocks that a process needs, `missing[process]` the blocks of them that it lacks.
    """
    wanted = frozenset().union(*missing)
    holders: dict[str, int] = {}
    for process in range(len(missing) if wanted else 0):
        for name in wanted & (needed(process) - missing[process]):
            holders.setdefault(name, process)
    return holders
