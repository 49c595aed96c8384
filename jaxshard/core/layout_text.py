"""Format a layout as text or HTML: a summary of 20 lines, and the table of all arrays.

The summary has a row for each kind of array: "layers/*/attn/query/kernel" stands for the parameter of that name in all
layers, together with its gradient and its optimizer state where they have the same placement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from jax.sharding import Mesh

from jaxshard.core.kinds import kind_of
from jaxshard.core.mesh import axis_names, mesh_str
from jaxshard.core.placed import Placed, bytes_by_role, split_share
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.strategy_parts import Context, Pipeline
from jaxshard.core.text_table import Folded, Table, align_columns, page

LINES, COLUMNS = 20, 100
"""The lines and columns that a summary may take."""

_ROWS_IN_NOTEBOOK = 1000
"""The most arrays that a notebook lists; `explain` lists them all."""

_KINDS_IN_NOTEBOOK = 12
"""The most kinds of arrays that a notebook shows."""


class Contents(NamedTuple):
    """The facts about a layout that its text shows.

    Attributes:
      mesh: the mesh.
      batch_axes: the axes that split the rows of a batch.
      context: the `js.context` that splits the positions of these rows; None without one.
      pipeline: the `js.pipeline` that places the blocks in stages; None without one.
      num_blocks: the number of blocks in all stages.
      placed: every array with its placement.
      carried: lines about the owners of matrices, or about replicas that train independently.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    context: Context | None
    pipeline: Pipeline | None
    num_blocks: int
    placed: list[Placed]
    carried: list[str]


_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: 1536000 is "1.54 MB"."""
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def spec_str(placement: Placement) -> str:
    """Describe how the stored array is split, as in "dim 0 over data"; return "whole" if it is replicated."""
    if placement.owned:
        return placement.owned
    splits = [f"dim {dim} over {' x '.join(axis_names(e))}" for dim, e in enumerate(placement.store) if e is not None]
    return ", ".join(splits) or "whole"


def _describe_reason(placement: Placement) -> str:
    padded = f"padded to {list(placement.view.padded)}" if placement.view.is_padded else ""
    if placement.view.extra_dims:
        padded = "; ".join(filter(None, (padded, f"in pipeline order {list(placement.view.stored)}")))
    why = placement.why or ("the strategy keeps it whole" if spec_str(placement) == "whole" else "")
    memory = "in the host's memory" if placement.memory else ""
    return "; ".join(filter(None, (placement.rule, why, padded, memory)))


def explain(contents: Contents) -> str:
    """Return a table of all arrays as text, between a line about the mesh and the bytes on each device by role."""
    totals = bytes_by_role(contents.placed, contents.mesh).items()
    last = f"per device: {', '.join(f'{role} {human_bytes(count)}' for role, count in totals)}"
    return "\n".join([*_describe_mesh(contents), *contents.carried, *align_columns(_all_rows(contents)), last])


def _all_rows(contents: Contents) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("role", "array", "shape", "dtype", "spec", "bytes/device", "why")]
    for role, leaf, placement in contents.placed:
        size = human_bytes(placement.bytes_per_device(contents.mesh, leaf.dtype))
        rows.append(
            (
                role,
                leaf.path,
                str(list(leaf.shape)),
                str(leaf.dtype),
                spec_str(placement),
                size,
                _describe_reason(placement),
            )
        )
    return rows


def _describe_mesh(contents: Contents) -> list[str]:
    rows_over = " x ".join(contents.batch_axes) or "nothing"
    context = contents.context
    positions = f", positions over {' x '.join(context.axis)} ({context.how})" if context else ""
    mesh = f"mesh: {mesh_str(contents.mesh)}; batch rows over {rows_over}{positions}"
    return [mesh, *_describe_stages(contents)]


def _describe_stages(contents: Contents) -> list[str]:
    """Return a line for each device of the pipeline with the blocks that it holds, as in "pipe=0: blocks 0-1, 4-5"."""
    pipe = contents.pipeline
    if pipe is None:
        return []
    blocks = contents.num_blocks
    held: dict[int, list[str]] = {}
    for device, _, run in pipe.holders(blocks, contents.mesh):
        held.setdefault(device, []).append(_run_str(run))
    each = pipe.per_stage(blocks, contents.mesh)
    missing = pipe.stages(contents.mesh) * each - blocks
    padding = f", the last ones padded with {missing} identities" if missing else ""
    lines = [f"pipeline: {blocks} blocks in {pipe.stages(contents.mesh)} stages of {each}{padding}"]
    return lines + [f"  {pipe.axis}={device}: blocks {', '.join(runs)}" for device, runs in held.items()]


def _run_str(run: range) -> str:
    if not run:
        return "none"
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


class _Kind(NamedTuple):
    """The properties that the arrays of a group have in common.

    Attributes:
      kind: the path with stars for indices, "layers/*/fuse/kernel".
      place: the stored shape with its mesh axes, "[512 / data, 2048]".
      whole: "whole" for replicated arrays, "split by js.shard alone" for arrays that `js.tensor` does not split, and ""
        for all others.
      why: the reason why the array is replicated, or not split by `js.tensor`; "" for all others.
    """

    kind: str
    place: str
    whole: str
    why: str


class _Member(NamedTuple):
    role: str
    path: str
    bytes: int


_KIND_HEAD, _KIND_SIDES = ("largest arrays", "role", "bytes/device", "size / axes"), "<<><"


def summarize(contents: Contents) -> str:
    """Return a summary of at most 20 lines of 100 columns: by role, by kind of array, what is replicated and why."""
    groups = _group(contents)
    lines = [*_fold(_describe_mesh(contents), 4), *_fold(contents.carried, 4), *_role_table(contents).lines]
    why = _fold(_describe_whole(groups), 4)
    rows = _kind_rows(groups)
    room = LINES - len(lines) - len(why) - 2  # the heading and the last line
    shown = rows if len(rows) <= room else rows[: room - 1]
    lines += Table(shown, _KIND_SIDES, _KIND_HEAD).lines
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} other kinds of arrays")
    return "\n".join(map(_clip, [*lines, *why, f"all {_count(groups.values())}: layout.explain()"]))


def to_html(contents: Contents) -> str:
    """Return the summary as HTML for a notebook, followed by a folded table of all arrays."""
    groups = _group(contents)
    kinds = _kind_rows(groups)
    shown = kinds[:_KINDS_IN_NOTEBOOK]
    left = len(kinds) - len(shown)
    first, *rows = _all_rows(contents)
    listed = rows[:_ROWS_IN_NOTEBOOK]
    more = "" if len(listed) == len(rows) else f"... and {len(rows) - len(listed)} more: layout.explain()"
    return page(
        *_describe_mesh(contents),
        _role_table(contents),
        Table(shown, _KIND_SIDES, _KIND_HEAD),
        f"... and {left} other kind{'s' * (left > 1)} of arrays" if left else "",
        *_describe_whole(groups),
        Folded(f"all {len(rows):,} arrays", [Table(listed, "<<<<<><", first), more]),
    )


def _group(contents: Contents) -> dict[_Kind, list[_Member]]:
    """Group the arrays of a layout that have the same kind of path, the same stored shape and the same split.

    Paths are of one kind if they differ only in the index of a layer. An array of optimizer state, such as a moment of
    Adam, counts under the path of its parameter.
    """
    placed = contents.placed
    params = {one.leaf.path: one.leaf.shape for one in placed if one.role == "param"}
    groups: dict[_Kind, list[_Member]] = {}
    for role, leaf, placement in placed:
        path = _param_of(leaf.path, leaf.shape, params) if role == "opt" else leaf.path
        size = placement.bytes_per_device(contents.mesh, leaf.dtype)
        key = _Kind(kind_of(path), _describe_place(placement), *_find_reason(placement))
        groups.setdefault(key, []).append(_Member(role, path, size))
    return groups


def _param_of(path: str, shape: tuple[int, ...], params: dict[str, tuple[int, ...]]) -> str:
    """Return the path of the parameter that an array of optimizer state belongs to, or its own path if there is none.

    With "layer/w" among `params`, "0/mu/layer/w" gives "layer/w" if both have the same shape.
    """
    words = path.split("/")
    ends = ("/".join(words[first:]) for first in range(len(words)))
    return next((end for end in ends if params.get(end) == shape), path)


def _describe_place(placement: Placement) -> str:
    """Write the stored shape with its mesh axes: "[512 / data, 2048 / tensor]"."""
    sizes = zip(placement.view.stored, placement.store, strict=True)
    dims = (f"{size} / {' x '.join(axis_names(entry))}" if entry is not None else str(size) for size, entry in sizes)
    where = " on the host" if placement.memory else ""
    return f"[{', '.join(dims)}]{' padded' if placement.view.is_padded else ''}{where}"


def _find_reason(placement: Placement) -> tuple[str, str]:
    """Return (in which way an array is not split, the reason), such as ("whole", "small, under 16384 elements").

    The first part may also be "split by js.shard alone", for an array that `js.tensor` does not split. For all other
    arrays return ("", "").
    """
    if placement.owned:
        return "", ""
    if not axes_of(placement.store):
        why = re.sub(r"^small: \d+ elements, under (\d+)$", r"small, under \1 elements", placement.why)
        return "whole", why or placement.rule or "the strategy keeps it whole"
    unsplit = bool(placement.rule) and not axes_of(placement.use)
    return ("split by js.shard alone", placement.rule) if unsplit else ("", "")


def _role_table(contents: Contents) -> Table:
    counts = [one.role for one in contents.placed]
    rows: list[tuple[str, ...]] = []
    for role, size in bytes_by_role(contents.placed, contents.mesh).items():
        if role in counts:
            share = f"{split_share(contents.placed, contents.mesh, role):.1%}"
            rows.append((role, f"{counts.count(role):,}", human_bytes(size), share))
    return Table(rows, "<>>>", ("role", "arrays", "bytes/device", "split"))


def _kind_rows(groups: dict[_Kind, list[_Member]]) -> list[tuple[str, ...]]:
    """Return a row of the summary's table for each kind of array, in decreasing order of bytes."""
    merged: dict[tuple[str, str], list[_Member]] = {}
    for group, members in groups.items():
        merged.setdefault((group.kind, group.place), []).extend(members)
    rows: list[tuple[str, ...]] = []
    for (kind, place), members in sorted(merged.items(), key=lambda item: -_bytes(item[1])):
        paths = {one.path for one in members}
        times = f" x {len(paths)}" if len(paths) > 1 else ""
        name = _end_of(kind if times else members[0].path, 40 - len(times)) + times
        roles = " ".join(dict.fromkeys(one.role for one in members))
        rows.append((name, roles, human_bytes(_bytes(members)), place))
    return rows


def _describe_whole(groups: dict[_Kind, list[_Member]]) -> list[str]:
    """Return a line for each reason why arrays are replicated, in decreasing order of bytes."""
    reasons: dict[tuple[str, str], list[_Member]] = {}
    for group, members in groups.items():
        if group.whole:
            reasons.setdefault((group.whole, group.why), []).extend(members)
    return [
        f"{whole}: {_count([members])}, {human_bytes(_bytes(members))}: {_name_rule(why)}"
        for (whole, why), members in sorted(reasons.items(), key=lambda item: -_bytes(item[1]))
    ]


def _name_rule(why: str) -> str:
    """Shorten the reason of a rule for readers: "whole: *pos_embed*" becomes "the rule *pos_embed*"."""
    pattern = why.removeprefix("whole: ")
    return f"the rule {pattern}" if pattern != why and not why.endswith("kernel") else pattern


def _count(groups: Iterable[list[_Member]]) -> str:
    count = sum(map(len, groups))
    return f"{count:,} array{'s' if count != 1 else ''}"


def _bytes(members: Iterable[_Member]) -> int:
    return sum(one.bytes for one in members)


def _fold(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[: most - 1], f"... and {len(lines) - most + 1} more such lines"]


def _end_of(path: str, width: int) -> str:
    return path if len(path) <= width else "..." + path[3 - width :]


def _clip(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."
