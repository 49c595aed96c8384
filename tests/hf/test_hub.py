"""Models of the Hugging Face hub by name: from the cache, or downloaded, and what is said where that fails."""

import shutil

import optax
import pytest

import jaxshard as js
from tests.hf.checkpoints import write_folder

hub = pytest.importorskip("huggingface_hub")
constants, errors = (pytest.importorskip(f"huggingface_hub.{name}") for name in ("constants", "errors"))

NAME, PLACE = "owner/name", "models--owner--name"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def write_model(cache, weights=True):
    """Write a model into the cache, as a download does."""
    for part in ("refs", "snapshots/abc", "blobs"):
        (cache / PLACE / part).mkdir(parents=True)
    write_folder(cache / PLACE / "blobs", "llama-yarn")
    for file in ("config.json", "model.safetensors")[: 1 + weights]:
        (cache / PLACE / "snapshots/abc" / file).symlink_to(cache / PLACE / "blobs" / file)
    (cache / PLACE / "refs/main").write_text("abc")


def load(name):
    model = js.hf.model(name)
    return js.hf.load(name, js.layout(js.fsdp(), js.make_mesh(data=8), model.init, optax.sgd(0.1)))


def test_a_model_in_the_cache_is_read(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder owner/name, and .*/hub does not have all .*HF_HUB_OFFLINE"):
        js.hf.model(NAME)
    write_model(cache)
    assert load(NAME)["embed"]["embed_tokens"]["embedding"].shape == (96, 32)
    (tmp_path / NAME).mkdir(parents=True)
    write_folder(tmp_path / NAME, "gpt2")  # a folder of this name comes first
    assert js.hf.model(NAME).make is js.models.gpt


def test_what_the_cache_lacks_is_downloaded(cache, tmp_path, monkeypatch):
    """The weights only where they are needed, and nothing offline."""
    write_model(cache, weights=False)
    assert js.hf.model(NAME).seq == 64
    with pytest.raises(FileNotFoundError, match=r"HF_HUB_OFFLINE is set: unset it, or run `hf download owner/name`"):
        load(NAME)
    original, asked = hub.snapshot_download, []

    def download(name, *, allow_patterns, local_files_only=False):
        if not local_files_only:
            asked.append("model*.safetensors" in allow_patterns)
            shutil.rmtree(cache / PLACE, ignore_errors=True)
            write_model(cache, weights=asked[-1])
        return original(name, allow_patterns=allow_patterns, local_files_only=True)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    shutil.rmtree(cache)
    load(NAME)
    load(NAME)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("GatedRepoError", PermissionError, "is gated: ask for access at .*/owner/name, then run `hf auth login`"),
        ("RepositoryNotFoundError", FileNotFoundError, "the hub has no model of this name, or it is private"),
        ("LocalEntryNotFoundError", ConnectionError, "could not be downloaded: no route"),
        ("HfHubHTTPError", ConnectionError, "could not be downloaded: no route"),
    ],
)
def test_why_nothing_is_downloaded(error, kind, message, cache, monkeypatch):
    original, raised = hub.snapshot_download, getattr(errors, error)

    def fail(name, *, allow_patterns, local_files_only=False):
        if local_files_only:
            return original(name, allow_patterns=allow_patterns, local_files_only=True)
        found = raised.__new__(raised)  # with the answer of a server
        found.args = ("no route\nto host",)
        raise found

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(kind, match=message) as caught:
        js.hf.model(NAME)
    assert "\n" not in str(caught.value)


def test_names_that_are_none(cache, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no folder a b/c, and it is no name of a model on the hub"):
        js.hf.model("a b/c")
    with pytest.raises(FileNotFoundError, match=r"there is no folder absent$"):
        js.hf.model("absent")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"owner/name is no folder, and .*: pip install huggingface_hub"):
        js.hf.model(NAME)
