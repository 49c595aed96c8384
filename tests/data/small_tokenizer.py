"""A small byte-level BPE tokenizer, trained on a few lines, in a folder as `transformers` writes it."""

import json

import pytest

LINES = ["user: how much is two and two?", "assistant: two and two is four.", "the row of tokens is a row of numbers"]


def make_tokenizer(folder, *, vocab=300, end="</s>", begin="<s>", template=None):
    """Writes a folder with a tokenizer that puts `begin` in front of a text; returns the folder."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(LINES * 9, trainer)
    if begin is not None:
        number = library.token_to_id(begin)
        library.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, number)]),
            ]
        )
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": end, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def make_word_tokenizer(folder, vocab):
    """Writes a folder with a tokenizer of the words w0, w1, ..., "</s>" among its `vocab` ids."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab - 1)} | {"</s>": vocab - 1}, unk_token="w0"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder
