"""`jaxshard train`, `parity` and `audit` with classifiers of images."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxshard.commands.main import main

TINY = "depth=2,width=16,heads=4,patch=4"
TRAIN = ["--batch", "16", "--steps", "2", "--eval-every", "2"]


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """The number of simulated devices is fixed by the first touch, which must not be that of a test with --devices."""
    assert jax.device_count() == 8


@pytest.fixture
def cifar(tmp_path):
    """A file of images as small as they can be."""
    random = np.random.default_rng(0)
    arrays = {"images": random.integers(0, 256, (64, 8, 8, 3), np.uint8), "labels": random.integers(0, 4, 64)}
    np.savez(tmp_path / "cifar.npz", **arrays)
    return tmp_path / "cifar.npz"


def trained(tmp_path, *args):
    file = tmp_path / "result.json"
    assert main(["train", *TRAIN, *args, "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_arrays_decide_side_and_classes_and_the_result_has_an_accuracy(cifar, tmp_path, capsys):
    result = trained(tmp_path, "--model", "vit-1m", "--change", TINY, "--data", str(cifar), "--augment", "flip")
    assert (result["size"]["image"], result["size"]["classes"], result["augment"]) == (8, 4, "flip")
    assert result["corpus"]["train_images"] == 59 and result["corpus"]["held_out_images"] == 5
    assert set(result["evaluations"][-1]) == {"step", "loss", "accuracy"}
    assert result["rows_per_second"] > 0 and result["sample"] is None
    shown = capsys.readouterr().out
    assert "cifar.npz: 59 images of 4 classes, 5 held out" in shown and "nats per image" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (["vit-1m", "--change", TINY], ["--mesh", "data=2,tensor=4"]),
        (["vit-1m", "--change", TINY], ["--mesh", "data=4,pipe=2", "--chunks", "1", "--microbatches", "2"]),
        (["vit-1m", "--change", TINY], ["--engine", "auto", "--strategy", "zero2"]),
        (["resnet-tiny", "--change", "width=4"], ["--mesh", "data=8"]),
        (["resnet-tiny", "--change", "width=4"], ["--mesh", "data=2,tensor=4"]),
        (["resnet-tiny", "--change", "width=4"], ["--mesh", "data=8", "--engine", "auto"]),
    ],
)
def test_losses_are_those_of_one_device(cifar, tmp_path, model, flags):
    args = ["--model", *model, "--data", str(cifar)]
    code = "import sys; from jaxshard.commands.main import main; sys.exit(main(sys.argv[1:]))"
    alone = tmp_path / "alone.json"
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    one = ["train", *TRAIN, *args, "--devices", "1", "--json", str(alone)]
    subprocess.run([sys.executable, "-c", code, *one], env=env, check=True, capture_output=True)
    found, expected = trained(tmp_path, *args, *flags), json.loads(alone.read_text())
    np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5)
    np.testing.assert_allclose(found["loss_eval"], expected["loss_eval"], atol=1e-4)


@pytest.mark.slow
def test_a_folder_of_files(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            pillow.new("RGB", (40, 30 + number), (99 * label, 9, number)).save(
                tmp_path / "pets" / name / f"{number}.png"
            )
    args = ["--model", "vit-1m", "--change", f"{TINY},image=8", "--data", str(tmp_path / "pets"), "--augment", "crop"]
    result = trained(tmp_path, *args)
    assert result["corpus"]["classes"] == ["cat", "dog"] and result["size"]["image"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4", "data=4,pipe=2"])
def test_parity_and_audit_of_a_vision_transformer(mesh):
    chunks = ["--chunks", "1"] if "pipe" in mesh else []
    target = ["vit-1m", "--change", f"{TINY},image=8", "--mesh", mesh, *chunks]
    assert main(["parity", *target]) == 0
    assert main(["audit", *target, "--batch", "32"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4"])
def test_parity_and_audit_of_a_residual_network(mesh):
    assert main(["parity", "resnet-tiny", "--change", "image=8", "--mesh", mesh]) == 0
    assert main(["audit", "resnet-tiny", "--mesh", mesh]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "vit-1m", "--seq", "8"], "vit-1m reads images, which have no length"),
        (["--model", "vit-1m", "--vocab", "8"], "--vocab 8 describes text or token ids"),
        (["--model", "vit-1m", "--change", "classes=5"], "that is what the data says; leave classes out"),
        (["--model", "vit-1m", "--data", "nothing.npz"], "nothing.npz does not exist"),
        (["--model", "gpt-1m", "--augment", "flip"], "--augment flip is for images"),
        pytest.param(
            ["--model", "resnet-tiny", "--microbatches", "2"],
            "row_axes: the rows of the batch are computed in turns",
            marks=pytest.mark.slow,
        ),
        (["--model", "vit-1m", "--data", "some.txt"], "some.txt does not exist"),
        (["--model", "vit-1m", "--change", "patch=5"], "patches of 5 pixels do not divide"),
        pytest.param(["--model", "vit-1m", "--batch", "12"], "--batch 12: use a multiple of 8", marks=pytest.mark.slow),
    ],
)
def test_wrong_flags_are_refused(args, message, capsys):
    assert main(["train", *args, "--steps", "1"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_generate_refuses_a_model_of_images(capsys):
    assert main(["generate", "--model", "vit-1m", "--prompt-tokens", "1", "--length", "2"]) == 2
    assert "it makes no tokens" in " ".join(capsys.readouterr().err.split())
