"""Colours that everybody tells apart, on white and on nearly black."""

import numpy as np

from jaxshard.core.pictures.style import DARK, LIGHT, OPERATIONS, PALETTE, ROLES, contrast, ink_on


def distances(colours):
    """The smallest distance of two colours to people who see no red, and who see no green (Machado's matrices)."""
    protan = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
    deutan = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    rgb = np.array([[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours])
    looks = ((rgb**2.2) @ seen.T for seen in (protan, deutan))
    return [(np.linalg.norm(one[:, None] - one[None], axis=-1) + np.eye(len(rgb))).min() for one in looks]


def test_colours_of_one_picture_differ_in_lightness_or_hue():
    for colours in (PALETTE, ROLES.values(), OPERATIONS.values()):
        assert min(distances(list(colours))) > 0.1


def test_text_is_read_on_paper_and_on_every_colour():
    for look in (LIGHT, DARK):
        assert contrast(look.ink, look.paper) > 7 and contrast(look.muted, look.paper) > 4.5
        assert all(contrast(colour, look.paper) > 1.25 for colour in PALETTE)
        assert all(contrast(colour, look.paper) > 2.2 for colour in look.lines) and min(distances(look.lines)) > 0.05
    assert all(contrast(ink_on(colour), colour) > 4.5 for colour in (*PALETTE, *ROLES.values()))
