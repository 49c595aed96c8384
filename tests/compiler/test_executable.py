"""A compiled step is saved and loaded without compiling, and a file of anything else is refused."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

BATCH = {"x": np.ones((16, 8), np.float32), "y": np.arange(16, dtype=np.float32)}


def init_fn(key):
    return {"weight": jax.random.normal(key, (8, 16)) / 8, "bias": jnp.zeros(16)}


def loss_fn(params, batch, key):
    error = (batch["x"] @ params["weight"] + params["bias"]).sum(-1) - batch["y"]
    return js.Mean(jnp.sum(error**2), error.size)


def make(rate=0.1):
    tx = optax.sgd(rate)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)
    return js.make_step(loss_fn, tx, layout, engine=js.explicit()), js.init(init_fn, tx, layout, 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a compiled step, and the loss and weights of two steps that it takes."""
    file = tmp_path_factory.mktemp("programs") / "deeper" / "a.step"
    step, run = make()
    step.save_compiled(BATCH, file)
    return file, two_steps(step, run)


@pytest.fixture(scope="module")
def unused():
    """A step of the same program, which refuses files."""
    return make()[0]


@pytest.fixture
def copied(saved, tmp_path):
    file = tmp_path / "copied.step"
    file.write_bytes(saved[0].read_bytes())
    file.chmod(0o600)
    return file


def two_steps(step, run):
    run, _ = step(run, BATCH)
    run, metrics = step(run, BATCH)
    return float(metrics["loss"]), np.asarray(run.params["weight"])


def compilations(fn):
    """Call a function, and count the programs that XLA compiles or loads meanwhile by way of JAX."""
    seen = []

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(seen)


def test_a_loaded_step_gives_the_same_bits_and_compiles_nothing(saved):
    file, (loss, weight) = saved
    step, run = make()
    assert compilations(lambda: step.load_compiled(BATCH, file)) == 0
    found = two_steps(step, run)
    assert found[0] == loss
    np.testing.assert_array_equal(found[1], weight)
    with pytest.raises(ValueError, match="another step for the other shape"):
        step(make()[1], {name: x[:8] for name, x in BATCH.items()})


def test_another_program_is_refused_by_what_differs(saved):
    step, _ = make(rate=0.2)
    with pytest.raises(ValueError, match=r"compiled from something else; compile it again here\n  program: \w+, here"):
        step.load_compiled(BATCH, saved[0])


def test_another_version_and_damaged_bytes_are_refused(copied, unused):
    content = copied.read_bytes()
    line, _, payload = content.partition(b"\n")
    header = json.loads(line)
    copied.write_bytes(json.dumps(header | {"jax": "0.0.1"}).encode() + b"\n" + payload)
    with pytest.raises(ValueError, match=f"here\n  jax: 0.0.1, here {jax.__version__}$"):
        unused.load_compiled(BATCH, copied)
    copied.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"copied.step is damaged: .* copy it again"):
        unused.load_compiled(BATCH, copied)
    copied.write_bytes(b"\x80\x04" + content)
    with pytest.raises(ValueError, match=r"is no compiled step; write one with step.save_compiled"):
        unused.load_compiled(BATCH, copied)


def test_a_file_that_others_may_write_is_refused(copied, unused):
    copied.chmod(0o666)
    with pytest.raises(PermissionError, match=r"other users may write .*copied.step \(mode 666\).*chmod go-w"):
        unused.load_compiled(BATCH, copied)
    copied.chmod(0o600)
    copied.parent.chmod(0o777)
    with pytest.raises(PermissionError, match=r"other users may write .* \(mode 777\)"):
        unused.load_compiled(BATCH, copied)


JOURNEY = """
import sys
import jax
import jaxshard as js
js.simulate_devices(8)
sys.path.insert(0, sys.argv[1])
from tests.compiler.test_executable import BATCH, compilations, make, two_steps
step, run = make()
if sys.argv[2] == "save":
    step.save_compiled(BATCH, sys.argv[3])
    count = 1
else:
    count = compilations(lambda: step.load_compiled(BATCH, sys.argv[3]))
print("result", count, two_steps(step, run)[0].hex())
"""


@pytest.mark.slow
def test_a_step_that_one_process_compiled_runs_in_another(tmp_path, request):
    def journey(what):
        words = [sys.executable, "-c", JOURNEY, str(request.config.rootpath), what, str(tmp_path / "a.step")]
        made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert made.returncode == 0, made.stderr
        return made.stdout.split("result")[1].split()

    (_, loss), (count, loaded) = journey("save"), journey("load")
    assert (count, loaded) == ("0", loss)
