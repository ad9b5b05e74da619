"""Out to Hugging Face and in again: equal logits, one copy when tied, nothing pickled, no wide
read.
"""

from __future__ import annotations

import json
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import SHAPE, trained
from small_fragments import Payload
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from base.errors import UserError
from checkpoint import export as exporter
from checkpoint.comm import Alone
from checkpoint.export import export
from checkpoint.format.index import Fragment
from checkpoint.format.rectangles import Box
from checkpoint.load import hf_check
from checkpoint.load.outside_weights import weights_from
from checkpoint.load.run_tokenizer import find_tokenizer
from checkpoint.load.weight_rows import check_fit, check_names
from checkpoint.save.commit import save
from commands import export as command
from commands import sample as sampler
from data.corpus.tokenizer import byte_tokenizer, train_bpe
from model.config import DecoderConfig

FAMILIES = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
    "linear": {"rope_type": "linear", "rope_factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_factor": 8.0,
        "rope_original_max_position_embeddings": 16,
        "qkv_bias": True,
    },
    "gelu": {"hidden_act": "gelu"},
    "relu2": {"hidden_act": "relu2", "qk_norm": True},
}


def logits(model, vocab_size=SHAPE["vocab_size"]):
    ids = torch.randint(0, vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_folder_gives_equal_logits_without_code_of_ours(family, tmp_path):
    """CKP-14, 16, 17: every weight there, none empty, one copy when tied."""
    ours = trained(tmp_path / "run", **FAMILIES[family])
    facts = export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__module__.startswith("transformers.")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(ours.named_parameters())
    assert stored.keys() == expected.keys()
    assert ("lm_head.weight" in stored) == (family != "tied")
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    assert facts["parameters"] == sum(p.numel() for p in ours.parameters())
    assert sum(p.numel() for p in theirs.parameters()) == facts["parameters"]
    assert theirs.config.tie_word_embeddings == (family == "tied")


def test_both_dtypes_agree_with_the_config_and_stay_close_at_late_positions(tmp_path):
    """CKP-19: rotary tables are not exported, so they cannot be rounded."""
    ours = trained(tmp_path / "run")
    for dtype, name in (("bf16", "bfloat16"), ("fp32", "float32")):
        out = tmp_path / dtype
        export(tmp_path / "run", out, dtype=dtype)
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == config["torch_dtype"] == name
        with safe_open(out / "model.safetensors", "pt") as file:
            dtypes = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
            assert not [key for key in file.keys() if "rot" in key or "inv" in key]  # noqa: SIM118
        assert dtypes == {getattr(torch, name)}
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        close = 1e-4 if dtype == "fp32" else 0.3
        torch.testing.assert_close(logits(theirs)[:, -4:], logits(ours)[:, -4:], rtol=0, atol=close)


def test_shards_hold_every_weight_once_and_load_as_one_model(tmp_path):
    ours = trained(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", dtype="fp32", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    assert set(index["weight_map"]) == {name for name, _ in ours.named_parameters()}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)


def test_no_more_than_a_piece_of_a_weight_is_read_at_once(tmp_path, monkeypatch):
    trained(tmp_path / "run")
    sizes = []
    read_rows = exporter.RunWeights.read_rows

    def watched(self, name, start, stop):
        rows = read_rows(self, name, start, stop)
        sizes.append(rows.numel() * 4)
        return rows

    monkeypatch.setattr(exporter.RunWeights, "read_rows", watched)
    monkeypatch.setattr(hf_check, "PIECE_BYTES", 1000)
    export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert max(sizes) <= 1000


def test_the_tokenizer_goes_along_and_its_ids_reach_the_configs(tmp_path):
    trained(tmp_path / "run")
    byte_tokenizer().save(tmp_path / "tokenizer")
    export(tmp_path / "run", tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The Congress, 1790: na\u00efve \u2603"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "out" / name).read_text())
        assert config["eos_token_id"] == tokenizer.eos_token_id == 256
    card = (tmp_path / "out" / "README.md").read_text()
    assert "step 3" in card
    assert "| parameters |" in card


def test_rows_beyond_the_tokenizer_are_never_generated(tmp_path):
    """CKP-21: the table has 320 rows, the tokenizer 257 ids."""
    trained(tmp_path / "run")
    byte_tokenizer().save(tmp_path / "tokenizer")
    export(tmp_path / "run", tmp_path / "out", tokenizer=tmp_path / "tokenizer", check=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[84, 104, 101]])
    torch.manual_seed(0)
    made = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=100.0, top_k=0)
    assert made.max() < 257


def test_a_tokenizer_larger_than_the_table_is_refused_and_nothing_is_left(tmp_path):
    """CKP-21."""
    trained(tmp_path / "run", vocab_size=100)
    byte_tokenizer().save(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="257 ids, the embedding 100 rows"):
        export(tmp_path / "run", tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert not list(tmp_path.glob("out*"))


def test_a_wrong_export_is_caught_by_its_own_check_and_nothing_is_left(tmp_path, monkeypatch):
    trained(tmp_path / "run")
    wrong = exporter.hf_config

    def other_rotation(config):
        return wrong(config) | {
            "rope_theta": 50.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        }

    monkeypatch.setattr(exporter, "hf_config", other_rotation)
    with pytest.raises(UserError, match="logits differ"):
        export(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_export_names_what_differs_from_the_folder_that_the_run_started_from(tmp_path):
    """Both as Transformers reads them: a base that was misread at the start confirmed itself."""
    hugging_face(tmp_path / "folder", rope_theta=None, rope_parameters={"rope_theta": 5e5})
    trained(tmp_path / "run", init_from=str(tmp_path / "folder"))
    facts = export(tmp_path / "run", tmp_path / "out")
    assert "rope_parameters: {'rope_theta': 500000.0" in facts["differs from init_from"]
    assert facts["logits differ by"] < 1e-3
    hugging_face(tmp_path / "same")
    trained(tmp_path / "run", step=4, init_from=str(tmp_path / "same"))
    assert export(tmp_path / "run", tmp_path / "4")["differs from init_from"] is None


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    trained(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000003" / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"rank-00000\.bin"):
        export(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_that_its_run_removes_meanwhile_is_said_to_be_so(tmp_path):
    trained(tmp_path / "run")
    weights = weights_from(str(tmp_path / "run"))
    weights.folder.rename(tmp_path / "gone")
    with pytest.raises(UserError, match="removed while it was read"):
        weights.read_rows("model.norm.weight", 0, 3)


def test_an_existing_folder_is_never_overwritten(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="never overwritten"):
        export(tmp_path / "run", tmp_path / "out")


def test_two_exports_at_once_do_not_touch_each_other_and_leftovers_go(tmp_path, monkeypatch):
    trained(tmp_path / "run")
    killed, other = (tmp_path / f"out.tmp-{process}" for process in (2**30, os.getppid()))
    killed.mkdir()
    other.mkdir()
    monkeypatch.setattr(exporter, "compare_logits", lambda *_: (tmp_path / "out").mkdir())
    with pytest.raises(UserError, match="was made by another process meanwhile"):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", "out", other.name])


def test_a_tokenizer_that_the_run_was_not_trained_with_is_refused(tmp_path):
    one, other = byte_tokenizer(), train_bpe(["some text"], 300)
    for tokenizer, name in ((one, "a"), (other, "b")):
        tokenizer.save(tmp_path / name / "tokenizer")
    sources = {name: {"corpus": str(tmp_path / name)} for name in ("gone", "b", "a")}
    state = {"recipe": {"data": {"sources": sources}}}
    assert find_tokenizer(state) == tmp_path / "b" / "tokenizer"
    state["data"] = {"tokenizer": one.fingerprint()[:16]}
    assert find_tokenizer(state) == tmp_path / "a" / "tokenizer"
    assert find_tokenizer(state, tmp_path / "a" / "tokenizer") == tmp_path / "a" / "tokenizer"
    with pytest.raises(UserError, match="not the tokenizer that the run was trained with"):
        find_tokenizer(state, tmp_path / "b" / "tokenizer")
    del sources["a"]
    with pytest.raises(UserError, match="not the tokenizer that the run was trained with"):
        find_tokenizer(state)


def test_the_command_exports_the_step_asked_for_or_says_why_not(tmp_path, capsys):
    for step in (3, 4):
        trained(tmp_path / "run", step)
    arguments = [str(tmp_path / "run"), "--step", "3", "--dtype", "fp32"]
    assert command.main(arguments) == 0
    out = tmp_path / "run" / "export" / "step-00000003-fp32"
    assert str(out) in capsys.readouterr().out
    assert command.main(arguments) == 93
    assert "never overwritten" in capsys.readouterr().err
    assert command.main([str(tmp_path / "run"), "--step", "5"]) == 93
    assert "it has: 3, 4" in capsys.readouterr().err


def test_a_full_disk_or_a_wrong_place_is_said_in_a_line(tmp_path, capsys):
    trained(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert command.main([str(tmp_path / "run"), "--out", str(tmp_path / "file" / "out")]) == 1
    assert "failed: [Errno 20] Not a directory" in capsys.readouterr().err


def test_text_comes_from_a_run_or_an_exported_folder_or_not_at_all(tmp_path, capsys):
    trained(tmp_path / "run")
    byte_tokenizer().save(tmp_path / "tokenizer")
    out, mark = tmp_path / "out", tmp_path / "executed"
    export(tmp_path / "run", out, tokenizer=tmp_path / "tokenizer", check=False)
    for prompt in ("The", "", "\u2603 <|endoftext|>", "x" * 60):
        assert sampler.main([str(out), "--prompt", prompt, "--tokens", "3"]) == 0
        assert prompt.replace("<|endoftext|>", "").strip() in capsys.readouterr().out
    bad = ["--tokens=0", "--temperature=nan", "--top-p=0", "--seed=-1", "--prompt=\udcff"]
    assert sampler.main([str(out), *bad]) == 93
    message = capsys.readouterr().err
    for word in ("TOKENS=0", "TEMPERATURE=nan", "TOP_P=0", "SEED=-1", "PROMPT is not valid UTF-8"):
        assert word in message
    assert sampler.main([str(tmp_path / "run")]) == 93
    assert "its corpus has no tokenizer" in capsys.readouterr().err
    (out / "tokenizer_config.json").write_text("{}")
    assert sampler.main([str(out)]) == 93
    assert "no end token to begin with; give a PROMPT" in capsys.readouterr().err
    larger = byte_tokenizer()._tokenizer
    larger.add_tokens([f"<{number}>" for number in range(100)])
    larger.save(str(out / "tokenizer.json"))
    assert sampler.main([str(out), "--prompt=<99>"]) == 93
    assert "gives the id 356, the model has 320 rows" in capsys.readouterr().err
    (out / "model.safetensors").write_bytes(b"x")
    assert sampler.main([str(out)]) == 93
    (out / "model.safetensors").unlink()
    (out / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    assert sampler.main([str(out)]) == 93
    assert capsys.readouterr().err.count("cannot load it") == 2
    assert not mark.exists()


# Weights from elsewhere


def hugging_face(folder, **changes):
    """A Llama folder as transformers writes it."""
    config = LlamaConfig(
        **{k: v for k, v in SHAPE.items() if k not in ("qkv_bias", "qk_norm")},
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


@pytest.mark.parametrize("source", ["folder", "run", "run@3"])
def test_weights_are_read_by_rows_from_a_folder_or_a_checkpoint(source, tmp_path):
    """CKP-26: the step asked for."""
    if source == "folder":
        model = hugging_face(tmp_path / "folder")
    else:
        models = {step: trained(tmp_path / "run", step) for step in (3, 4)}
        model = models[3 if "@" in source else 4]
    weights = weights_from(str(tmp_path / source))
    check_fit(weights, SimpleNamespace(**SHAPE))
    expected = dict(model.named_parameters())
    assert weights.shapes == {name: tuple(p.shape) for name, p in expected.items()}
    for name, parameter in expected.items():
        rows = len(parameter)
        for start, stop in ((0, rows), (rows // 3, rows // 3 + 1), (rows - 2, rows)):
            got = weights.read_rows(name, start, stop)
            assert got.dtype == torch.float32
            assert torch.equal(got, parameter[start:stop])


def test_a_folder_imported_and_exported_again_is_equal_tensor_by_tensor(tmp_path):
    hugging_face(tmp_path / "folder")
    weights = weights_from(str(tmp_path / "folder"))
    fragments = [
        Fragment(name, "weight", Box(s, s), 0, weights.read_rows(name, 0, s[0]).reshape(-1))
        for name, s in weights.shapes.items()
    ]
    recipe = {"model": weights.model, "seq_len": 64}
    assert save(tmp_path / "run", 1, fragments, {"step": 1, "recipe": recipe}, Alone()).ok
    export(tmp_path / "run", tmp_path / "out", dtype="fp32")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("folder", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_shape_is_refused_with_every_field(tmp_path):
    trained(tmp_path / "run")
    weights = weights_from(str(tmp_path / "run"))
    other = SimpleNamespace(**(SHAPE | {"hidden_size": 64, "qk_norm": True, "rope_theta": 5e5}))
    with pytest.raises(UserError) as caught:
        check_fit(weights, other)
    for name in ("hidden_size", "head_dim", "qk_norm", "rope_theta"):
        assert f"model.{name}=" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rotary scaling"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rotary scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization"),
    ],
)
def test_a_folder_that_is_not_our_decoder_is_refused_with_the_reason(changes, reason, tmp_path):
    hugging_face(tmp_path / "folder", **changes)
    with pytest.raises(UserError, match=reason):
        weights_from(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0, "head_dim": None}, "LlamaConfig refuses it: ZeroDivisionError"),
        ({"num_hidden_layers": "two"}, "LlamaConfig refuses it: StrictDataclass"),
        ({"rope_parameters": "x"}, "config.json: rope_parameters='x' is not a JSON object"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes, reason, tmp_path):
    hugging_face(tmp_path / "folder", **changes)
    with pytest.raises(UserError, match=reason):
        weights_from(str(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, "gone.safetensors"),
        ({"weight_map": {"nowhere": "model.safetensors"}}, "does not contain tensor nowhere"),
        ({"weight_map": ["model.safetensors"]}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "is not a JSON object"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(index, reason, tmp_path):
    hugging_face(tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=reason):
        weights_from(str(tmp_path / "folder"))


def test_quantized_weights_are_refused_without_a_word_in_the_config(tmp_path):
    hugging_face(tmp_path / "folder")
    path = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as I8"):
        weights_from(str(tmp_path / "folder"))


def test_a_second_copy_of_a_tied_weight_must_be_the_same(tmp_path):
    hugging_face(tmp_path / "folder", tie_word_embeddings=True, num_key_value_heads=None)
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        weights_from(str(tmp_path / "folder"))
    path = tmp_path / "folder" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old folders have
    save_file(tensors, path, {"format": "pt"})
    weights = weights_from(str(tmp_path / "folder"))
    assert weights.shapes.keys() == tensors.keys() - {
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    }
    assert weights.model["num_key_value_heads"] == SHAPE["num_attention_heads"]


def test_weights_that_do_not_fit_are_named_but_not_by_the_hundred(tmp_path):
    trained(tmp_path / "run")
    weights = weights_from(str(tmp_path / "run"))
    config = DecoderConfig(**(SHAPE | {"hidden_size": 64}), max_position_embeddings=64)
    with pytest.raises(UserError) as caught:
        check_names(weights, config)
    assert len(caught.value.problems) == 21
    last = f"model.norm.weight: (32,) in {weights.label}, (64,) in the decoder"
    assert caught.value.problems[-1] == last  # never "and 1 more"


def test_a_mistral_folder_without_a_short_window_is_read(tmp_path):
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    hugging_face(tmp_path / "folder", **changes, sliding_window=None)
    check_fit(weights_from(str(tmp_path / "folder")), SimpleNamespace(**SHAPE))


def test_pickled_weights_are_never_opened(tmp_path):
    hugging_face(tmp_path / "folder")
    mark = tmp_path / "executed"
    (tmp_path / "folder" / "model.safetensors").unlink()
    (tmp_path / "folder" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(UserError, match="never opened"):
        weights_from(str(tmp_path / "folder"))
    (tmp_path / "folder" / "model.safetensors").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        weights_from(str(tmp_path / "folder"))
    assert not mark.exists()


def test_an_index_of_a_folder_cannot_name_files_outside_it(tmp_path):
    hugging_face(tmp_path / "folder")
    save_file({"w": torch.zeros(1)}, tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside"):
        weights_from(str(tmp_path / "folder"))


def test_what_is_neither_a_run_nor_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a run folder"):
        weights_from(str(tmp_path))
