"""As much of a layout as the data needs, and a source that knows what was read of it."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.core.mesh import make_mesh
from jaxshard.core.strategy import batch


class Rows:
    """A layout with rows over some mesh axes."""

    def __init__(self, *axes, **mesh):
        self.mesh, self.axes = make_mesh(**mesh), axes

    @property
    def strategy(self):
        return batch(*self.axes)

    def batch_sharding(self, array):
        return NamedSharding(self.mesh, P(self.axes) if array.shape else P())

    def batch_shardings(self, batch):
        return jax.tree.map(self.batch_sharding, batch)


class Spy:
    """A source of 16 rows that remembers the steps and rows that were read."""

    batch = 16

    def __init__(self):
        self.steps, self.read = [], []

    def rows(self, step, rows):
        self.steps.append(step)
        self.read += list(rows)
        return {"x": np.full((len(rows), 3), step, np.float32), "y": rows.astype(np.int32)}
