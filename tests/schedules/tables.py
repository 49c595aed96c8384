"""Named schedules of drawn sizes, and a check of tables that shares nothing with the package."""

from hypothesis import strategies as st

from jaxshard.schedules import Schedule, gpipe, interleaved, one_f_one_b, zero_bubble

SPLITS = {"gpipe": False, "one_f_one_b": False, "interleaved": False, "zero_bubble": True}


def make(name: str, p: int, m: int, v: int) -> Schedule:
    """The named schedule; v counts where it has chunks."""
    if name in ("gpipe", "one_f_one_b"):
        return {"gpipe": gpipe, "one_f_one_b": one_f_one_b}[name](p, m)
    return {"interleaved": interleaved, "zero_bubble": zero_bubble}[name](p, m, chunks=v)


@st.composite
def sizes(draw, *, p=8, v=4, m=None):
    """p devices, v chunks and m micro-batches, from p to 3 p + 2."""
    stages = draw(st.integers(1, p))
    most = 3 * stages + 2 if m is None else max(m, stages)
    return stages, draw(st.integers(stages, most)), draw(st.integers(1, v))


@st.composite
def schedules(draw, **most):
    return make(draw(st.sampled_from(sorted(SPLITS))), *draw(sizes(**most)))


def runs(ops, p: int, m: int, v: int) -> bool:
    """Whether a machine that goes through the table tick by tick computes every gradient once, from inputs it has."""
    splits = any(kind == "W" for _, _, kind, _, _ in ops)
    done = set()
    for tick in range(max(op[0] for op in ops) + 1):
        # What is sent in a tick arrives at its end.
        arrived = frozenset(done)
        worked = False
        for slot in "FBW":
            busy = set()
            for _, device, kind, chunk, i in (op for op in ops if op[0] == tick and op[2] == slot):
                k = chunk * p + device
                last = k == p * v - 1
                if not (0 <= device < p and 0 <= chunk < v and 0 <= i < m) or device in busy or (kind, k, i) in done:
                    return False
                if kind == "F" and k > 0 and ("F", k - 1, i) not in arrived:
                    return False
                if kind == "B" and (("F", k, i) not in done or not (last or ("B", k + 1, i) in arrived)):
                    return False
                if kind == "W" and ("B", k, i) not in done:
                    return False
                busy.add(device)
                done.add((kind, k, i))
                worked = True
        if not worked:
            return False
    return len(done) == len(ops) == p * v * m * (3 if splits else 2)
