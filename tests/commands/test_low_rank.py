"""The value of --lora."""

import re

import pytest

import jaxshard as js
from jaxshard.commands.low_rank import add_factors, read_factors


def test_the_value_of_the_flag():
    assert read_factors("rank=8") == {"rank": 8}
    text = "match=q_proj/kernel, rank=8,alpha=16,base=int8,match=v_proj/kernel"
    match = ["q_proj/kernel", "v_proj/kernel"]
    assert read_factors(text) == {"match": match, "rank": 8, "alpha": 16.0, "base": "int8"}
    for text in ("8", "rank=8,alpha=nan", "rank=8,match=", "alpha=2"):
        with pytest.raises(ValueError, match=r"--lora .*write rank=8"):
            read_factors(text)


def test_names_of_peft_lead_to_ours():
    for text, message in {
        "r=16": "there is no r; did you mean rank?",
        "rank=8,target_modules=q_proj,v_proj": "there is no target_modules; did you mean match?",
        "rank=8,lora_dropout=0.1": "there is no lora_dropout; factors have no dropout",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            read_factors(text)


@pytest.mark.slow
def test_by_default_all_matrices_of_blocks_have_factors_but_routers_and_experts():
    sizes = {"vocab": 64, "seq": 16, "width": 32, "depth": 3, "heads": 4}
    model = js.models.moe(**sizes, kv_heads=2, hidden=32, experts=2, k=1, dense=1, shared=1)
    layout = js.layout(js.fsdp(), js.make_mesh(data=8), add_factors(model, "rank=4").init)
    table = layout.explain().splitlines()
    adapted = {line.split()[1].removesuffix("/a") for line in table if line.startswith("param") and "/a " in line}
    attention = {f"blocks/attention/{x}_proj/kernel" for x in "qkvo"}
    assert adapted == attention | {f"blocks/shared/{x}_proj/kernel" for x in ("gate", "up", "down")}
