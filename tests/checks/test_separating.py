"""Batches that tell devices apart."""

import numpy as np

from jaxshard.checks.separating import make_separating as separate


def make_separating(batch, parts):
    return separate(batch, {name: x.ndim > 0 and name != "table" for name, x in batch.items()}, parts)


def test_each_batch_separates_in_its_own_way():
    batch = {
        "x": np.array([[3.0], [1], [4], [-1], [5], [9], [2], [6]]),
        "y": np.arange(8) % 2,
        "z_mask": np.arange(8) % 2.0,
        "s": np.float64(2),
        "table": np.arange(3.0),
    }
    found = dict(make_separating(batch, 4))
    assert list(found) == [
        "rows sorted by x", "rows sorted by y", "one row for each device", "numbers moved apart between devices",
    ]  # fmt: skip
    assert found["rows sorted by x"]["x"][:, 0].tolist() == [-1, 1, 2, 3, 4, 5, 6, 9]
    assert found["rows sorted by y"]["y"].tolist() == [0] * 4 + [1] * 4
    assert found["one row for each device"]["x"][:, 0].tolist() == [3, 3, 4, 4, 5, 5, 2, 2]
    moved = found["numbers moved apart between devices"]
    step = 2 * batch["x"].std()
    assert np.allclose(moved["x"][:, 0] - batch["x"][:, 0], np.array([1, 1, -1, -1, 1, 1, -1, -1]) * step)
    assert (moved["z_mask"] == batch["z_mask"]).all() and moved["s"] == 2
    assert all((one["table"] == np.arange(3)).all() for one in found.values())
    positive = dict(make_separating({"x": np.arange(1.0, 5)}, 4))["numbers moved apart between devices"]["x"]
    assert positive.tolist() == [2, 1, 6, 2]
