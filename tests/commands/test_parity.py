"""`jaxshard parity`: what it prints and writes, and its exit status."""

import json

import jax
import pytest

from jaxshard.commands.main import main

from ..toys import quick_compile

FILE = '''
import jax, jax.numpy as jnp, numpy as np, optax, jaxshard as js

ROWS = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)

def init(key):
    return {"w": jax.random.normal(key, (5, 3)), "b": jnp.zeros(3)}

def losses(params, batch):
    return ((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - 1) ** 2).sum(-1)

def right():
    return init, lambda params, batch, key: js.Mean(losses(params, batch).sum(), 16 / 16 * len(batch["x"])), \\
        optax.adam(0.1), {"x": ROWS}

def wrong():
    """The weight is that of the global batch, whatever the rows at hand; no trace shows it."""
    def loss(params, batch, key):
        return js.Mean(losses(params, batch).sum(), 16.0 * jnp.isfinite(batch["x"]).max())

    return init, loss, optax.sgd(0.1), {"x": ROWS}

def refused():
    """The weight of the global batch again, which the trace shows."""
    return init, lambda params, batch, key: js.Mean(losses(params, batch).sum(), 16.0), optax.sgd(0.1), {"x": ROWS}

def opaque():
    return init, lambda params, batch, key: losses(params, batch).mean(), optax.sgd(0.1), {"x": ROWS}

def uneven():
    return *right()[:3], {"x": ROWS[:13]}

def fault():
    return init, lambda params, batch, key: jnp.dot(params["w"], batch["x"]), optax.sgd(0.1), {"x": ROWS}

def own_error():
    def loss(params, batch, key):
        raise ValueError("mine")
    return init, loss, optax.sgd(0.1), {"x": ROWS}
'''


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """The folder with the user's file, as the current one."""
    assert jax.device_count() == 8
    folder = tmp_path_factory.mktemp("parity")
    (folder / "parity_programs.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch, quick_compile():
        patch.chdir(folder)
        yield


def run(function, *flags):
    return main(["parity", f"parity_programs.py:{function}", *flags])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "flags", [["--strategy", "zero2"], ["--engine", "auto", "--mesh", "replica=2,data=4", "--strategy", "hsdp"]]
)
def test_a_right_program_passes(flags, capsys):
    """Loss to 1e-6, gradients and updates to 1e-5."""
    assert run("right", *flags, "--json", "-") == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["ok"] and result["failures"] == result["why"] == result["notes"] == []
    assert [(one["what"], one["leaf"]) for one in result["arrays"]] == [
        ("loss", ""), ("gradient", "b"), ("gradient", "w"), ("update", "b"), ("update", "w"),
    ]  # fmt: skip
    assert all(one["ok"] and 0 <= one["difference"] <= one["allowed"] <= 1e-5 for one in result["arrays"])
    assert result["loss"]["sharded"] == pytest.approx(result["loss"]["one_device"], rel=1e-6)
    assert result["model"] == "parity_programs.py:right" and result["devices"] == 8 and result["seconds"] > 0
    assert result["mesh"] == ({"data": 8} if "hsdp" not in flags else {"replica": 2, "data": 4})
    assert "  compiling for one device ...\n  compiling for " in output.err
    assert "against one device, in f32: all 5 arrays agree" in output.err and "\x1b" not in output.err


def test_a_wrong_program_fails_with_the_names_of_its_leaves(capsys, tmp_path):
    assert run("wrong", "--json", str(tmp_path / "r.json")) == 1
    output = capsys.readouterr()
    assert "8 times too small, and 8 is the size of axis 'data'" in output.out
    last = output.out.rstrip().splitlines()[-1]
    assert last.endswith("in f32: 3 of 5 arrays differ: loss, gradient b, gradient w") and output.err == ""
    assert [line.split()[-1] for line in output.out.splitlines() if line.split()[:1] in (["b"], ["w"])] == [
        "DIFFERS"
    ] * 2
    result = json.loads((tmp_path / "r.json").read_text())
    assert not result["ok"] and result["failures"] == ["loss", "gradient b", "gradient w"] and len(result["why"]) == 2
    assert result["arrays"][0]["difference"] == pytest.approx(7 / 8, rel=1e-3)
    assert run("refused") == 1
    output = capsys.readouterr().out
    assert "that of the whole batch is 16, those of its 8 parts add up to 128" in " ".join(output.split())
    assert output.rstrip().endswith("1 of 1 arrays differ: loss")


@pytest.mark.parametrize(
    ("function", "flags", "message"),
    [
        ("right", ["--batch", "8"], "parity_programs.py:right makes its own model and batch"),
        ("uneven", [], "13 rows, which the 8 devices of axis 'data' do not divide"),
        ("opaque", [], "js.explicit needs a loss that says its weight; return js.Mean(total, weight)"),
    ],
)
def test_user_errors_are_one_line_and_exit_status_2(function, flags, message, capsys):
    assert run(function, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxshard: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("function, error, message", [("fault", TypeError, "dot"), ("own_error", ValueError, "mine")])
def test_faults_of_the_user_keep_their_traceback(function, error, message):
    with pytest.raises(error, match=message):
        run(function)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--mesh", "data=2,tensor=4", "--strategy", "zero2", "--microbatches", "2"]])
def test_a_ready_made_size_passes(flags, capsys):
    """Loss to 1e-6, gradients and updates to 1e-5."""
    assert main(["parity", "gpt-1m", *flags]) == 0
    assert "all 33 arrays agree" in capsys.readouterr().out
