"""Arrays of torch and rows of Hugging Face: taken wherever a batch is, or one sentence that says what to write."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import normal

TX = optax.sgd(0.1)
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = (np.arange(32) % 3).astype(np.int32)


class Tensor:
    """Behaves as torch.Tensor: its dtype is none of NumPy's, and it can't be read while it requires a gradient."""

    __module__ = "torch"

    def __init__(self, array, *, dtype=None, requires_grad=False):
        self._array, self.requires_grad = np.asarray(array), requires_grad
        self.dtype = dtype or f"torch.{self._array.dtype}"
        self.shape, self.ndim = self._array.shape, self._array.ndim

    def __len__(self):
        return len(self._array)

    def __getitem__(self, index):
        return Tensor(self._array[index], dtype=self.dtype, requires_grad=self.requires_grad)

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array if dtype is None else self._array.astype(dtype)

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return jnp.asarray(self._array).__dlpack__(**options)

    def __dlpack_device__(self):
        return jnp.asarray(self._array).__dlpack_device__()


class Dataset:
    """Behaves as a map-style data set of torch: single examples by number."""

    __module__ = "torch.utils.data.dataset"

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return {"x": Tensor(X[number]), "y": int(Y[number])}


class DataLoader:
    """Behaves as torch's: batches in turn, with a length but without an index."""

    def __init__(self, tensor=Tensor):
        self.tensor = tensor

    def __len__(self):
        return 4

    def __iter__(self):
        return ({"x": self.tensor(X[i : i + 8]), "y": self.tensor(Y[i : i + 8])} for i in range(0, 32, 8))


def init_fn(key):
    return {"w": normal(0, 4, 3)}


def loss_fn(params, batch, key=None):
    errors = batch["x"].astype(jnp.float32) @ params["w"] - jax.nn.one_hot(batch["y"], 3)
    return js.Mean(jnp.square(errors).sum(), errors.size)


@cache
def layout():
    return js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, TX)


@cache
def step():
    return js.make_step(loss_fn, TX, layout(), engine=js.explicit())


@cache
def first():
    return js.init(init_fn, TX, layout(), 0)


def start():
    return js.clone(first())


def last_loss(batches):
    records = []
    js.fit(start(), step(), batches, steps=4, callbacks=[records.append])
    return records[-1].metrics["loss"]


WAYS = {
    "fit": lambda: DataLoader(),
    "batches": lambda: js.batches(DataLoader(), layout()),
    "local_batches": lambda: js.local_batches(DataLoader(), layout()),
    "examples": lambda: js.batches(js.data.examples(Dataset(), batch=8, seed=None), layout()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loader_of_torch_trains_as_numpy_does(way):
    assert last_loss(WAYS[way]()) == numpy_loss()


@cache
def numpy_loss():
    return last_loss(DataLoader(np.asarray))


@cache
def eval_step():
    return js.make_eval_step(lambda params, batch: {"loss": loss_fn(params, batch)}, layout())


@cache
def gradient():
    return js.value_and_grad(loss_fn, layout())


BATCH = {"x": X[:8], "y": Y[:8]}
CALLS = {
    "evaluate": lambda b: js.evaluate(eval_step(), first(), [b])["loss"],
    "value_and_grad": lambda b: gradient()(first(), b)[0],
    "make_apply": lambda b: js.make_apply(lambda params, x: (x @ params["w"]).sum(), layout())(first(), b["x"]),
    "init_from": lambda b: js.init(init_fn, TX, layout(), 0, init_from={"w": b["x"][:4, :3]}).params["w"].sum(),
    "windows": lambda b: js.data.windows(b["y"], batch=2, seq=3, seed=0).rows(0, np.arange(2))["tokens"].sum(),
    "attribution": lambda b: js.attribution(
        lambda params, x: x @ params["w"], first(), b["x"], layout(), target=b["y"]
    ).values.sum(),
    "audit": lambda b: js.audit(js.make_step(loss_fn, TX, layout()), b).found_bytes,
    "predict": lambda b: js.plan.predict(layout(), loss_fn, b, tx=TX).as_dict(),
    "parity": lambda b: js.parity(init_fn, loss_fn, TX, js.ddp(), js.make_mesh(data=8), b).ok,
}


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_are_taken_by_all_that_takes_arrays(name):
    tensors = jax.tree.map(Tensor, BATCH)
    assert CALLS[name](tensors) == CALLS[name](BATCH)


def test_what_numpy_has_no_dtype_for_is_read_by_dlpack():
    half = X[:8].astype(jnp.bfloat16)
    found = gradient()(first(), {"x": Tensor(half, dtype="torch.bfloat16"), "y": Tensor(Y[:8])})[0]
    assert found == gradient()(first(), {"x": half, "y": Y[:8]})[0]


def test_a_tensor_that_requires_a_gradient_is_named_with_what_to_write():
    batch = {"x": Tensor(X[:8], requires_grad=True), "y": Tensor(Y[:8])}
    message = r"(?s)can't be read; pass NumPy arrays\n  - x: torch.Tensor: .* Use tensor.detach\(\).numpy\(\)"
    for call in (lambda: step()(start(), batch), lambda: eval_step()(first(), batch), lambda: step().compile(batch)):
        with pytest.raises(TypeError, match=message):
            call()


ROW = r"js.data.examples\(dataset, batch=..., seed=...\)"


def test_lists_of_numbers_are_refused_with_what_to_write():
    rows = [{"x": X[i].tolist(), "y": int(Y[i])} for i in range(8)]
    columns = {"x": X[:8].tolist(), "y": Y[:8].tolist()}
    for call in (
        lambda: step()(start(), columns),
        lambda: step()(start(), {"x": X[:8], "y": Y[:8].tolist()}),
        lambda: step()(start(), {"x": X[:8].tolist(), "y": Y[:8]}),
        lambda: eval_step()(first(), columns),
        lambda: next(js.batches([columns], layout())),
        lambda: next(js.local_batches([columns], layout())),
        lambda: next(js.batches(js.data.examples(rows, batch=8, seed=None), layout())),
    ):
        with pytest.raises(TypeError, match=r"(?s)a list of Python numbers.*with_format\(\"numpy\"\)"):
            call()


def test_lists_of_scalars_beside_rows_are_scalars():
    def loss(params, batch, key):
        return loss_fn(params, batch).value + sum(batch["scales"])

    other = js.make_step(loss, TX, layout())
    assert float(other(start(), BATCH | {"scales": [0.5, 0.25]})[1]["loss"]) > 0.75


def test_a_data_set_of_rows_is_no_source_of_batches():
    with pytest.raises(TypeError, match=rf"this Dataset are single rows; make batches of them with {ROW}"):
        js.batches(Dataset(), layout())
