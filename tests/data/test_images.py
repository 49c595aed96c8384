"""Images: drawn digits, .npz files and folders, augmentation by (seed, step, row), and what is refused."""

import hashlib
import re

import numpy as np
import pytest

import jaxshard as js
from jaxshard.data import image_files
from jaxshard.data.digits import digits
from jaxshard.data.images import augmented


def arrays(count=20, side=8, channels=3, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, side, side, channels), dtype=np.uint8), random.integers(0, 4, count)


@pytest.fixture
def folder(tmp_path):
    """Two classes of six images each, of different sizes and formats."""
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("grain")
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for number in range(6):
            size = (20 + 3 * number, 24)
            suffix = "png" if number % 2 else "jpg"
            pillow.new("RGB", size, (200 * label, 40, 10 * number)).save(tmp_path / name / f"{number}.{suffix}")
    return tmp_path


# Drawn digits.


def test_digits_are_the_same_every_time_and_no_image_is_held_out_that_is_trained_on():
    small = digits(40, 10)
    assert small.train.images.shape == (40, 32, 32, 3) and small.train.images.dtype == np.uint8
    assert len(small.held_out) == 10 and len(small.classes) == 10 and small.side == 32
    assert digits(40, 10, seed=1).digest != small.digest
    assert small.digest[:16] == "573c113035c60607"  # the same on every machine
    trained = {image.tobytes() for image in small.train.images}
    assert not trained & {image.tobytes() for image in small.held_out.images}


def test_digits_can_be_told_apart_by_their_nearest_neighbour():
    """A classifier without training is far better than chance: labels belong to images."""
    drawn = digits(800, 100)
    middle = [
        part.images[:, 6:26, 9:23].astype(np.float32).mean(-1).reshape(len(part), -1)
        for part in (drawn.train, drawn.held_out)
    ]
    known, asked = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in middle)
    nearest = (asked @ known.T).argmax(1)
    assert (drawn.train.labels[nearest] == drawn.held_out.labels).mean() > 0.4


# Files of arrays.


@pytest.mark.parametrize(
    "names", [("images", "labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test")]
)
def test_arrays_of_a_file(tmp_path, names):
    train, test = arrays(), arrays(6, seed=1)
    np.savez(tmp_path / "some.npz", **dict(zip(names, (train[0], train[1][:, None], *test))))
    loaded = js.data.load_images(tmp_path / "some.npz")
    assert (len(loaded.train), len(loaded.held_out), loaded.side, loaded.channels) == (20, 6, 8, 3)
    np.testing.assert_array_equal(loaded.train[3]["image"], train[0][3])
    assert loaded.train[3]["label"] == train[1][3] and loaded.classes == ("0", "1", "2", "3")


def test_a_part_is_held_out_where_there_is_no_test_part_and_grey_images_have_one_channel(tmp_path):
    images, labels = arrays(50)
    np.savez(tmp_path / "grey.npz", images=images[..., 0], labels=labels)
    loaded = js.data.load_images(tmp_path / "grey.npz")
    assert (len(loaded.train), len(loaded.held_out), loaded.channels) == (46, 4, 1)
    both = np.concatenate([loaded.train.images, loaded.held_out.images])
    assert {x.tobytes() for x in both} == {x.tobytes() for x in images[..., :1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"pixels": np.zeros(3)}, "it has the arrays pixels, but must have 'images' and 'labels' or 'x_train'"),
        ({"images": np.zeros((2, 8, 8, 3)), "labels": np.zeros(2, int)}, "'images' must be uint8"),
        ({"images": np.zeros((2, 8, 8, 3), np.uint8), "labels": np.zeros(3, int)}, "one for each of 2 images"),
        ({"images": np.zeros((2, 8, 8, 3), np.uint8), "labels": np.array([0, -1])}, "whole numbers from 0 on"),
        ({"images": np.zeros((1, 8, 8, 3), np.uint8), "labels": np.zeros(1, int)}, "0 images to train on"),
        ({"images": np.zeros((2, 8, 8, 3), np.uint8), "labels": np.array(["a", "b"])}, "'labels' must be whole"),
    ],
)
def test_arrays_that_are_no_images_are_refused_by_name(tmp_path, content, message):
    np.savez(tmp_path / "some.npz", **content)
    with pytest.raises(ValueError, match=message) as caught:
        js.data.load_images(tmp_path / "some.npz")
    assert "some.npz" in str(caught.value)


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "text.txt").write_text("words")
    np.savez(tmp_path / "object.npz", images=np.array([{}], object), labels=np.zeros(1, int))
    for name, message in (("cut", "can't be read as images"), ("object", "can't be read as images")):
        with pytest.raises(ValueError, match=rf"{name}\.npz {message}"):
            js.data.load_images(tmp_path / f"{name}.npz")
    with pytest.raises(ValueError, match=r"text\.txt holds no images"):
        js.data.load_images(tmp_path / "text.txt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        js.data.load_images(tmp_path / "nothing")


# Folders.


def test_a_folder_has_a_class_for_each_folder_and_reads_files_when_they_are_needed(folder):
    loaded = js.data.load_images(folder)
    assert loaded.classes == ("cat", "dog") and loaded.side is None and len(loaded.train) + len(loaded.held_out) == 12
    assert len(loaded.held_out) >= 1
    image = loaded.train[0]["image"]
    assert image.shape[-1] == 3 and image.dtype == np.uint8
    source = js.data.images(loaded.train, batch=6, seed=0, side=16)
    batch = source.rows(0, np.arange(6))
    assert batch["images"].shape == (6, 16, 16, 3)
    np.testing.assert_array_equal(batch["labels"], (batch["images"][:, 8, 8, 0] > 100).astype(np.int32))


def test_a_folder_with_parts_of_its_own(folder):
    for part in ("train", "val"):
        (folder / part).mkdir()
    for name in ("cat", "dog"):
        (folder / name).rename(folder / "train" / name)
    (folder / "val" / "dog").mkdir()
    (folder / "train" / "dog" / "1.png").rename(folder / "val" / "dog" / "1.png")
    loaded = js.data.load_images(folder)
    assert (len(loaded.train), len(loaded.held_out)) == (11, 1) and loaded.held_out[0]["label"] == 1
    (folder / "val" / "fox").mkdir()
    (folder / "val" / "dog" / "1.png").rename(folder / "val" / "fox" / "1.png")
    (folder / "val" / "dog").rmdir()
    with pytest.raises(ValueError, match=r"has classes that .* lacks: fox"):
        js.data.load_images(folder)


def test_a_file_that_is_no_image_is_named(folder):
    file = folder / "cat" / "2.jpg"
    for content in (b"no image", file.read_bytes()[:200]):
        file.write_bytes(content)
        loaded = js.data.load_images(folder)
        part = loaded.train if "cat/2.jpg" in loaded.train.files else loaded.held_out
        with pytest.raises(ValueError, match=r"cat/2\.jpg can't be read as an image"):
            js.data.eval_images(part, batch=4, side=16)


def test_folders_without_classes_are_refused_and_other_files_left_out_with_a_warning(folder, tmp_path_factory):
    (folder / "cat" / "notes.txt").write_text("words")
    with pytest.warns(UserWarning, match=r"left out 1 files that are no images, such as .*notes\.txt"):
        js.data.load_images(folder)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="folders without images: empty"):
        js.data.load_images(folder)
    with pytest.raises(ValueError, match="put the images of each class into a folder of its own"):
        js.data.load_images(tmp_path_factory.mktemp("bare"))


def test_a_missing_extra_is_named(folder, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(image_files.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"Pillow and Grain is missing.*pip install -e '\.\[images\]'"):
        js.data.load_images(folder)


# Batches.


def test_rows_depend_on_seed_step_and_row_alone():
    images, labels = arrays(10)
    dataset = [{"image": x, "label": int(y)} for x, y in zip(images, labels)]
    source = js.data.images(dataset, batch=8, seed=3, augment="flip")
    whole = source.rows(5, np.arange(8))
    for rows in ([3], [7, 0], [2, 3, 4]):
        part = source.rows(5, np.array(rows))
        np.testing.assert_array_equal(part["images"], whole["images"][rows])
        np.testing.assert_array_equal(part["labels"], whole["labels"][rows])
    # Other numbers another time, and with another seed.
    assert not np.array_equal(source.rows(6, np.arange(8))["images"], whole["images"])
    other = js.data.images(dataset, batch=8, seed=4, augment="flip").rows(5, np.arange(8))
    assert not np.array_equal(other["images"], whole["images"])
    # As it was when this was written, so that a run goes on with the same images under another version.
    digest = hashlib.sha256(whole["images"].tobytes()).hexdigest()
    assert digest[:16] == "b5abca04af0c9252"


def test_augmentations_do_what_they_say():
    image = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3) + 1

    def seen(how):
        return [augmented(image, 8, how, np.random.default_rng(number)) for number in range(40)]

    assert all((one == image).all() for one in seen("none"))
    shifts = {
        (down, right)
        for one in seen("shift")
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
        if (one == np.roll(np.pad(image, ((1, 1), (1, 1), (0, 0))), (-down, -right), (0, 1))[1:9, 1:9]).all()
    }
    assert len(shifts) == 9
    mirrored = [one for one in seen("flip") if one[3, 3, 0] > one[3, 4, 0]]
    assert 10 < len(mirrored) < 30
    pytest.importorskip("PIL.Image")
    crops = seen("crop")
    assert all(one.shape == (8, 8, 3) for one in crops) and len({one.tobytes() for one in crops}) > 30


def test_wrong_arguments_are_refused():
    images, labels = arrays(4)
    dataset = [{"image": x, "label": int(y)} for x, y in zip(images, labels)]
    with pytest.raises(ValueError, match=re.escape("augment must be one of none, shift, flip, crop, got 'mix'")):
        js.data.images(dataset, batch=2, seed=0, augment="mix")
    with pytest.raises(ValueError, match="0 images in batches of 2"):
        js.data.images([], batch=2, seed=0)
