"""Values of flags that can't be meant: one line that says what to do, status 2, and nothing done."""

import os
import re
from pathlib import Path

import pytest

import jaxshard as js
from jaxshard.commands import devices
from jaxshard.commands.main import main

REFUSED = {
    "schedule one_f_one_b --stages 4 --microbatches 99999999999999999999": "--microbatches 9+: give a number above 0",
    "schedule one_f_one_b --stages 4 --microbatches 9999999999": "39999999996 forwards.*take fewer micro-batches",
    "train --lr nan": "--lr nan: give a number above 0",
    "audit gpt-1m --microbatches 0": "--microbatches 0: give a number above 0",
    "plan llama-1m --price -1": "--price -1: give a number above 0",
    "launch -n 0 -- true": "--processes 0: give a number above 0",
    "launch -n 2 --max-restarts -1 -- true": "--max-restarts -1: give a number from 0",
    "train --lr x": "--lr x: give a number",
    "train --lr inf": "--lr inf: give a number above 0 and below",
    "train --patience 0": "--patience 0: give a number above 0",
    "train --seed -1": r"--seed -1: give a number from 0 to 2\*\*63 - 1",
    "train --seed 9223372036854775808": r"--seed 9223372036854775808: give a number from 0 to 2\*\*63 - 1",
    "train --remat all": "--remat all: is not name=value; write everything, dots, nothing, or each .* with save",
    "audit gpt-1m --remat qkv=keep": "--remat qkv=keep: use one of save.*; write everything",
    "audit gpt-1m --remat qkv=save,qkv=remat": "qkv=save,qkv=remat: .* qkv comes twice; .* each activation once",
    "train --remat block_in=remat": "'block_in' is what a block is computed again from, so it can't be 'remat'",
    "train --mesh data=4,pipe=2 --remat qkv=offload": "'qkv' can't be offloaded: a pipeline keeps activations",
    "parity gpt-1m --seed -3": "--seed -3: give a number from 0",
    "train --data=": "--data '' is empty: give a value, or leave the flag out",
    "train --data x.bin --vocab 3 --dtype S": "--dtype S: token ids are integers; use one such as uint16",
    "train --data x.bin --vocab 3 --dtype i4,,": "--dtype i4,,: there is no such dtype; use one such as uint16",
    "train --data x.bin --vocab 3 --dtype float32": "--dtype float32: token ids are integers",
    "train --checkpoint az://bucket/run": "az://bucket/run: files are read and written in a mounted file system",
    "train --export hf://owner/name": "hf://owner/name: files are",
    "train --json az://bucket/x.json": "az://bucket/x.json: files are .*, or an address of s3://, gs://",
    "train --log az://bucket/x.jsonl": "az://bucket/x.jsonl: files are",
    "train --data az://bucket/x.txt": "az://bucket/x.txt: files are",
    "train --data s3:///bucket//x.txt": "^jaxshard: s3:///bucket//x.txt: no bucket; write an address such as",
    "train --checkpoint s3:/bucket/x": "^jaxshard: --checkpoint s3:/bucket/x: files are",
    "train --data x.txt --tokenizer az://b/tokenizer.json": "az://b/tokenizer.json: files are",
    "train --tensorboard hf://x": "hf://x: files are .* or an address of gs://, s3://",
    "train --profile s3://x": "s3://x: files are .* or an address of gs://",
    "train --model hf://owner/name": "hf://owner/name is an address; write hf:owner/name",
    "train --model hf:az://bucket/model": "az://bucket/model: files are",
    "train --mesh data=4,pipe=2 --schedule s3://bucket/x.csv": "s3://bucket/x.csv: files are",
    "train --mesh data=4,pipe=2 --schedule s3:///bucket//x.csv": " s3:///bucket//x.csv: files are",
    "generate --model hf://owner/name --prompt x": "hf://owner/name is an address",
    "generate --model gpt-1m --checkpoint az://b/run --prompt x": "az://b/run: files are",
    "schedule gpipe --stages 2 --microbatches 2 --plot gs://bucket/x.svg": "gs://bucket/x.svg: files are",
    "schedule s3://bucket/x.csv": "s3://bucket/x.csv: files are",
    "plan gpt-1m --mesh data=8 --topology v5e:2x4 --plot s3://b/x.svg": "s3://b/x.svg: files are",
    "audit --hlo gs://bucket/step.txt --mesh data=8": "gs://bucket/step.txt: files are",
    "audit gs://bucket/train.py:make": "gs://bucket/train.py:make: files are",
    "checkpoint list az://bucket/run": "az://bucket/run: files are",
    "doctor --json az://bucket/x.json": "az://bucket/x.json: files are",
    "audit gpt-1m --topology=": "topology ''",
    "train --mesh data=3 --devices 6": "data=3 needs 3 devices, but there are 6; set one size to -1",
    "audit gpt-1m --mesh data=8,tensor=2": "16 simulated CPU devices: there are 8 cpu device",
    "train --model gtp2": r"--model gtp2: there is no such size; did you mean gpt2\? Use one of gpt-1m",
    "generate --model lama-1m --prompt x": r"no such size; did you mean llama-1m\?",
    "plan gtp-1m": r"gtp-1m: there is no such size; did you mean gpt-1m\?",
    "train --change dept=3": r"there is no dept; did you mean depth\? Use one of vocab, width, depth",
    "schedule gpip --stages 2 --microbatches 2": r"no schedule 'gpip'; use one of gpipe, .*; did you mean gpipe\?",
    "launch -n 2 --grace nan -- true": "--grace nan: give a number above 0",
}

REFUSED |= {
    "train --stpes 3": r"there is no flag --stpes; did you mean --steps\?; see jaxshard train --help",
    "train --restart 1": "there is no flag --restart",
    "train --steps x": "--steps x: give a whole number",
    "train --steps": "--steps: expected one argument; see jaxshard train --help",
    "train --resume=x": "--resume: ignored explicit argument 'x'",
    "train --engine fast": "--engine fast: use one of explicit, auto, pipelined",
    "train --strategy fdsp": r"--strategy fdsp: did you mean fsdp\? Use one of ddp, .*zero2, fsdp",
    "generate --model x --strategy fsdq": r"--strategy fsdq: did you mean fsdp\?",
    "train --context ulises": r"--context ulises: did you mean ulysses\?",
    "train --bad-steps skp": r"--bad-steps skp: did you mean skip\?",
    "search gpt-1m --topology v5e:2x2 --precision bf15": r"--precision bf15: did you mean bf16\?",
    "train --optimizer lionn": r"--optimizer lionn: optax, .* have no such optimizer; did you mean lion\?",
    "train --optimizer lion,weight_decy=1": r"--optimizer lion, with .* did you mean weight_decay\? Use one of b1, b2",
    "train --optimizer lion,b1=x": r"--optimizer lion, with b1=x: give a number",
    "train --optimizer nothing-like-it": "use a name such as adamw, lion or muon",
    "train --optimizer sgd,nesterov=3": "write on or off",
    "train --decay linaer": r"--decay linaer: did you mean linear\?",
    "train --clip 0": "--clip 0: give a number above 0",
    "train --rule vocab": "--rule vocab: write a logical axis and tensor, .* or replicated, such as vocab=replicated",
    "train --rule vocab=replicatd": r"such as vocab=replicated; did you mean replicated\?",
    "train --rule vocab=replicated": "--rule vocab=replicated is about the axis tensor; add it to --mesh",
    "audit gpt-1m --mesh data=4,tensor=2 --rule vocabb=tensor": r"have no axis vocabb; did you mean vocab\?",
    "checkpoint lst run": r"ACTION lst: did you mean list\?",
    "launch -- true": "--processes must be given; see jaxshard launch --help",
    "launch -n x -- true": "--processes x: give a whole number",
    "checkpoint": "ACTION and DIR must be given; see jaxshard checkpoint --help",
    "checkpoint look run": "ACTION look: use one of list, show, verify",
    "parity gpt-1m gpt-1m": "gpt-1m is one word too many: the command takes TARGET; see",
}


WIRE = {
    "int8": "is not name=value",
    "gradients=int8,gradients=fp8": "comes twice",
    "gradients=int4": r"did you mean int8\? Use one of int8, fp8, bf16",
    "block=128": "there are neither gradients nor weights",
    "weights=int8,block=1": "block must be a whole number from 2 on, got 1",
    "weights=int8,feedback=yes": "write on or off",
    "weights=int8,feedback=on": "feedback is for gradients in int8 or fp8",
    "gradients=bf16,feedback=on": "feedback is for gradients in int8 or fp8",
}
OUTER = {
    "adam": "is not name=value",
    "rate=1,rate=2": "rate comes twice",
    "rate=x": "give a number",
    "rate=inf": "give a number above 0",
    "rate=0": "give a number above 0",
    "momentum=0.5": "give a rate, and a momentum",
    "rate=1,momentum=1": "a momentum from 0 to below 1",
}
SYNC = "train --mesh replica=2,data=4 --sync-every 4"
REFUSED |= {f"train --wire {value}": f"--wire {value}: .*{why}.*; write gradients=int8" for value, why in WIRE.items()}
REFUSED |= {f"{SYNC} --outer {value}": f"--outer {value}: .*{why}.*; write average" for value, why in OUTER.items()}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_can_not_be_meant_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard: ") and re.search(REFUSED[words], line)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("flag", ["--data", "--checkpoint", "--json", "--log", "--profile", "--tensorboard", "--mesh"])
def test_a_name_that_is_not_utf_8_is_refused(flag, capsys):
    assert main(["train", flag, os.fsdecode(b"caf\xe9")]) == 2
    assert capsys.readouterr().err == r"jaxshard: 'caf\udce9' is not UTF-8; rename the file, or give another one" + "\n"


def test_launch_hands_on_words_that_are_not_utf_8(capfd):
    assert main(["launch", "-n", "1", "--", "printf", "%s", os.fsdecode(b"caf\xe9")]) == 0
    assert capfd.readouterr().out.startswith("[0] caf")


def test_more_devices_than_can_be_simulated(monkeypatch):
    monkeypatch.setattr(devices, "backend_is_initialized", lambda: False)
    with pytest.raises(ValueError, match="--devices 99999999999: at most 4096 devices can be simulated"):
        devices.choose_devices(99999999999)


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxshard {js.__version__}\n"
