"""Rules name the dimensions of parameters, the names say what is split; whatever does not fit is named."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.core.rules import Rules
from jaxshard.core.tree import BLOCKS

PARTS = 4


def leaf(path, *shape, names=None):
    return js.Leaf(path, shape, jnp.float32, names or (None,) * len(shape))


def names_of(path, *shape, rules=js.RULES, **more):
    return Rules(tuple(rules)).resolve([leaf(path, *shape, **more)])[0].names


def layout(params, rules=js.RULES, data=None, parts=PARTS):
    mesh = js.make_mesh(data=8 // parts, tensor=parts)
    strategy = js.compose(data or js.ddp(), js.tensor(rules))
    params = params | {"anchor": {"wi": (8, 8, 8)}}  # something is split, whatever becomes of the others
    return js.layout(strategy, mesh, lambda key: jax.tree.map(jnp.zeros, params, is_leaf=is_shape), optax.sgd(0.1))


def is_shape(node):
    return isinstance(node, tuple)


@pytest.mark.parametrize(
    ("path", "shape", "names"),
    [
        ("attn/query/kernel", (32, 8, 4), ("embed", "heads", "head_dim")),
        ("attn/key/kernel", (32, 2, 4), ("embed", "kv_heads", "head_dim")),
        ("attn/out/kernel", (8, 4, 32), ("heads", "head_dim", "embed")),
        ("self_attn/q_proj/kernel", (32, 32), ("embed", "heads")),
        ("self_attn/o_proj/kernel", (32, 32), ("heads", "embed")),
        ("h/0/attn/c_attn/kernel", (32, 96), ("embed", "qkv")),
        ("h/0/attn/c_proj/kernel", (32, 32), ("heads", "embed")),
        ("h/0/mlp/c_proj/kernel", (128, 32), ("mlp", "embed")),
        ("mlp/gate_proj/kernel", (32, 128), ("embed", "mlp")),
        ("fc1/kernel", (32, 128), ("embed", "mlp")),
        ("wi/kernel", (32, 128), ("embed", "mlp")),
        ("mlp/wo/kernel", (128, 32), ("mlp", "embed")),
        ("moe/wi", (8, 32, 64), ("experts", "embed", "mlp")),
        ("MoeBlock_0/wi_0", (8, 32, 64), ("experts", "embed", "mlp")),
        ("blocks/experts/w2", (4, 8, 64, 32), ("layers", "experts", "mlp", "embed")),
        ("blocks/w1", (4, 32, 64), ("layers", "embed", "mlp")),
        ("blocks/gate", (4, 32, 64), ("layers", "embed", "mlp")),
        ("blocks/gate", (4, 32, 8), (None, None, None)),
        ("Embed_0/embedding", (64, 32), ("vocab", "embed")),
        ("lm_head/kernel", (32, 64), ("embed", "vocab")),
        ("Dense_1/kernel", (128, 32), ("features", "embed")),
        ("Conv_0/kernel", (3, 3, 16, 32), ("spatial", "spatial", "embed", "features")),
        ("cell/hf/kernel", (32, 32), ("features", "embed")),
        # Gemma's einsums, nanodo's output projection, and kernels with heads that nobody named.
        ("layer_0/attn/q_einsum/w", (8, 32, 64), ("heads", "embed", "head_dim")),
        ("layer_0/attn/kv_einsum/w", (2, 4, 32, 64), (None, "kv_heads", "embed", "head_dim")),
        ("layers/0/attn/qkv_einsum/kernel", (3, 8, 32, 64), (None, "heads", "embed", "head_dim")),
        ("layer_0/attn/attn_vec_einsum/w", (8, 64, 32), ("heads", "head_dim", "embed")),
        ("layer_0/mlp/gating_einsum", (2, 32, 128), (None, "embed", "mlp")),
        ("layer_0/mlp/linear", (128, 32), ("mlp", "embed")),
        ("layer_0/moe/gating_einsum/w", (4, 2, 128, 32), ("experts", None, "mlp", "embed")),
        ("embedder/input_embedding", (64, 32), ("vocab", "embed")),
        ("CausalAttn_0/attn_out_proj/kernel", (8, 4, 32), ("heads", "head_dim", "embed")),
        ("to_heads/kernel", (32, 8, 4), ("embed", "features", None)),
        ("from_heads/kernel", (8, 4, 32), ("features", None, "embed")),
        ("fused/kernel", (32, 3, 8, 4), ("embed", None, "features", None)),
        # Stacked by nn.scan or nn.vmap, without a name for it.
        ("attn/query/kernel", (6, 32, 8, 4), ("layers", "embed", "heads", "head_dim")),
        ("fc2/kernel", (6, 128, 32), ("layers", "mlp", "embed")),
        ("Dense_1/kernel", (6, 128, 32), ("spatial", "features", "embed")),
        ("pos_embedding", (1, 16, 32), (None, None, None)),
        ("LayerNorm_0/scale", (32,), (None,)),
    ],
)
def test_what_flax_calls_its_parameters(path, shape, names):
    assert names_of(path, *shape) == names
    if "layers" in names:
        return
    stacked = (BLOCKS, *(None,) * len(shape))
    assert names_of(f"blocks/{path}", 6, *shape, names=stacked) == (BLOCKS, *names)


WINDOW = ("spatial", "spatial")


TO_HEADS, FROM_HEADS = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({"out": (4, 4, 64, 3)}, {"out": (*WINDOW, "features", "embed")}),
        ({"out": (3, 3, 64, 64)}, {"out": (*WINDOW, "embed", "features")}),
        ({"o": (4, 64, 3)}, {"o": ("layers", "heads", "embed")}),
        ({"query": (3, 3, 64, 64)}, {"query": (*WINDOW, "embed", "features")}),
        ({"qkv": (1, 1, 64, 192), "out": (1, 1, 64, 64)}, {"out": (*WINDOW, "embed", "features")}),
        # Heads whose sizes do not multiply to the width of the model, known by the kernel that makes them.
        ({"q": (40, 8, 4), "out": (8, 4, 40)}, {"q": TO_HEADS, "out": FROM_HEADS}),
        ({"v": (40, 2, 4), "o": (8, 4, 40)}, {"v": ("embed", "kv_heads", "head_dim"), "o": FROM_HEADS}),
        ({"q": (40, 32), "out": (8, 4, 40)}, {"q": ("embed", "heads"), "out": FROM_HEADS}),
        # Stacked layers of flat projections.
        ({"q_proj": (6, 32, 32)}, {"q_proj": ("layers", "embed", "heads")}),
        ({"o_proj": (6, 32, 32)}, {"o_proj": ("layers", "heads", "embed")}),
        ({"wo": (6, 128, 32)}, {"wo": ("layers", "mlp", "embed")}),
    ],
)
def test_only_kernels_of_heads_are_split_by_heads(shapes, names):
    found = Rules(js.RULES).resolve([leaf(f"net/{layer}/kernel", *shape) for layer, shape in shapes.items()])
    assert names.items() <= {one.path.split("/")[1]: one.names for one in found}.items()


def test_a_rule_of_the_user_decides_even_if_it_repeats_a_built_in_one():
    rule = ("out/kernel", ("heads", "head_dim", "embed"))
    assert names_of("net/out/kernel", 8, 4, 40, rules=[rule, *js.RULES]) == rule[1]
    assert names_of("net/out/kernel", 8, 4, 40) != rule[1]


def test_a_bias_has_the_names_of_its_kernel():
    leaves = [leaf("a/query/bias", 8, 4), leaf("a/query/kernel", 32, 8, 4), leaf("b/fc2/bias", 32)]
    leaves += [leaf("b/fc2/kernel", 128, 32), leaf("c/bias", 32)]
    query, _, narrow, _, alone = Rules(js.RULES).resolve(leaves)
    assert query.names == ("heads", "head_dim") and query.named_by == "as its kernel"
    assert narrow.names == ("embed",) and alone.names == (None,) and not alone.named_by


@pytest.mark.parametrize(
    ("kernel", "bias", "names"),
    [
        ((6, 32, 128), (6, 128), ("spatial", "features")),
        ((6, 32, 8, 4), (6, 8, 4), ("layers", "heads", "head_dim")),
    ],
)
def test_a_stacked_bias_has_the_names_of_its_stacked_kernel(kernel, bias, names):
    layer = "query" if len(kernel) == 4 else "Dense_0"
    leaves = [leaf(f"scan/{layer}/bias", *bias), leaf(f"scan/{layer}/kernel", *kernel)]
    assert Rules(js.RULES).resolve(leaves)[0].names == names


def test_the_first_rule_that_fits_decides():
    rules = [("fuse/kernel", ("mlp", "embed")), ("fc1/kernel", "whole"), ("fc1/kernel", ("embed", "mlp")), *js.RULES]
    assert names_of("x/fuse/kernel", 32, 64, rules=rules) == ("mlp", "embed")
    assert names_of("x/fc1/kernel", 32, 64, rules=rules) == (None, None)
    assert names_of("x/refuse/kernel", 32, 64, rules=rules) == ("embed", "features"), "patterns end whole words"
    assert Rules((("mlp", "whole"), *js.RULES)).fate("mlp") == "whole"


def test_names_of_the_model_go_before_built_in_patterns_and_after_the_users():
    assert names_of("fc1/kernel", 32, 64, names=("mlp", "embed")) == ("mlp", "embed")
    rules = [("fc1/kernel", "whole"), *js.RULES]
    assert names_of("fc1/kernel", 32, 64, names=("mlp", "embed"), rules=rules) == (None, None)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (("embed", "kv"), ("embed", "heads", "head_dim")),  # says too little, and splits nothing
        (("mlp", "embed"), ("mlp", "embed", None)),  # splits a dimension
        (("embed", "kv", None), ("embed", "kv", None)),  # says everything
    ],
)
def test_an_annotation_with_too_few_names_decides_if_it_splits(given, names):
    assert names_of("attn/query/kernel", 32, 8, 4, names=given) == names


def test_names_that_no_rule_knows_are_listed_with_near_ones():
    leaves = [leaf("a", 8, 8, names=("embd", "mlp")), leaf("b", 8, names=("zzzz",))]
    with pytest.raises(ValueError, match=r"no rule knows these names") as error:
        Rules(js.RULES).resolve(leaves)
    assert "a [8, 8]: 'embd'; did you mean 'embed'" in str(error.value) and "b [8]: 'zzzz'" in str(error.value)


@pytest.mark.parametrize(
    "rule", ["mlp", ("mlp",), ("mlp", "cut"), ("a/b", 1), (3, "split"), ("a/b", ("x", 2)), ("a/b", "split")]
)
def test_rules_that_are_none(rule):
    with pytest.raises(TypeError, match="every rule must be a pair"):
        js.tensor([rule])


def test_the_signature_names_the_built_in_rules():
    for made in (js.tensor, js.expert):
        assert "= js.RULES" in str(inspect.signature(made))
    assert js.tensor() == js.tensor(js.RULES) and "up_proj" in repr(js.RULES)


def test_columns_then_rows_are_split_and_used_split():
    made = layout({"fc1": {"kernel": (32, 64), "bias": (64,)}, "fc2": {"kernel": (64, 32), "bias": (32,)}})
    specs = {p.leaf.path: (p.placement.use, p.placement.store) for p in made.placed() if p.role == "param"}
    assert specs["fc1/kernel"] == (jax.P(None, "tensor"),) * 2 and specs["fc1/bias"] == (jax.P("tensor"),) * 2
    assert specs["fc2/kernel"] == (jax.P("tensor", None),) * 2 and specs["fc2/bias"] == (jax.P(None),) * 2
    table = made.explain()
    assert "dim 1 over tensor" in table and "mlp: fc1/kernel" in table and "mlp: as its kernel" in table


def test_a_fill_splits_another_dimension():
    made = layout({"fc1": {"kernel": (32, 64)}}, data=js.fsdp(min_size=0))
    placement = made.params["fc1"]["kernel"]
    assert placement.store == jax.P("data", "tensor") and placement.use == jax.P(None, "tensor")


def test_a_stack_of_matrices_is_no_stack_of_experts():
    assert names_of("blocks/w1", 4, 32, 64, names=(BLOCKS, None, None)) == (BLOCKS, "embed", "mlp")
    blocks = {"w1": (4, 32, 64), "w2": (4, 64, 32)}
    made = layout({"blocks": blocks, "experts": blocks})
    assert made.params["blocks"]["w1"].use == jax.P(None, None, "tensor")
    assert made.params["blocks"]["w2"].use == jax.P(None, "tensor", None)
    assert made.params["experts"]["w1"].use == jax.P("tensor", None, None)


def test_arrays_beside_a_router_are_those_of_its_experts():
    block = {"router": {"kernel": (32, 8)}, "wi": (8, 32, 64), "w1": (4, 32, 64)}
    made = layout({"ffn": block, "router": (32, 8), "w2": (8, 64, 32)})
    assert made.params["ffn"]["wi"].use == made.params["w2"].use == jax.P("tensor", None, None)
    assert made.params["ffn"]["w1"].use == jax.P(None, None, "tensor")  # four are not eight


def test_fewer_key_heads_than_devices_are_copied_and_said_so():
    made = layout({"key": {"kernel": (32, 2, 4)}})
    assert made.params["key"]["kernel"].use == jax.P(None, None, None)
    assert "2 kv_heads on each of 4 devices: key/kernel" in made.explain()


def test_what_the_axis_does_not_divide_is_named_with_sizes_that_work():
    with pytest.raises(
        ValueError, match=r"dim 1 of query/kernel \(heads\) has 6 elements, which the 4 devices"
    ) as error:
        layout({"query": {"kernel": (32, 6, 4)}})
    assert "sizes that would work: 4 or 8" in str(error.value) and "('heads', 'whole')" in str(error.value)
    assert "'whole'). The name 'heads' comes from the rule 'query/kernel'" in str(error.value)
    kept = layout({"query": {"kernel": (32, 6, 4)}}, rules=[("heads", "whole"), *js.RULES])
    assert kept.params["query"]["kernel"].use == jax.P(None, None, None)


def test_large_arrays_that_no_rule_took_are_reported():
    with pytest.warns(UserWarning, match=r"no rule took mystery \[256, 256\], other \[256, 256\]: replicated over"):
        made = layout({"mystery": (256, 256), "other": (256, 256), "small": (8, 8)})
    assert "no rule took it" in made.explain()
    layout({"mystery": (256, 256)}, rules=[("*mystery", "whole"), *js.RULES])  # said on purpose: no warning


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("fuse/kernel", ("embed", "mlp"))], "rules without effect: 'fuse/kernel' matches no path;"),
        ([("fc1/kernel", ("a", "mlp", "b"))], r"'fc1/kernel' has 3 names, fc1/kernel \[32, 64\] other dimensions"),
        ([("*kernel", "whole"), ("fc1/kernel", "whole")], "'fc1/kernel' comes after another rule for fc1/kernel"),
    ],
)
def test_patterns_without_effect_are_reported(rules, message):
    with pytest.warns(UserWarning, match=message):
        layout({"fc1": {"kernel": (32, 64)}}, rules=[*rules, *js.RULES])


def test_the_axis_in_the_place_of_the_rules():
    with pytest.raises(TypeError, match=r"write js.tensor\(axis='model'\)"):
        js.tensor("model")


def test_an_axis_that_splits_nothing_is_reported():
    init = lambda key: {"fc1": {"kernel": jnp.zeros((32, 64))}}  # noqa: E731
    for strategy, axis in [(js.tensor(), "data"), (js.fsdp(), "tensor")]:
        with pytest.warns(UserWarning, match=f"the mesh axis '{axis}' splits nothing"):
            js.layout(strategy, js.make_mesh(data=2, tensor=4), init, optax.sgd(0.1))


def test_an_axis_that_splits_storage_and_no_work_is_reported():
    init = lambda key: {"fc1": {"kernel": jnp.zeros((32, 64))}}  # noqa: E731
    strategy = js.compose(js.ddp("data"), js.shard("spare", ["param", "grad", "opt"], min_size=0))
    with pytest.warns(UserWarning, match=r"'spare' splits stored arrays but no rows.*js.batch\('spare'\)"):
        js.layout(strategy, js.make_mesh(data=2, spare=4), init, optax.sgd(0.1))


def test_optimizer_state_is_split_as_its_parameter_and_nothing_else_is_named():
    """Adafactor's rows and columns have other dimensions than the parameters whose paths they carry."""
    mesh, shapes = js.make_mesh(tensor=8), {"fc1": {"kernel": (256, 512)}}
    init = lambda key: jax.tree.map(jnp.zeros, shapes, is_leaf=is_shape)  # noqa: E731
    adam = js.layout(js.tensor(), mesh, init, optax.adam(0.1))
    assert adam.opt_state[0].mu["fc1"]["kernel"].store == jax.P(None, "tensor")
    factored = js.layout(js.tensor(), mesh, init, optax.adafactor(0.1))
    rows = [p for p in factored.placed() if p.role == "opt" and len(p.leaf.shape) == 1 and p.leaf.size > 1]
    assert rows and all(p.placement.store == jax.P(None) for p in rows)


@settings(max_examples=25)
@given(rows=st.integers(1, 64), columns=st.integers(1, 64), parts=st.sampled_from([2, 4, 8]))
def test_any_unnamed_matrix_is_split_along_its_long_side_or_whole(rows, columns, parts):
    placement = layout({"Dense_0": {"kernel": (rows, columns)}}, parts=parts).params["Dense_0"]["kernel"]
    dim, size = (0, rows) if columns < rows else (1, columns)
    assert (placement.use[dim] == "tensor") == (size % parts == 0)
    assert placement.use[1 - dim] is None and placement.store == placement.use
