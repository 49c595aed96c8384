"""JAX's own key-value store does what `store.Store` plays in the other tests, with the same errors."""

import pytest

from jaxshard.core.compat import delete_keys, get_key, list_keys, put_key, wait_for_key
from tests.distributed.launched import printed_together
from tests.distributed.store import Store


def check_store(store):
    assert get_key(store, "a/b") is None and wait_for_key(store, "a/b", 0.05) is None
    put_key(store, "a/b", "one")
    put_key(store, "a/c", "two\nlines")
    put_key(store, "ab", "elsewhere")
    assert get_key(store, "a/b") == wait_for_key(store, "a/b", 5.0) == "one"
    with pytest.raises(RuntimeError, match="ALREADY_EXISTS"):
        put_key(store, "a/b", "three")
    put_key(store, "a/b", "three", overwrite=True)
    assert list_keys(store, "a/") == {"b": "three", "c": "two\nlines"} and list_keys(store, "none/") == {}
    delete_keys(store, "a")
    assert list_keys(store, "a/") == {} and get_key(store, "ab") == "elsewhere"


def test_a_dictionary_as_the_store():
    check_store(Store())


PROGRAM = """
    import sys
    import jax
    from jaxshard.core.compat import coordinator_client
    from tests.distributed.test_key_value import check_store
    assert coordinator_client() is None
    jax.distributed.initialize(sys.argv[1], 1, 0)
    check_store(coordinator_client())
"""


@pytest.mark.slow
def test_the_store_of_jax():
    printed_together(PROGRAM, count=1)
