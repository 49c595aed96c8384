"""`jaxshard generate`: continue prompts with a model, sharded over a mesh."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from jaxshard.checkpoint.reader import describe, restore
from jaxshard.commands.devices import choose_devices
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Generate, Sharding
from jaxshard.commands.packages import versions
from jaxshard.commands.parallel import Parallel, make_parallel
from jaxshard.commands.pretrained import folder_of, is_pretrained
from jaxshard.commands.program import name_with_changes, named_size, read_changes
from jaxshard.commands.result import write_json
from jaxshard.commands.stops import Bytes, ends_of_text, parse_stops
from jaxshard.commands.terminal import facts, printable, start, working
from jaxshard.core.compat import process_count_and_id
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.data.tokenizer import FILE, Tokenizer, tokenizer
from jaxshard.distributed.cluster import initialize
from jaxshard.generation.generate import check_request, generate
from jaxshard.generation.sampling import Sampling
from jaxshard.hf.load import load as load_weights
from jaxshard.hf.load import model as read_model
from jaxshard.models.decoder import Decoder
from jaxshard.models.sizes import SIZES
from jaxshard.training.state import init

_LENGTH = 64
"""The default of --length, if the model has as many positions."""
_BYTES = 256
"""The vocabulary of models that `jaxshard train` made of text, whose tokens are its bytes."""


def run(flags: Generate) -> None:
    """Continue prompts and print them, or write them as JSON."""
    with usage_errors():
        initialize()
    is_first = process_count_and_id()[1] == 0
    console = start(flags, quiet=not is_first)
    with usage_errors():
        how = _make_parallel(flags)
        source = _Source(flags.model, flags.change, flags.checkpoint)
        words = _tokenizer(source, flags.tokenizer)
        network = source.model()
        rows = _rows(flags, words)
        stops = parse_stops(flags.stop, words, ends_of_text(words, source.folder))
        # No more than fit after the longest prompt.
        length = flags.length or max(1, min(_LENGTH, network.seq + 1 - max(map(len, rows))))
        layout = how.layout(network.init)
        Sampling(flags.temperature, flags.top_k, flags.top_p).check(has_key=True)
        check_request(network, layout, rows, length)
        facts(console, {name: how.shown[name] for name in ("devices", "mesh", "strategy")} | {"model": source.name})
    with working(console, "reading the weights"), usage_errors():
        params = source.params(network, layout, flags.seed)
    if flags.checkpoint is None and source.folder is None:
        console.print(f"note: {flags.model} without --checkpoint: its weights are random, of --seed {flags.seed}")
    started = time.perf_counter()
    with working(console, "generating"), usage_errors():
        tokens = generate(
            network, params, layout, rows, length=length, temperature=flags.temperature, top_k=flags.top_k,
            top_p=flags.top_p, stop=stops.sequences(words), key=flags.seed,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    lengths = [len(prompt) for prompt in rows]
    texts = None if words is None else [stops.cut_text(row, n, words) for n, row in zip(lengths, tokens)]
    for shown in texts or [" ".join(map(str, stops.cut(row, n)[n:])) for n, row in zip(lengths, tokens)]:
        console.print("", Text(printable(shown)), sep="\n")
    result = {"model": source.name} | {name: how.about[name] for name in ("mesh", "devices", "strategy")}
    result |= {"tokens": tokens, "text": texts, "length": length, "stop": [*stops.tokens, *stops.texts]}
    result |= {name: getattr(flags, name) for name in ("temperature", "top_k", "top_p", "seed")}
    write_json(flags.json if is_first else None, result | {"seconds": seconds, "versions": versions()})


class _Source(NamedTuple):
    """The source of a model: its name, the value of --change, and the folder of a saved run."""

    target: str
    change: str | None
    checkpoint: Path | None

    @property
    def name(self) -> str:
        return name_with_changes(self.target, self.change)

    @property
    def folder(self) -> Path | None:
        """The folder of a model of Hugging Face's; None for a ready-made size."""
        return folder_of(self.target) if is_pretrained(self.target) else None

    def model(self) -> Decoder:
        """Build the model; one that was trained has the length of rows that it was trained with."""
        changes = read_changes(self.target, self.change)
        if self.folder is not None:  # trained in f32
            return read_model(self.folder, dtype=None if self.checkpoint is None else "float32", **changes)
        try:
            made: Decoder = named_size(self.target).model(**self._trained_with() | changes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--change {self.change}: {error}") from error
        return made

    def _trained_with(self) -> dict[str, Any]:
        """Return the arguments that the model of a saved run was built with."""
        if self.checkpoint is None:
            return {}
        data = describe(self.checkpoint).data
        return {"seq": data["seq"]} if isinstance(data, dict) and isinstance(data.get("seq"), int) else {}

    def params(self, network: Decoder, layout: Layout, seed: int) -> PyTree:
        """Read the weights onto a layout; of a ready-made size without a checkpoint they are random."""
        if self.checkpoint is not None:
            return restore(self.checkpoint, layout).params
        if self.folder is not None:
            return load_weights(self.folder, layout)
        return init(network.init, None, layout, seed).params


def _make_parallel(flags: Generate) -> Parallel:
    """Make the mesh; without --mesh and accelerators, of one CPU device per process."""
    devices = flags.devices
    if flags.mesh is None and devices is None and choose_devices(None)[0].platform == "cpu":
        devices = process_count_and_id()[0]
    return make_parallel(Sharding(mesh=flags.mesh, strategy=flags.strategy, devices=devices))


def _tokenizer(source: _Source, file: Path | None) -> Tokenizer | Bytes | None:
    """Return the tokenizer of the flag, of the model's folder, or of bytes; None if there is none."""
    if file is not None:
        return tokenizer(file)
    if source.folder is not None:
        return tokenizer(source.folder) if (source.folder / FILE).is_file() else None
    if source.target not in SIZES:
        return None  # refused by the model
    shape = SIZES[source.target].shape | read_changes(source.target, source.change)
    return Bytes() if shape.get("vocab") == _BYTES else None


def _rows(flags: Generate, words: Tokenizer | Bytes | None) -> list[list[int]]:
    """Return the tokens of all prompts."""
    prompts = flags.prompt
    if not prompts and not flags.prompt_tokens:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompt-tokens 1,5,9, each as often as you like")
    if prompts and words is None:
        raise ValueError(
            f"--prompt {prompts[0]}: the model has no {FILE} beside it to make tokens of text; give --tokenizer PATH, "
            "or --prompt-tokens 1,5,9"
        )
    rows = [] if words is None or not prompts else [[int(x) for x in row] for row in words.encode(list(prompts))]
    for text, row in zip(prompts, rows):
        if not row:
            raise ValueError(f"--prompt {text!r} has no tokens; give at least one character")
    return rows + [_tokens("--prompt-tokens", text) for text in flags.prompt_tokens]


def _tokens(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{flag} {text}: write token ids with commas between them, such as 1,5,9")
    return [int(part) for part in parts]
