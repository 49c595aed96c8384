"""The compiled programs of a transfer, and the memory of each device while it runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxshard.reshard import programs

PERMUTE = re.compile(r"= (\w+?)(\d+)\[([\d,]*)\]\S* collective-permute\(.*source_target_pairs=\{(\{.*?\})\}")
OTHERS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-broadcast")


class Call(NamedTuple):
    """A call of a compiled program: "cutter", "sender" or "inserter"."""

    name: str
    program: Any


class Recorder:
    """Compiles the programs of transfers itself, and looks at the devices after each of them.

    Attributes:
      calls: the programs that ran.
      most: the largest number of bytes of live arrays on each device.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[Call] = []
        self.most = Counter[jax.Device]()
        self._compiled: dict[Any, Any] = {}
        self._before = {shard[:2] for shard in live_shards()}
        for name in ("cutter", "sender", "inserter"):
            monkeypatch.setattr(programs, name, self._wrap(name, getattr(programs, name)))

    def _wrap(self, name: str, make: Any) -> Any:
        def get(*key: Any) -> Any:
            def call(*args: Any) -> Any:
                shapes = tuple((x.shape, x.dtype, str(getattr(x, "sharding", ""))) for x in args)
                if (name, key, shapes) not in self._compiled:
                    self._compiled[name, key, shapes] = make(*key).lower(*args).compile()
                program = self._compiled[name, key, shapes]
                made = program(*args)
                self.calls.append(Call(name, program))
                now = Counter[jax.Device]()
                for device, place, size in live_shards():
                    now[device] += size if (device, place) not in self._before else 0
                self.most |= now
                return made

            return call

        return get

    def bytes_sent(self) -> int:
        """The bytes of all collective-permutes that ran; other collectives fail."""
        total = 0
        for call in self.calls:
            text = call.program.as_text()
            assert not any(f" {kind}(" in text for kind in OTHERS), call.name
            found = PERMUTE.findall(text)
            assert bool(found) == (call.name == "sender")
            for _, bits, shape, pairs in found:
                total += math.prod(map(int, filter(None, shape.split(",")))) * int(bits) // 8 * pairs.count("{")
        return total


def live_shards() -> set[tuple[jax.Device, int, int]]:
    """(device, address, bytes) of every buffer of JAX."""
    shards = (shard for x in jax.live_arrays() for shard in data_of(x).addressable_shards)
    return {(shard.device, shard.data.unsafe_buffer_pointer(), shard.data.nbytes) for shard in shards}


def data_of(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def temporary_bytes(program: Any) -> int:
    """The bytes that a program needs besides its arguments and results."""
    return int(np.asarray(program.memory_analysis().temp_size_in_bytes))
