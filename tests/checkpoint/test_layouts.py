"""What one layout saved any other restores, bit for bit."""

import pytest

import jaxshard as js
from tests.checkpoint.runs import LAYOUTS, assert_same, made

NAMES = list(LAYOUTS)


@pytest.mark.parametrize(("source", "target"), list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)))
def test_the_next_layout_restores(source, target, tmp_path):
    js.save(tmp_path, made(source).run(), made(source).layout)
    assert_same(js.restore(tmp_path, made(target).layout), made(target).run())


@pytest.mark.slow
@pytest.mark.parametrize("source", NAMES)
def test_every_layout_restores(source, tmp_path):
    js.save(tmp_path, made(source).run(), made(source).layout)
    for target in NAMES:
        assert_same(js.restore(tmp_path, made(target).layout), made(target).run())
