"""Addresses such as gs://bucket are refused by all that takes a path, before a local folder of that name is made."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checkpoint.reader import describe
from jaxshard.schedules.schedule import Schedule
from tests.data.small_tokenizer import make_tokenizer

TX = optax.sgd(0.1)


def init_fn(key):
    return {"w": jnp.ones(4)}


@cache
def layout():
    return js.layout(js.fsdp(), js.make_mesh(data=8), init_fn, TX)


@cache
def run():
    return js.init(init_fn, TX, layout(), 0)


def figure():
    return js.schedules.schedule_figure(js.schedules.gpipe(2, 2))


def ended(path, suffix):
    """The path with a suffix, a text or a `Path` as before."""
    return type(path)(f"{path}{suffix}")


def tokenize(path, cache, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 20)
    tokenizer = js.data.tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    return js.data.tokenize(path or text, tokenizer, cache=cache)


TAKES_A_PATH = {
    "save": lambda path: js.save(path, run(), layout()),
    "restore": lambda path: js.restore(path, layout()),
    "latest_step": js.latest_step,
    "describe": describe,
    "Checkpointer": lambda path: js.Checkpointer(path, layout(), every=1),
    "MemoryCheckpointer": lambda path: js.MemoryCheckpointer(layout(), dir=path),
    "save_safetensors": lambda path: js.save_safetensors(path, run(), layout()),
    "load_safetensors": lambda path: js.load_safetensors(path, layout()),
    "hf.model": js.hf.model,
    "hf.load": lambda path: js.hf.load(path, layout()),
    "hf.save": lambda path: js.hf.save(path, run(), layout()),
    "data.load": js.data.load,
    "data.tokenizer": js.data.tokenizer,
    "metrics.json_lines": js.metrics.json_lines,
    "metrics.wandb": lambda path: js.metrics.wandb("x", folder=path),
    "metrics.mlflow": lambda path: js.metrics.mlflow("x", folder=path),
    "metrics.tensorboard": js.metrics.tensorboard,
    "fit": lambda path: js.fit(run(), lambda run, batch: (run, {}), [], steps=1, profile=path),
    "Schedule.from_csv": Schedule.from_csv,
    "Schedule.to_csv": js.schedules.gpipe(2, 2).to_csv,
    "plot_schedule": lambda path: js.schedules.plot_schedule(js.schedules.gpipe(2, 2), ended(path, ".png")),
    "write_picture": lambda path: js.plan.write_picture(figure(), ended(path, ".svg")),
}


@pytest.mark.parametrize("name", TAKES_A_PATH)
def test_an_address_is_refused_and_no_folder_of_its_name_is_made(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ("hf://owner/x.safetensors", Path("gs://bucket/run"), "https://host/a.csv", "abfs+x://a/b"):
        with pytest.raises(ValueError, match=r"^\w[\w+]+://.*: files are read and written in a mounted file system"):
            TAKES_A_PATH[name](address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["gs://bucket//run/", "gs:///bucket/run", "gs:/bucket/run"])
def test_an_address_is_printed_as_it_was_given(address):
    with pytest.raises(ValueError) as caught:
        Schedule.from_csv(address)
    assert str(caught.value).startswith(f"{address}: files are")
    with pytest.raises(ValueError, match=r"^gs://bucket/run: files are"):  # a `Path` has dropped the other slashes
        js.latest_step(Path(address))


@pytest.mark.parametrize("where", ["path", "cache"])
def test_addresses_of_texts_and_of_their_cache_are_refused(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="hf://bucket/x: files are read and written"):
        tokenize(*{"path": ("hf://bucket/x", None), "cache": (None, "hf://bucket/x")}[where], tmp_path)
    assert not Path("hf:").exists()


def test_paths_that_only_look_like_addresses_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a:b/run", "12:00"):
        js.save(name, run(), layout())
        assert js.latest_step(name) == 0
    assert jax.tree.leaves(js.restore("12:00", layout()).params)[0].shape == (4,)


def test_tensorboard_takes_the_addresses_that_its_library_writes_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = pytest.importorskip("tensorboardX.record_writer")
    monkeypatch.setattr(writer, "S3_ENABLED", True)
    js.metrics.tensorboard("s3://bucket/run")
    monkeypatch.setattr(writer, "GCS_ENABLED", False)
    with pytest.raises(ImportError, match=r"^gs://bucket/run: .* needs google-cloud-storage: pip install google-"):
        js.metrics.tensorboard("gs://bucket/run")
    with pytest.raises(ValueError, match=r"hf://x: .*, or an address of gs://, s3:// as a str"):
        js.metrics.tensorboard("hf://x")
