"""How tokens are drawn: top_k, top_p, temperature, and a key for each row and position."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.core.keys import row_keys
from jaxshard.generation.sampling import Sampling, draw, keep_likely

CHANCES = np.array([[0.4, 0.05, 0.3, 0.05, 0.2]])


def kept(**options):
    how = Sampling(temperature=1.0, **options).arrays(5)
    return np.flatnonzero(np.isfinite(keep_likely(jnp.log(CHANCES), how)[0])).tolist()


def test_the_tokens_that_top_k_and_top_p_keep():
    assert kept() == [0, 1, 2, 3, 4] and kept(top_k=2) == [0, 2] and kept(top_k=9) == [0, 1, 2, 3, 4]
    assert kept(top_k=4) == [0, 1, 2, 3, 4]  # of equally likely ones all stay
    assert kept(top_p=0.01) == [0] and kept(top_p=0.69) == [0, 2] and kept(top_p=0.71) == [0, 2, 4]
    assert kept(top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(top_k=3, top_p=0.75) == [0, 2]  # 0.3 of the 0.9 that are left


def test_tokens_are_drawn_from_the_distribution_by_a_key_for_each_row_and_position():
    """4000 rows: every token's share within 5 sigma."""
    rows, key = 4000, jax.random.key(3)
    logits = jnp.broadcast_to(jnp.log(CHANCES), (rows, 5))
    how, at = Sampling(2.0, top_k=3).arrays(5), jnp.full(rows, 6)
    drawn = jax.jit(draw)(logits, key, jnp.arange(rows, dtype=jnp.uint32), at, how)
    chances = np.where(CHANCES[0] >= 0.2, np.sqrt(CHANCES[0]), 0)
    chances /= chances.sum()
    shares = np.bincount(drawn, minlength=5) / rows
    assert (np.abs(shares - chances) <= 5 * np.sqrt(chances * (1 - chances) / rows)).all()
    alone = jax.random.fold_in(row_keys(key, rows)[-1], 6)
    expected = jax.random.categorical(alone, keep_likely(logits[-1:] / 2, how)[0])
    assert int(drawn[-1]) == int(expected)


def test_of_equally_likely_tokens_the_first_is_taken():
    drawn = draw(jnp.array([[1.0, 3.0, 3.0]]), jax.random.key(0), jnp.zeros(1), jnp.zeros(1), Sampling().arrays(3))
    assert drawn.tolist() == [1]
