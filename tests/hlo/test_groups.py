"""Replica groups in every syntax, and the mesh axes that they stand for."""

import pytest

from jaxshard.hlo.groups import axes_of_groups, parse_groups
from tests.hlo.programs import mesh_of


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3),)),
        ("[2,2]<=[4], use_global_device_ids=true", ((0, 1), (2, 3))),
        ("[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2] {'b'}, dimensions={0}", ((0, 1), (2, 3))),
        ("mesh['a'=4,'b'=1] {'b'}", ((0,), (1,), (2,), (3,))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_replica_groups_in_every_syntax(text, groups):
    found = parse_groups(text, 4)
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))


def test_axes_of_groups_in_three_dimensions():
    mesh = mesh_of(a=2, b=2, c=2)
    assert axes_of_groups(parse_groups("{{0,1},{2,3},{4,5},{6,7}}", 8), mesh) == ("c",)
    assert axes_of_groups(parse_groups("{{4,6,0,2},{5,7,1,3}}", 8), mesh) == ("a", "b")
    assert axes_of_groups(parse_groups("{}", 8), mesh) == ("a", "b", "c")
    assert axes_of_groups(parse_groups("{{0,3},{1,2},{4,7},{5,6}}", 8), mesh) == ("?",)
    assert axes_of_groups(parse_groups("{{0,1},{2,3},{4,5}}", 8), mesh) == ("?",)
    assert axes_of_groups(parse_groups("{{0},{1},{2},{3},{4},{5},{6},{7}}", 8), mesh) == ()
