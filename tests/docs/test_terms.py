"""The index of terms: what people type into a search leads to a page that treats it; and the first names are real."""

import json
import re
from pathlib import Path

from sitetools.sources import term_index
from sitetools.terms import TERMS, anchor_of, not_found, rows, section_lines, with_entries

import jaxshard as js
from tests.docs.pages import ROOT

PAGE = ROOT / TERMS
INDEX = rows(PAGE.read_text(encoding="utf-8"), TERMS)
SEARCHED = """
    activation checkpointing; bf16; checkpoint; chat template; config file; context parallelism; cosine decay;
    DataLoader; deadlock; DeepSpeed; DiLoCo; dropout; early stopping; EMA; evaluation; expert parallelism;
    export; flash attention; fp8; freeze; FSDP; GAN; GCS; goodput; gradient accumulation; gradient checkpointing;
    gradient clipping; gradient compression; HSDP; Hugging Face; ignore_index; int8; Jupyter; Kubernetes;
    L-BFGS; learning rate schedule; logical axes; LoRA; loss scaling; master weights; memory estimate; MFU;
    mixed precision; MLflow; MoE; multi-host; multi-node; Muon; NaN; OOM; Optuna; out of memory; packing;
    pipeline parallelism; pmap; preemption; profiler; progress bar; reproducible; resume; RLHF; S3; safetensors;
    sampling; seed; sequence parallelism; shard_map; sharding rules; Slurm; spot instances; sweep; tensor parallelism;
    TensorBoard; throughput; tied weights; tokenizer; TPU pod; validation loss; wandb; warm-up; weight decay;
    ZeRO
"""


def test_what_people_search_for_is_in_the_index():
    known = {term for row in INDEX for term in row.terms}
    assert {" ".join(term.split()) for term in SEARCHED.split(";")} <= known


def test_each_section_of_the_index_is_there_and_says_one_of_its_terms():
    wrong = []
    for row in INDEX:
        for page, anchor in row.sections:
            text = (ROOT / page).read_text(encoding="utf-8")
            section = " ".join(text.splitlines()[number] for number in section_lines(text, anchor))
            if not any(as_words(term) in as_words(section) for term in row.terms):
                wrong.append(f"{page}#{anchor} says none of {', '.join(row.terms)}")
    assert not wrong, "\n".join(wrong)


def as_words(text: str) -> str:
    return re.sub(r"[-_`*\s]+", " ", text.casefold())


def test_the_index_is_alphabetical_and_each_of_its_lines_is_a_row():
    first = [re.sub(r"[^a-z0-9]+", " ", row.terms[0].casefold()).strip() for row in INDEX]
    assert first == sorted(first)
    assert len(INDEX) == len(re.findall(r"^- ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


TEXT = "# Data\n\n```bash\n# no heading\n```\n\n## In `8` bits: how\n\nText.\n\n### Part\n\n## Last\n"


def test_a_section_goes_to_the_next_heading_of_its_level():
    assert anchor_of("In `8` bits: how") == "in-8-bits-how"
    assert section_lines(TEXT, "in-8-bits-how") == range(6, 12)
    assert section_lines(TEXT, "") == range(0, 13)
    assert not section_lines(TEXT, "no-heading")


def test_terms_become_entries_above_their_sections_and_the_search_is_asked_for_each(tmp_path: Path):
    (row,) = index = rows("- **A, b c**: [1](data.md#in-8-bits-how), [2](../loops.md)\n", "guides/terms.md")
    assert row.sections == (("guides/data.md", "in-8-bits-how"), ("loops.md", ""))
    entries = "\n```{index} !single: A\n```\n```{index} !single: b c\n```\n\n"
    assert with_entries(TEXT, "guides/data.md", index) == TEXT.replace("## In", f"{entries}## In")
    assert with_entries("# Loops\n", "loops.md", index) == f"# Loops\n{entries}"

    found = {
        "docnames": ["loops", "guides/data"],
        "indexentries": {"a": [[0, "index-0", True], [1, "index-0", True]], "b c": [[0, "index-1", False]]},
    }
    path = tmp_path / "searchindex.js"
    path.write_text(f"Search.setIndex({json.dumps(found)})")
    assert [line.split("from ")[1] for line in not_found(index, path)] == [
        "'b c' to guides/data.md",
        "'b c' to loops.md",
    ]


def test_the_index_of_the_site_leads_to_pages_of_the_site():
    pages = {page for row in term_index() for page, _ in row.sections}
    assert {"guides/clusters/index.md", "guides/data.md", "concepts/left_out.md"} <= pages


def test_the_fifteen_names_of_the_reference_exist():
    text = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    table = text.partition("## The fifteen names that you need")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `js\.(\w+)` \|", table, re.MULTILINE)
    assert len(names) == 15
    assert set(names) <= set(js.__all__)
