"""`jaxshard generate`: continue prompts with a model, sharded over a mesh."""

from __future__ import annotations

import time

from rich.text import Text

from jaxshard.checkpoint.reader import describe, restore
from jaxshard.commands.devices import choose_devices
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Generate, Sharding
from jaxshard.commands.json_object import write_json
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.packages import versions
from jaxshard.commands.parallel import Parallel, make_parallel
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
from jaxshard.storage.paths import AnyPath
from jaxshard.training.state import init

_LENGTH = 64
"""The default of --length, if the model has as many positions."""
_BYTES = 256
"""The vocabulary of models that `jaxshard train` made of text, whose tokens are its bytes."""


def run(flags: Generate) -> None:
    """Run `jaxshard generate`: continue prompts, and print the texts or write them as JSON."""
    with usage_errors():
        initialize()
    is_first = process_count_and_id()[1] == 0
    console = start(flags, quiet=not is_first)
    with usage_errors():
        how = _make_parallel(flags)
        named = NamedModel(flags.model, flags.change)
        words = _tokenizer(named, flags.tokenizer)
        _refuse_factors(flags.checkpoint)
        folder = named.find_folder(weights=flags.checkpoint is None)
        network = _make_model(named, flags.checkpoint)
        rows = _rows(flags, words)
        stops = parse_stops(flags.stop, words, ends_of_text(words, folder))
        # No more than fit after the longest prompt.
        length = flags.length or max(1, min(_LENGTH, network.seq + 1 - max(map(len, rows))))
        layout = how.layout(network.init)
        Sampling(flags.temperature, flags.top_k, flags.top_p).check(has_key=True)
        check_request(network, layout, rows, length)
        facts(console, {name: how.shown[name] for name in ("devices", "mesh", "strategy")} | {"model": str(named)})
    with working(console, "reading the weights"), usage_errors():
        params = _read_params(flags, folder, network, layout)
    if flags.checkpoint is None and folder is None:
        console.print(f"note: {flags.model} without --checkpoint: its weights are random, of --seed {flags.seed}")
    if isinstance(words, Tokenizer) and not stops.tokens:
        console.print(f"note: {words.file.parent} names no token that ends a text (eos_token); end texts by --stop")
    started = time.perf_counter()
    with working(console, "generating"), usage_errors():
        tokens = generate(
            network, params, layout, rows, length=length, temperature=flags.temperature, top_k=flags.top_k,
            top_p=flags.top_p, stop=stops.sequences(words), key=flags.seed,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    lengths = [len(prompt) for prompt in rows]
    texts = None if words is None else [stops.cut_text(row, n, words) for n, row in zip(lengths, tokens)]
    if texts is not None and words is not None:
        for number in range(len(rows) - len(flags.chat), len(rows)):  # of a conversation the answer alone
            texts[number] = texts[number].removeprefix(words.decode(rows[number]))
            if not texts[number]:
                end = words.decode(tokens[number][lengths[number] : lengths[number] + 1])
                question = flags.chat[number - len(rows)]
                console.print(f"note: the answer to {question!r} is empty: the model began with {end!r}, which ends it")
    for shown in texts or [" ".join(map(str, stops.cut(row, n)[n:])) for n, row in zip(lengths, tokens)]:
        console.print("", Text(printable(shown)), sep="\n")
    result = {"model": str(named)} | {name: how.about[name] for name in ("mesh", "devices", "strategy")}
    result |= {"tokens": tokens, "text": texts, "length": length, "stop": [*stops.tokens, *stops.texts]}
    result |= {name: getattr(flags, name) for name in ("temperature", "top_k", "top_p", "seed")}
    write_json(flags.json if is_first else None, result | {"seconds": seconds, "versions": versions()})


def _refuse_factors(checkpoint: AnyPath | None) -> None:
    """Raise ValueError if a checkpoint has low-rank factors (--lora), since the frozen model is not in it."""
    if checkpoint is not None and describe(checkpoint).base:
        raise ValueError(
            f"--checkpoint {checkpoint} holds LoRA factors; write the merged model with jaxshard train ... --resume "
            "--export DIR, then jaxshard generate --model hf:DIR"
        )


def _make_model(named: NamedModel, checkpoint: AnyPath | None) -> Decoder:
    """Build the model; for a checkpoint in f32, and with the sequence length with which it was trained."""
    if named.folder is not None:
        return read_model(named.folder, dtype=None if checkpoint is None else "float32", **named.changes)
    data = None if checkpoint is None else describe(checkpoint).data
    trained = {"seq": data["seq"]} if isinstance(data, dict) and isinstance(data.get("seq"), int) else {}
    made: Decoder = named.model(**trained)
    return made


def _read_params(flags: Generate, folder: AnyPath | None, network: Decoder, layout: Layout) -> PyTree:
    """Read weights from a checkpoint or a Hugging Face folder, or else draw them, sharded as the layout says."""
    if flags.checkpoint is not None:
        return restore(flags.checkpoint, layout).params
    if folder is not None:
        return load_weights(folder, layout)
    return init(network.init, None, layout, flags.seed).params


def _make_parallel(flags: Generate) -> Parallel:
    """Make mesh and strategy; without --mesh and without an accelerator the mesh has one CPU device per process."""
    devices = flags.devices
    if flags.mesh is None and devices is None and choose_devices(None)[0].platform == "cpu":
        devices = process_count_and_id()[0]
    return make_parallel(Sharding(mesh=flags.mesh, strategy=flags.strategy, devices=devices))


def _tokenizer(named: NamedModel, file: AnyPath | None) -> Tokenizer | Bytes | None:
    """Return the tokenizer of --tokenizer or of the model's folder, or `Bytes` for a model of 256 tokens; else None."""
    if file is not None:
        return tokenizer(file)
    if named.folder is not None:
        return tokenizer(named.folder) if (named.folder / FILE).is_file() else None
    return Bytes() if named.shape.get("vocab") == _BYTES else None


def _rows(flags: Generate, words: Tokenizer | Bytes | None) -> list[list[int]]:
    """Return the token ids of each prompt of --prompt and --prompt-tokens; ValueError if there is none."""
    prompts = flags.prompt
    if not prompts and not flags.prompt_tokens and not flags.chat:
        raise ValueError(
            "there is no prompt: give --prompt TEXT, --prompt-tokens 1,5,9 or --chat TEXT, as often as you like"
        )
    if prompts and words is None:
        raise ValueError(
            f"--prompt {prompts[0]}: the model has no {FILE} beside it to make tokens of text; give --tokenizer PATH, "
            "or --prompt-tokens 1,5,9"
        )
    rows = [] if words is None or not prompts else [[int(x) for x in row] for row in words.encode(list(prompts))]
    for text, row in zip(prompts, rows):
        if not row:
            raise ValueError(f"--prompt {text!r} has no tokens; give at least one character")
    return rows + [_tokens("--prompt-tokens", text) for text in flags.prompt_tokens] + _chats(flags, words)


def _chats(flags: Generate, words: Tokenizer | Bytes | None) -> list[list[int]]:
    """Return the tokens of the conversations that the model is to answer."""
    if flags.system is not None and not flags.chat:
        raise ValueError(f"--system {flags.system}: it comes before a message; add --chat TEXT")
    if flags.chat and not isinstance(words, Tokenizer):
        raise ValueError(f"--chat {flags.chat[0]}: the model has no {FILE} and chat template; give --tokenizer PATH")
    before = [] if flags.system is None else [{"role": "system", "content": flags.system}]
    return [
        words.apply_chat_template([*before, {"role": "user", "content": text}], add_generation_prompt=True)
        for text in flags.chat
        if isinstance(words, Tokenizer)
    ]


def _tokens(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{flag} {text}: write token ids with commas between them, such as 1,5,9")
    return [int(part) for part in parts]
