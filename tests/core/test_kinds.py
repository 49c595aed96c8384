"""Paths of arrays that differ in the number of a block are of one kind."""

import pytest

from jaxshard.core.kinds import group_by_kind, kind_of


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers/11/attn/query/kernel", "layers/*/attn/query/kernel"),
        ("Block_3/Dense_0/bias", "Block_*/Dense_*/bias"),
        ("h12/fc1/kernel", "h*/fc1/kernel"),
        ("layer7/w2", "layer*/w2"),
        ("mlp/wi_0", "mlp/wi_*"),
        ("(root)", "(root)"),
    ],
)
def test_kinds(path, kind):
    assert kind_of(path) == kind


def test_a_single_path_keeps_its_numbers_and_shapes_tell_kinds_apart():
    sizes = {"b_0/w": 1, "b_1/w": 1, "b_2/w": 7, "head_0/w": 1}
    groups = group_by_kind(sizes, lambda path: path, sizes.get)
    assert groups == {("b_*/w", 1): ["b_0/w", "b_1/w"], ("b_2/w", 7): ["b_2/w"], ("head_0/w", 1): ["head_0/w"]}
