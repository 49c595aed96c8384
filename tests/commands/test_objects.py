"""Commands that read from and write to an object store."""

import json

import numpy as np
import pytest

import jaxshard as js
from jaxshard.commands.main import main
from jaxshard.storage.paths import ObjectPath, as_path
from tests.hf.checkpoints import VOCAB, write_folder
from tests.hf.test_objects import upload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

TINY = ["train", "--steps", "3", "--batch", "8", "--seq", "16", "--sample", "0", "--strategy", "ddp"]


def test_a_training_reads_and_writes_objects_alone(bucket, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    model = upload(write_folder(tmp_path / "model", "llama"), f"{bucket}/model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, VOCAB, 5000))
    as_path(f"{bucket}/ids.npy").write_bytes((tmp_path / "ids.npy").read_bytes())

    def train(model, data, out):
        words = ["--model", f"hf:{model}", "--data", f"{data}/ids.npy", "--export", f"{out}/export"]
        words += ["--json", f"{out}/result.json", "--log", f"{out}/log.jsonl", "--save-config", f"{out}/flags.toml"]
        assert main([*TINY, *words]) == 0, capsys.readouterr().err

    (tmp_path / "out").mkdir()
    train(model, bucket, f"{bucket}/out")
    train(tmp_path / "model", tmp_path, tmp_path / "out")
    remote, local = as_path(f"{bucket}/out"), tmp_path / "out"
    result, expected = (json.loads((out / "result.json").read_bytes()) for out in (remote, local))
    assert result["losses"] == expected["losses"] and result["corpus"] == expected["corpus"]
    for name in ("model.safetensors", "config.json"):
        assert (remote / "export" / name).read_bytes() == (local / "export" / name).read_bytes()
    lines, others = (js.metrics.read_json_lines(out / "log.jsonl") for out in (remote, local))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others] and len(lines) == 3
    assert not [name for name in as_path(bucket).files() if "probe" in name]
    assert main(["train", "--config", f"{bucket}/out/flags.toml"]) == 2
    assert f"--export {bucket}/out/export: there is a model already" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--log", "--export", "--save-config"])
def test_a_bucket_that_is_missing_is_one_line_before_the_training(flag, bucket, capsys):
    assert main([*TINY, flag, "s3://no-such-bucket-anywhere/x"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"jaxshard: {flag} s3://no-such-bucket-anywhere/x can't be written: NoSuchBucket")


@pytest.mark.parametrize("flags", [["--data", "{}/x.txt"], ["--data", "{}/x.npy"], ["--model", "hf:{}/x"]])
def test_an_object_that_is_missing_is_one_line(flags, bucket, capsys):
    words = [flag.format(bucket) for flag in flags]
    assert main([*TINY, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words[1].removeprefix("hf:") in line and ("no such object" in line or "has no config.json" in line)


def test_a_result_that_the_store_refuses_at_the_end_is_one_line(bucket, monkeypatch, capsys):
    monkeypatch.setattr(ObjectPath, "try_to_write", lambda self: None)
    file = "s3://no-such-bucket-anywhere/x.json"
    assert main(["schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--json", file]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxshard: {file}: NoSuchBucket")
