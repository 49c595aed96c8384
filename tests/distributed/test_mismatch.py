"""Facts of two processes compared: which differences are shown, and of a long text which line."""

from jaxshard.distributed.mismatch import Mismatch, find_mismatches, first_differing_line, shorten_facts


def test_of_a_program_the_line_that_causes_the_difference_is_shown():
    first = "%0 = constant 1\n%1 = add %0, %0\nreturn %1"
    other = "%9 = constant 1\n%2 = subtract %9, %9\nreturn %2"
    assert first_differing_line(other, first) == ("line 2: %2 = subtract %9, %9", "line 2: %1 = add %0, %0")
    assert first_differing_line("%1 = a", "%2 = a") == ("line 1: %1 = a", "line 1: %2 = a")
    assert first_differing_line("a\nb", "a") == ("line 2: b", "line 2: (ends)")
    assert first_differing_line("a", None) == ("another", "one too long to be shown")
    here, there = first_differing_line("x" * 5000 + "here" + "y" * 5000, "x" * 5000 + "there" + "y" * 5000)
    assert "here" in here and "there" in there and len(here) < 200 and here.startswith("line 1: ...")


def test_a_mismatch_hides_what_follows_from_it():
    first = {"call": "js.init", "mesh": "data=8", "layout": "a\nb"}
    short, texts = shorten_facts(first)
    assert short["mesh"] == "data=8" and isinstance(short["layout"], list) and texts == {"layout": "a\nb"}

    def found(**changes):
        return find_mismatches(first | changes, short, texts.get)

    assert found() == []
    assert found(layout="a\nc") == [Mismatch("layout", "line 2: c", "line 2: b")]
    assert found(layout="a\nc", mesh="x=8") == [Mismatch("mesh", "x=8", "data=8")]
    assert found(layout="a\nc", mesh="x=8", call="js.save") == [Mismatch("call", "js.save", "js.init")]
    assert found(seed="0") == [Mismatch("seed", "0", "(none)")]
    assert found(layout="short") == [Mismatch("layout", "line 1: short", "line 1: a")]
    assert find_mismatches(first, short | {"program": ["digest"]}, lambda item: None) == [
        Mismatch("program", "another", "one too long to be shown")
    ]
