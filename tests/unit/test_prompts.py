"""Prompt sets: where they come from, what they say, and the ids that other stages rely on."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pacer.data.corpus import Text
from pacer.data.prompts import LIMITS, NAMES, Prompt, encode, is_tuning, load_prompts, part_of
from pacer.errors import ConfigError, SourceError
from pacer.evaluation.runner import load_benchmarks
from pacer.resources import resource
from pacer.settings import BenchmarkSettings
from pacer.training.exits import collate_ids

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "1 + 1 = 2\n#### 2"},
    "humaneval": {"task_id": "HumanEval/7", "prompt": "def f():\n", "entry_point": "f", "test": ""},
    "cnn_dm": {"article": "one  two\nthree", "highlights": "h", "id": "x"},
    "xsum": {"document": "one  two\nthree", "summary": "s", "id": 3},
    "mbpp": {"task_id": 700, "text": "Write f.", "code": "", "test_list": ["assert f() == 1", "assert 1"]},
    "mt_bench": {"question_id": 81, "category": "c", "turns": ["First.", "Second."]},
    "sharegpt": {"id": "a", "conversations": [{"from": "gpt", "value": "?"}, {"from": "human", "value": "Say it."}]},
    "instruct": {"instruction": "Do it.", "input": "this", "output": "done"},
}
TEXTS = {
    "gsm8k": "How many?",
    "humaneval": "Complete the following Python function. Reply with the whole function in a Python code block.\n\n"
    "```python\ndef f():\n```",
    "cnn_dm": "Summarize the following article.\n\none two three",
    "xsum": "Summarize the following article in one sentence.\n\none two three",
    "mbpp": "Write f.\nYour code should pass this test: assert f() == 1",
    "mt_bench": "First.",
    "sharegpt": "Say it.",
    "instruct": "Do it.\nthis",
}
IDS = {name: f"{name}-train-0" for name in NAMES} | {"humaneval": "HumanEval-7", "mbpp": "mbpp-700"}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_text_and_id_of_each_set(tmp_path: Path, name: str) -> None:
    _write(tmp_path / name / "train.jsonl", [ROWS[name]])
    found = load_prompts(name, split="train", data_dir=tmp_path)
    assert found.items == [Prompt(IDS[name], name, TEXTS[name], ROWS[name])]
    assert not found.sample
    assert found.source == str(tmp_path / name)
    assert LIMITS[name].max_new_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_ones_own_may_have_any_of_the_forms(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / "mine.jsonl", [ROWS[name]])
    by_fields = load_prompts(str(path))
    assert [(p.id, p.task, p.text) for p in by_fields.items] == [("mine-0", name, TEXTS[name])]
    assert load_prompts(name, split=str(path)).items == by_fields.items


def test_plain_prompts_in_lines_lists_and_gzip(tmp_path: Path) -> None:
    rows = [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress((tmp_path / "lines.jsonl").read_bytes()))
    for name in ("list.json", "lines.jsonl", "packed.jsonl.gz"):
        found = load_prompts(str(tmp_path / name), limit=5)
        assert [p.text for p in found.items] == ["a\u2028b", "c"]
        assert found.name == found.items[0].id.removesuffix("-0") == name.split(".")[0]
        assert not found.sample


def test_articles_are_cut_after_words(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(400)]
    for name, field, count in (("cnn_dm", "article", 300), ("xsum", "document", 250)):
        _write(tmp_path / name / "test.jsonl", [{field: "\n ".join(words)}])
        text = load_prompts(name, data_dir=tmp_path).items[0].text
        assert text.split("\n\n")[1] == " ".join(words[:count])


def test_instructions_without_input_and_seeds(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"instruction": "A", "input": ""}]
    rows.append({"instruction": "B", "instances": [{"input": "i", "output": "o"}]})
    path = _write(tmp_path / "x.jsonl", rows)
    assert [p.text for p in load_prompts(str(path)).items] == ["A", "B\ni"]


def test_published_files(tmp_path: Path) -> None:
    _write(tmp_path / "mbpp" / "mbpp.jsonl", [ROWS["mbpp"] | {"task_id": i} for i in (5, 11, 510, 511, 600, 601, 974)])
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode()))
    ids = {s: [p.id for p in load_prompts("mbpp", split=s, data_dir=tmp_path).items] for s in ("test", "validation")}
    assert ids == {"test": ["mbpp-11", "mbpp-510"], "validation": ["mbpp-511", "mbpp-600"]}
    assert [p.id for p in load_prompts("humaneval", data_dir=tmp_path).items] == ["HumanEval-7"]
    (tmp_path / "instruct").mkdir()
    (tmp_path / "instruct" / "instruction_1100.json").write_text(json.dumps([ROWS["instruct"]] * 2))
    _write(tmp_path / "instruct" / "self_instruct_seed_175.jsonl", [{"instruction": "A", "instances": [{"input": ""}]}])
    found = load_prompts("instruct", split="train", data_dir=tmp_path)
    assert [p.id for p in found.items] == ["instruct-0", "instruct-1", "seed-0"]


def test_samples_are_marked_and_stand_in_for_missing_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_prompts("gsm8k", limit=2).sample
    assert not caplog.records
    found = load_prompts("gsm8k", data_dir=tmp_path, limit=2)
    assert found.sample and len(found.items) == 2
    assert "no test split of gsm8k" in caplog.text


@pytest.mark.parametrize(
    "path", sorted(resource("data/samples").glob("*/*.jsonl")), ids=lambda p: "/".join(p.parts[-2:])
)
def test_every_packaged_sample_loads(path: Path) -> None:
    found = load_prompts(path.parent.name, split=path.stem)
    assert found.sample
    assert len({prompt.id for prompt in found.items}) == len(found.items)
    if path.stem == "test" and path.parent.name in ("gsm8k", "humaneval", "cnn_dm", "xsum"):
        assert len(found.items) >= 24


def test_limit_zero_is_not_no_limit(tmp_path: Path) -> None:
    assert load_prompts("gsm8k", limit=0).items == []
    with pytest.raises(ConfigError, match="below 0"):
        load_prompts("gsm8k", limit=-1)


def test_errors_say_where_and_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown prompt set: 'gsm9k'; allowed: gsm8k, .*path of a"):
        load_prompts("gsm9k")
    with pytest.raises(ConfigError, match=r"unknown split of gsm8k: 'dev'; allowed: train, validation, test"):
        load_prompts("gsm8k", split="dev")
    with pytest.raises(SourceError, match=r"does not exist: '.*nowhere'.*paths.data_dir"):
        load_prompts("gsm8k", data_dir=tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"no validation split of gsm8k"):
        load_prompts("gsm8k", split="validation")
    path = _write(tmp_path / "gsm8k" / "test.jsonl", [ROWS["gsm8k"], {"q": 1}])
    with pytest.raises(SourceError, match=r"row 1 of .*test.jsonl is not a row of gsm8k \(KeyError\('question'\)\)"):
        load_prompts("gsm8k", data_dir=tmp_path)
    path.write_text('{"question": "a", "answer": "b"}\n{"question')
    with pytest.raises(SourceError, match=r"cannot be read as JSON: 'line 2 of .*test.jsonl'"):
        load_prompts("gsm8k", data_dir=tmp_path)
    with pytest.raises(SourceError, match=r"unknown fields.*\['q'\].*prompt"):
        load_prompts(str(_write(tmp_path / "own.jsonl", [{"q": 1}])))
    with pytest.raises(SourceError, match=r"row 0 of .*not a row of prompt"):
        load_prompts(str(_write(tmp_path / "own.jsonl", [{"prompt": None}])))
    with pytest.raises(SourceError, match=r"no prompts in own"):
        load_prompts(str(_write(tmp_path / "own.jsonl", [])))


REPOSITORIES = {  # D114: those that hold data, no loading script
    "gsm8k": "openai/gsm8k",
    "humaneval": "openai/openai_humaneval",
    "cnn_dm": "abisee/cnn_dailymail",
    "xsum": "EdinburghNLP/xsum",
    "mbpp": "google-research-datasets/mbpp",
    "sharegpt": "anon8231489123/ShareGPT_Vicuna_unfiltered",
}


@pytest.mark.parametrize("name", REPOSITORIES)
@pytest.mark.parametrize("offline", [True, False])
def test_the_hub_out_of_reach_is_one_error_about_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, name: str
) -> None:
    import datasets
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    message = rf"cannot be read from the hub.*'{REPOSITORIES[name]}'.*<data_dir>/<name>/<split>.jsonl.*PACER_DATA"
    with pytest.raises(SourceError, match=message):
        load_prompts(name, data_dir="hub")
    with pytest.raises(ConfigError, match=r"no hub form: 'instruct'"):
        load_prompts("instruct", split="train", data_dir="hub")


def test_few_shot_examples_come_from_train(tmp_path: Path) -> None:
    """D110."""
    train = [{"question": f"train {i}?", "answer": f"#### {i}"} for i in range(4)]
    _write(tmp_path / "gsm8k" / "train.jsonl", train)
    _write(tmp_path / "gsm8k" / "test.jsonl", [{"question": "test?", "answer": "#### 9"}])
    (prompt,) = load_prompts("gsm8k", data_dir=tmp_path, few_shot=2).items
    assert prompt.shots == (("train 0?", "#### 0"), ("train 1?", "#### 1"))
    own = load_prompts("gsm8k", split="train", data_dir=tmp_path, few_shot=3).items
    assert all(p.text not in dict(p.shots) and len(p.shots) == 3 for p in own)
    with pytest.raises(ConfigError, match="more than the train split has"):
        load_prompts("gsm8k", data_dir=tmp_path, few_shot=5)
    with pytest.raises(ConfigError, match="few_shot is for gsm8k"):
        load_prompts("humaneval", few_shot=1)


def _tokenizer(template: str | None, bos: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", "<s>", "a", "b", "Q", "A"])}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def test_encoding_with_and_without_a_chat_template() -> None:
    template = "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }} {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}A{% endif %}"
    chat = _tokenizer(template, "<s>")
    assert encode("a b", chat) == [4, 2, 3, 5]
    assert encode(Prompt("x", "gsm8k", "a", {}, (("b", "b"),)), chat) == [4, 3, 5, 3, 4, 2, 5]
    assert encode("a b", _tokenizer(None, "<s>")) == [1, 2, 3]
    assert encode("a b", _tokenizer(None, None)) == [2, 3]


def test_the_loss_mask_follows_the_rendered_prompt() -> None:
    """T85: of a chat of two turns exactly the answer's tokens are learnt, each predicted from the one before it."""
    template = "{% for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }} {{ m.content }} {% endfor %}"
    chat = _tokenizer(template + "{% if add_generation_prompt %}A{% endif %}", "<s>")
    prompt = encode(Prompt("x", "gsm8k", "a", {}, (("b", "b"),)), chat)
    text = Text("x", "gsm8k", prompt, [3, 2], True)
    batch = collate_ids([text], prompt_weight=0.0)
    assert batch["ids"].tolist() == [[4, 3, 5, 3, 4, 2, 5, 3, 2]]
    assert batch["weights"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 0]]


def test_parts_are_stable_and_of_the_given_size() -> None:
    parts = {"draft": 0.7, "preverifier": 0.22, "tuning": 0.08}
    ids = [f"gsm8k-train-{i}" for i in range(4000)]
    shares = Counter(part_of(id, parts) for id in ids)
    assert all(abs(shares[name] / 4000 - share) < 0.02 for name, share in parts.items())
    # Checkpoints were trained on these parts: the function must never change.
    assert [part_of(id, parts) for id in ids[:6]] == PINNED_PARTS
    assert [i for i in range(20) if is_tuning(f"gsm8k-test-{i}")] == PINNED_TUNING
    assert abs(sum(map(is_tuning, ids)) / 4000 - 0.25) < 0.02
    both = Counter((part_of(id, parts) == "draft", is_tuning(id)) for id in ids)
    assert abs(both[True, True] / 4000 - 0.7 * 0.25) < 0.02  # another salt: independent


PINNED_PARTS = ["draft", "draft", "preverifier", "tuning", "preverifier", "preverifier"]
PINNED_TUNING = [6, 8, 11, 17]


def test_mt_bench_stands_in_for_sharegpt_under_its_own_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (None, tmp_path):
        found = load_prompts("sharegpt", data_dir=folder)
        assert found.name == "mt_bench for sharegpt" and found.items == load_prompts("mt_bench", data_dir=folder).items
    assert "mt_bench stands in" in caplog.text
    settings = BenchmarkSettings(sets=["sharegpt", "gsm8k"], limit=1, split="all")
    assert [b.name for b in load_benchmarks(settings, None)] == ["mt_bench for sharegpt", "gsm8k"]


def test_conversations_that_nobody_began_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = {"id": "b", "conversations": []}
    file = tmp_path / "sharegpt" / "ShareGPT_V3_unfiltered_cleaned_split.json"
    file.parent.mkdir()
    file.write_text(json.dumps([empty, ROWS["sharegpt"]]))
    found = load_prompts("sharegpt", data_dir=tmp_path)
    assert [(p.id, p.text) for p in found.items] == [("sharegpt-test-1", "Say it.")] and found.name == "sharegpt"
    assert "1 of 2 rows" in caplog.text


def test_real_data(real_data: Path) -> None:
    sizes = {(n, s): len(load_prompts(n, split=s, data_dir=real_data).items) for n, s in [
        ("gsm8k", "train"), ("gsm8k", "test"), ("humaneval", "test"), ("mbpp", "train"), ("mbpp", "validation"),
        ("mbpp", "test"), ("cnn_dm", "validation"), ("cnn_dm", "test"), ("xsum", "train"), ("xsum", "test"),
        ("mt_bench", "test"), ("instruct", "train"),
    ]}  # fmt: skip
    assert list(sizes.values()) == [2000, 400, 164, 374, 90, 500, 500, 250, 200, 500, 80, 1275]


@pytest.mark.real
def test_prompts_are_those_of_the_given_corpus(real_data: Path, smollm2: Path) -> None:
    """Every prompt of the corpus whose row is here is made again, id by id."""
    from pacer.models.sources import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    prompts: dict[str, Prompt] = {}
    for name, split in [("gsm8k", "train"), ("cnn_dm", "validation"), ("xsum", "train"), ("mbpp", "train"),
                        ("mbpp", "validation"), ("instruct", "train")]:  # fmt: skip
        prompts |= {p.id: p for p in load_prompts(name, split=split, data_dir=real_data).items}
    found: Counter[str] = Counter()
    with gzip.open(real_data / "corpus_smollm2.jsonl.gz", "rt") as lines:
        for row in map(json.loads, lines):
            if row["id"] in prompts:
                assert encode(prompts[row["id"]], tokenizer) == row["prompt_ids"], row["id"]
                found[row["task"]] += 1
    assert found == {"gsm8k": 1659, "instruct": 842, "cnn_dm": 380, "mbpp": 320, "xsum": 128}
