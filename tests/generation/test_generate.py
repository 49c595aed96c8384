"""Tokens that are drawn with a cache are those of full forward passes, on every layout."""

import jax
import jax.numpy as jnp
import pytest

import jaxshard as js
from tests.generation.cases import LAYOUTS, LLAMA, PROMPTS, SIZES, layout_of, likeliest, params_of

MODELS = {
    "llama": lambda: js.models.llama(**LLAMA),
    "grouped": lambda: js.models.llama(**LLAMA | {"kv_heads": 2, "qk_norm": True, "tied": True}),
    "gpt": lambda: js.models.gpt(**SIZES),
    "moe": lambda: js.models.moe(**LLAMA, experts=4, k=2),
    "moe, dense first": lambda: js.models.moe(**LLAMA | {"depth": 3}, experts=4, k=2, dense=1, shared=1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, name) for family in MODELS for name in LAYOUTS if name != "experts" or "moe" in family],
)
def test_greedy_tokens_are_those_of_full_forward_passes(family, layout):
    model = MODELS[family]()
    drawn = js.generate(model, params_of(model), layout_of(model, layout), PROMPTS, length=20)
    assert drawn == likeliest(model, PROMPTS, 20)


# A user's own model: it takes positions from js.positions, its attention has a window and a soft cap, two to a block.


def own_model(window=4, mix=lambda x: x, attend=js.attention, **attention):
    C, H, V = 16, 2, 32
    rates = 0.5 ** jnp.arange(4)

    def init(key):
        k = iter(jax.random.split(key, 4))
        block = {"qkv": jax.random.normal(next(k), (2, C, 3 * C)), "out": jax.random.normal(next(k), (2, C, C))}
        return {"embed": jax.random.normal(next(k), (V, C)), "block": block, "head": jax.random.normal(next(k), (C, V))}

    def embed(params, batch, key):
        return params["embed"][batch["tokens"]]

    def block(params, x, key):
        B, T = x.shape[:2]
        for number in range(2):
            q, k, v = jnp.split((x @ params["qkv"][number]).reshape(B, T, H, -1), 3, axis=-1)
            angles = js.positions(T)[:, None, None] * rates
            q, k = (jnp.concatenate([y[..., :4] * jnp.cos(angles), y[..., 4:] + jnp.sin(angles)], -1) for y in (q, k))
            y = attend(q, k, v, **{"causal": True, "window": window, "soft_cap": 5.0} | attention)
            x = x + jnp.tanh(mix(y).reshape(B, T, -1) @ params["out"][number])
        return x

    def head(params, x, batch, key):
        return js.Mean(jnp.sum(x @ params["head"]), batch["tokens"].size)

    return js.Stacked(embed, block, head, num_blocks=2, init=init)


def readout(params, x):
    return x @ params["head"]


def forward(model):
    def plain(params, tokens):
        x = model.embed(params, {"tokens": tokens}, None)
        x, _ = jax.lax.scan(lambda x, block: (model.block(block, x, None), None), x, params["blocks"])
        return readout(params, x)

    return plain


@pytest.mark.slow
def test_a_model_of_the_users_own_with_a_window_that_its_rows_outgrow():
    model = own_model()
    drawn = js.generate(
        model, params_of(model), layout_of(model, "one device"), PROMPTS[:1], length=12, readout=readout
    )
    assert drawn == likeliest(model, PROMPTS[:1], 12, forward(model))


def in_a_loop(q, k, v, **options):
    return jax.lax.scan(lambda y, _: (js.attention(y, k, v, **options), None), q, None, length=2)[0]


def softmax_attention(q, k, v, **_):
    logits = jnp.einsum("bthd,bshd->bhts", q, k)
    seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, logits, -1e9)), v)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attend": softmax_attention}, "block never calls js.attention"),
        ({"mix": lambda x: jnp.cumsum(x, axis=1)}, r"sees others by js.attention alone(.|\n)*cumsum"),
        ({"attend": in_a_loop}, "calls js.attention in a loop"),
        ({"causal": False}, "with causal=False a query's keys are not the cached earlier positions"),
        ({"bias": jnp.zeros(())}, "with a bias a query's keys are not"),
        ({"attend": lambda q, k, v, **_: js.attention(q, k[:, :1], v[:, :1], causal=False)}, "with causal=False"),
    ],
)
def test_models_that_a_cache_would_make_wrong_are_refused(changes, message):
    model = own_model(**changes)
    with pytest.raises(ValueError, match=message):
        js.generate(model, params_of(model), layout_of(model, "one device"), [[1]], length=4, readout=readout)


def test_a_limit_of_capacity_is_refused():
    model = js.models.moe(**LLAMA, experts=4, k=2, capacity=1.0)
    with pytest.raises(ValueError, match=r"capacity counts the tokens of full rows, but .* the cache of js.generate"):
        js.generate(model, params_of(model), layout_of(model, "one device"), [[1]], length=4)


LLAMA_MODEL = js.models.llama(**LLAMA)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[1], []], {}, "prompt 1 must be a list of at least one token"),
        ([[1.5]], {}, r"prompt 0 must be .* got float64\[1\]"),
        ([[1, 32]], {}, "prompt 0 has the token 32, but the model knows 0 to 31"),
        ([[1, -1]], {}, "has the token -1"),
        ([[1] * 40], {"length": 10}, r"40 tokens and 10 new ones are more than the 48 .* length of at most 9"),
        ([[1]], {"length": 0}, "length must be a whole number of at least 1, got 0"),
        ([[1]], {"temperature": -1.0}, "temperature must be at least 0, got -1"),
        ([[1]], {"temperature": 1.0}, "needs a key"),
        ([[1]], {"top_k": 3}, "temperature=0 takes the most likely token, so top_k=3"),
        ([[1]], {"temperature": 1.0, "key": 0, "top_k": 0}, "top_k must be a whole number of at least 1"),
        ([[1]], {"temperature": 1.0, "key": 0, "top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ([[1]], {"stop": "</s>"}, r"stop must be tokens or sequences of tokens, from 0 on, got \['<'\]"),
        ([[1]], {"stop": [3, []]}, r"stop must be tokens or sequences of tokens, from 0 on, got \[\]"),
    ],
)
def test_what_generation_needs(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        layout = layout_of(LLAMA_MODEL, "one device")
        js.generate(LLAMA_MODEL, params_of(LLAMA_MODEL), layout, prompts, **{"length": 4} | options)


def test_parameters_of_another_model_and_models_without_logits_are_refused():
    model, layout = LLAMA_MODEL, layout_of(LLAMA_MODEL, "one device")
    other = params_of(js.models.llama(**LLAMA | {"hidden": 64}))
    with pytest.raises(ValueError, match=r"do not fit the layout(.|\n)*down_proj"):
        js.generate(model, other, layout, [[1]], length=2)
    own = own_model()
    with pytest.raises(ValueError, match="pass readout="):
        js.generate(own, params_of(own), layout_of(own, "one device"), [[1]], length=2)
    with pytest.raises(TypeError, match=r"must be a js.Stacked, .* got dict"):
        js.generate({}, {}, layout, [[1]], length=2)


@pytest.mark.slow
def test_random_tokens_do_not_depend_on_mesh_or_company_and_rows_end_with_a_stop_token():
    model = LLAMA_MODEL
    options = {"length": 16, "temperature": 1.0, "top_k": 20, "top_p": 0.95, "key": 7}
    layouts = [layout_of(model, name) for name in ("one device", "tensor", "fsdp", "pipeline")]
    first, *others = [js.generate(model, params_of(model), layout, PROMPTS, **options) for layout in layouts]
    assert all(other == first for other in others)
    assert first[0] != js.generate(model, params_of(model), layouts[0], PROMPTS, **options | {"key": 8})[0]
    alone = js.generate(model, params_of(model), layouts[1], PROMPTS[:1], **options)
    assert alone == first[:1]
    stop = [first[0][5], first[1][9]]
    ended = js.generate(model, params_of(model), layouts[1], PROMPTS, **options, stop=stop)
    for prompt, row, end in zip(PROMPTS, first, ended):
        at = next((i for i in range(len(prompt), len(row)) if row[i] in stop), len(row) - 1)
        assert end == row[: at + 1]
    # A sequence counts where all of its tokens are new: the second begins in the prompt.
    sequences = [first[0][7:10], first[1][6:8], [first[2][4]]]
    ended = js.generate(model, params_of(model), layouts[1], PROMPTS, **options, stop=sequences)
    assert [len(row) for row in ended] == [10, len(first[1]), 1 + first[2][1:].index(first[2][4]) + 1]
    assert all(end == row[: len(end)] for end, row in zip(ended, first))


@pytest.mark.slow
def test_a_run_as_stored_gives_the_same_tokens_as_its_parameters_in_model_order():
    model = js.models.llama(**LLAMA | {"vocab": 31, "hidden": 33})  # padded by fsdp
    layout = layout_of(model, "fsdp")
    run = js.init(model.init, None, layout, 0, init_from=params_of(model))
    drawn = [js.generate(model, params, layout, PROMPTS, length=8) for params in (run, run.params, params_of(model))]
    assert drawn[0] == drawn[1] == drawn[2] == likeliest(model, PROMPTS, 8)
    assert run.opt_state is None and int(run.step) == 0


@pytest.mark.slow
def test_parameters_of_another_layout_are_moved_and_a_padded_layout_is_named():
    model = MODELS["llama"]()
    target = js.layout(js.compose(js.fsdp("data", min_size=0), js.tensor()), js.make_mesh(data=2, tensor=4), model.init)
    expected = js.generate(model, params_of(model), target, PROMPTS, length=6)
    for strategy, devices in ((js.fsdp("data", min_size=0), jax.devices()[4:]), (js.ddp("data"), jax.devices())):
        source = js.layout(strategy, js.make_mesh(devices, data=-1), model.init)
        run = js.init(model.init, None, source, 0, init_from=params_of(model))
        assert js.generate(model, run, target, PROMPTS, length=6) == expected
    piped = layout_of(model, "pipeline")
    run = js.init(model.init, None, piped, 0, init_from=params_of(model))
    with pytest.raises(ValueError, match=r"pipeline order, js\.transfer\(run\.params, that_layout, layout\)"):
        js.generate(model, run, target, PROMPTS, length=6)
    assert js.generate(model, js.transfer(run, piped, target), target, PROMPTS, length=6) == expected
