"""Every public name has an example, and the examples of docstrings run.

Those written as sessions of Python are run by pytest's doctest. The others are pieces of a program: here they run after
`BEFORE`, the program that they are pieces of, and after what `SCENES` adds for a name.
"""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import optax
import pytest
from sitetools.docstring import example_of, pieces_of
from sitetools.name_pages import example
from sitetools.public_names import Name, public_names

import jaxshard as js
from tests.docs.scenes import BEFORE, NEEDS, NOT_RUN, SCENES

PIECES = [name for name in public_names() if (text := example_of(name.docstring)) and ">>>" not in text]


def test_every_public_name_has_an_example():
    without = [name.full for name in public_names() if example(name) is None]
    assert not without, f"add an `Example:` to the docstrings of {', '.join(without)}"


def test_the_tables_name_examples():
    names = {name.full for name in PIECES}
    assert {*SCENES, *NOT_RUN, *NEEDS} <= names, sorted({*SCENES, *NOT_RUN, *NEEDS} - names)


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(BEFORE, "before", "exec"), namespace)
    return namespace


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PIECES if name.full not in NOT_RUN], ids=lambda name: name.full)
def test_an_example_runs(name: Name, program: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if name.full in NEEDS:
        pytest.importorskip(NEEDS[name.full])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import matplotlib.pyplot as plt  # which takes longer than everything else here

    plt.switch_backend("Agg")
    namespace = {**program, **HELPERS, "run": js.clone(program["run"])}  # a step takes the arrays of a run
    code = "\n".join(piece.text for piece in pieces_of(example_of(name.docstring)) if piece.is_code)
    code = re.sub(r"steps=1[\d_]+", "steps=2", code)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(SCENES.get(name.full, ""), "scene", "exec"), namespace)
        exec(compile(code, name.full, "exec"), namespace)
    plt.close("all")


def tokenizer_file(folder: str = ".") -> None:
    """A tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    Path(folder).mkdir(exist_ok=True)
    tokenizer.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": "~"}))


def chats() -> str:
    one = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    return "".join(json.dumps(one) + "\n" for _ in range(300))


def hf_folder() -> None:
    """A small Llama, written as transformers would."""
    model = js.models.llama(vocab=64, width=32, depth=2, heads=4, kv_heads=2, hidden=64, seq=16)
    layout = js.layout(js.ddp(), js.make_mesh(data=8), model.init, optax.sgd(0.1))
    js.hf.save("folder", js.init(model.init, optax.sgd(0.1), layout, 0), layout, model=model)


HELPERS = {"tokenizer_file": tokenizer_file, "chats": chats, "hf_folder": hf_folder}
