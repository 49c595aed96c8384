"""Readers of safetensors: what is accepted the library accepts and reads the same; all else is a ValueError."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

import jaxshard as js
from jaxshard.checkpoint.safetensors import header
from jaxshard.checkpoint.safetensors.header import DTYPES, decode_header, header_size
from jaxshard.checkpoint.safetensors.reader import _open_buffer
from tests.checkpoint.small import placed

TREE = {"a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "half": jnp.ones(3, jnp.bfloat16)}, "b": np.bool_(1)}


def file_of(fields, data=b"", *, length=None):
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def attempt(raw):
    """Refused with a ValueError, or read as the library reads it; whether it was read."""
    try:
        made = decode_header(raw[: header_size(raw[:8], len(raw))], len(raw))
    except ValueError as error:
        assert 0 < len(str(error)) < 1000
        return False
    theirs = {name: (DTYPES[x["dtype"]], tuple(x["shape"]), bytes(x["data"])) for name, x in deserialize(raw)}
    data = raw[made.length :]
    assert theirs == {name: (x.dtype, x.shape, data[x.start : x.start + x.size]) for name, x in made.tensors.items()}
    problems = []
    found = _open_buffer("it", np.frombuffer(raw, np.uint8), problems)
    assert not problems
    for name, one in found.items():
        assert one.raw.tobytes() == theirs[name][2]
        if math.prod(filter(None, one.tensor.shape)) < 2**31:  # NumPy has no larger arrays, be they empty or not
            copy = one.copy_part((slice(None),) * len(one.tensor.shape))
            assert copy.shape == theirs[name][1] and copy.tobytes() == theirs[name][2]
    return True


def a_tensor(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


EIGHT = bytes(8)
WRONG = [
    (b"", "0 bytes are no safetensors file"),
    (EIGHT[:7], "7 bytes are no safetensors file"),
    (EIGHT, "does not begin with a brace"),
    (file_of({}, length=2**64 - 1), r"a header of 18446744073709551615 bytes does not fit into 10"),
    (file_of({}, length=3), "a header of 3 bytes does not fit into 10"),
    (file_of(b"[]"), "does not begin with a brace"),
    (file_of(b' {"a":{}}'), "does not begin with a brace"),
    (file_of(b'{"a":' * 100_000), "not the JSON object"),
    (file_of(b'{"a":' + b"[" * 100_000), "not the JSON object"),
    (file_of(b'{"a":1}\xff'), "not the JSON object"),
    (file_of(b'{"a\\ud800":1}'), "not the JSON object"),
    (file_of(json.dumps({"a": a_tensor()}).encode().replace(b"8", b"1" * 5000)), "1111 is no size"),
    (file_of({"a": a_tensor(shape=[float("nan")])}, EIGHT), "NaN is no size"),
    (file_of({"a": a_tensor(shape=[float("inf")])}, EIGHT), "Infinity is no size"),
    (file_of({"a": a_tensor(shape=[2.0])}, EIGHT), "2.0 is no size"),
    (file_of({"a": a_tensor(shape=[-2])}, EIGHT), "-2 is no size"),
    (file_of({"a": a_tensor(shape=[True])}, EIGHT), "must be lists of sizes"),
    (file_of({"a": a_tensor(shape=2)}, EIGHT), "must be lists of sizes"),
    (file_of({"a": a_tensor(data_offsets=[0, 8, 8])}, EIGHT), "must be lists of sizes"),
    (file_of({"a": a_tensor(shape=[3])}, EIGHT), "tensor 'a' of 12 bytes lies in bytes 0 to 8"),
    (file_of({"a": a_tensor(shape=[2**40] * 4)}, EIGHT), "bytes lies in bytes 0 to 8"),
    (file_of({"a": a_tensor(data_offsets=[8, 0])}, EIGHT), "lies in bytes 8 to 0"),
    (file_of({"a": a_tensor(data_offsets=[8, 16])}, EIGHT), "begins at byte 8 of the data, expected 0"),
    (file_of({"a": a_tensor(), "b": a_tensor(data_offsets=[4, 12])}, bytes(12)), "'b' begins at byte 4 .* expected 8"),
    (file_of({"a": a_tensor(), "b": a_tensor()}, EIGHT), "'b' begins at byte 0 of the data, expected 8"),
    (file_of({"a": a_tensor()}, bytes(7)), r"\d+ bytes, and its header speaks of \d+: it was cut off"),
    (file_of({"a": a_tensor()}, bytes(9)), "more was added"),
    (file_of({"a": a_tensor(dtype="F31")}, EIGHT), "tensor 'a' has the dtype F31, none of BOOL, "),
    (file_of({"a": a_tensor(dtype=None)}, EIGHT), "has the dtype None"),
    (file_of({"a": a_tensor(more=1)}, EIGHT), "has other fields than"),
    (file_of({"a": []}), "has other fields than"),
    (file_of({"__metadata__": {"a": 1}}), "__metadata__ is no object of strings"),
    (file_of({"__metadata__": []}), "__metadata__ is no object of strings"),
    (file_of({"__metadata__": {"jaxshard": "2"}}), "version 2, and this jaxshard reads version 1; update"),
    (file_of({"__metadata__": {"crc32:a": "0" * 8}}), "version None"),
    (file_of({"__metadata__": {"jaxshard": "1"}, "a": a_tensor()}, EIGHT), "checksums are not those of its tensors"),
    (file_of({"__metadata__": {"jaxshard": "1", "crc32:a": "x" * 8}, "a": a_tensor()}, EIGHT), "checksums are not"),
    (file_of(json.dumps({"a": a_tensor(), "b": 1}).encode().replace(b'"b"', b'"a"'), EIGHT), "one key twice"),
]


@pytest.mark.parametrize(("raw", "message"), WRONG)
def test_what_is_wrong_is_told(raw, message):
    with pytest.raises(ValueError, match=message):
        decode_header(raw[: header_size(raw[:8], len(raw))], len(raw))


def test_files_of_others():
    tensors = {"w": np.ones((2, 3), np.float16), "none": np.zeros((0, 5), np.int8), "one": np.array(3.0)}
    assert attempt(safetensors.numpy.save(tensors, metadata={"format": "pt"})) and attempt(file_of({}))
    assert attempt(file_of(b'{"a":{"shape":[],"data_offsets":[0,1],"dtype":"U8"}}   ', b"\1"))


SIZES = st.integers(-1, 20) | st.sampled_from([2**31, 2**63, 2**64, 1.0, True, None, "1", math.nan])
SOME = {"dtype": st.sampled_from([*DTYPES, "F4", "f32", 1]), "shape": st.lists(SIZES, max_size=3)}
TENSOR = st.fixed_dictionaries(SOME | {"data_offsets": st.lists(SIZES, min_size=2, max_size=2)}) | st.none()
FIELDS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), TENSOR, max_size=3)


EDITS = st.lists(
    st.tuples(st.sampled_from(["byte", "insert", "delete", "cut", "double"]), st.integers(0), st.binary(max_size=4)),
    min_size=1,
    max_size=3,
)


def edited(raw, edits):
    for kind, place, more in edits:
        at = place % (len(raw) + 1)
        match kind:
            case "byte":
                raw = raw[:at] + more[:1] + raw[at + len(more[:1]) :]
            case "insert":
                raw = raw[:at] + more + raw[at:]
            case "delete":
                raw = raw[:at] + raw[at + len(more) :]
            case "cut":
                raw = raw[:at]
            case "double":
                raw = raw[: at + len(more)] + raw[at:]
    return raw


def theirs():
    return safetensors.numpy.save({"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, bool)})


@pytest.fixture(scope="module")
def ours():
    run, made = placed(lambda key: jax.tree.map(jnp.asarray, TREE), trainable=lambda path: path == "a/w")
    return js.to_bytes(run, made), made


def check_edited(ours, edits):
    """No change of our own files gets through, but to what is nobody's: blanks behind the JSON."""
    raw, made = ours
    changed = edited(raw, edits)
    attempt(changed)
    try:
        back = js.from_bytes(changed, made)
    except ValueError as error:
        assert str(error).startswith("the bytes")
        return
    length = header_size(raw[:8], len(raw))
    other = changed[: header_size(changed[:8], len(changed))]
    assert json.loads(raw[8:length]) == json.loads(other[8:]) and changed[len(other) :] == raw[length:]
    for x, want in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(want).tobytes()


def test_every_flipped_bit_is_found(ours):
    """In the length, the header and the data alike."""
    raw, made = ours
    for at in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match="the bytes"):
            js.from_bytes(bytes(changed), made)
    for size in range(len(raw)):
        with pytest.raises(ValueError, match="the bytes"):
            js.from_bytes(raw[:size], made)


def check_all(ours, edits, fields, data, length):
    attempt(file_of(fields, data, length=length))
    attempt(edited(theirs(), edits))
    check_edited(ours, edits)


ANY = {
    "edits": EDITS, "fields": FIELDS, "data": st.binary(max_size=24), "length": st.none() | st.integers(0, 2**64 - 1)
}  # fmt: skip


@given(**ANY)
@example(edits=[], fields={"a": a_tensor(shape=[0, 2**64], data_offsets=[0, 0])}, data=b"", length=None)
@settings(max_examples=60, deadline=None)
def test_any_header_and_any_edit(ours, edits, fields, data, length):
    check_all(ours, edits, fields, data, length)


@pytest.mark.slow
@given(**ANY)
@settings(max_examples=10_000, deadline=None)
def test_many_headers_and_edits(ours, edits, fields, data, length):
    check_all(ours, edits, fields, data, length)


def test_headers_are_as_long_whatever_the_checksums():
    tensors = {"w": header.Tensor("float32", (2,), 0)}
    assert len(header.encode_header(tensors, {"w": 0})) == len(header.encode_header(tensors, {"w": 2**32 - 1}))
