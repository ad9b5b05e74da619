"""An exported tokenizer adds the begin token of the training, or nothing, and has its end token."""

import json

import pytest
from saved_models import trained
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer
from word_tokenizers import word_tokenizer

from base.errors import UserError
from checkpoint.export import export
from checkpoint.exported_tokenizer import added_ids

WORDS = ["[UNK]", "cat", "dog", "<s>", "</s>", "<|im_end|>"]
CAT, DOG, BEGIN, END, CHAT_END = 1, 2, 3, 4, 5


def tokenizer_with(folder, template, **config):
    word_tokenizer(folder, WORDS, eos="<|im_end|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = template and processors.TemplateProcessing(
        template, special_tokens=pairs
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def exported(tmp_path, template, data, **config):
    """The tokenizer and the configurations of an export whose checkpoint has that data state."""
    trained(tmp_path / "run", data_state=data)
    tokenizer = tokenizer_with(tmp_path / "tokenizer", template, **config)
    export(tmp_path / "run", tmp_path / "out", tokenizer=tokenizer)
    files = ("config.json", "generation_config.json")
    configs = [json.loads((tmp_path / "out" / name).read_text()) for name in files]
    return AutoTokenizer.from_pretrained(tmp_path / "out"), configs


@pytest.mark.parametrize(
    ("template", "begin_id", "ids"),
    [
        ("<s> $A", BEGIN, [BEGIN, CAT, DOG]),  # stored in the corpus and added by the template
        ("<s> $A", END, [CAT, DOG]),  # bos=false: training never showed <s>
        ("<s> $A", None, [CAT, DOG]),  # imported documents without any begin
        ("$A </s>", END, [CAT, DOG]),  # an end token behind a prompt would end it
        ("<s> $A </s>", BEGIN, [CAT, DOG]),
        (None, END, [CAT, DOG]),
        (None, BEGIN, [CAT, DOG]),
    ],
)
def test_the_template_adds_what_training_showed_or_nothing(tmp_path, template, begin_id, ids):
    data = {"begin_id": begin_id, "end_id": END}
    tokenizer, configs = exported(tmp_path, template, data, add_bos_token=True)
    assert tokenizer("cat dog").input_ids == ids
    assert tokenizer.eos_token_id == END
    for config in configs:
        assert config["eos_token_id"] == END  # of the corpus, not the chat model's <|im_end|>
        assert config.get("bos_token_id") == begin_id
    assert configs[0].get("document_begin_id") == begin_id
    card = (tmp_path / "out" / "README.md").read_text()
    assert (f"| a document begins after the id | {begin_id} |" in card) is (begin_id is not None)


def test_a_checkpoint_of_an_older_version_exports_the_tokenizer_as_it_is(tmp_path):
    tokenizer, configs = exported(tmp_path, "<s> $A", {})
    assert tokenizer("cat dog").input_ids == [BEGIN, CAT, DOG]
    assert [config["eos_token_id"] for config in configs] == [CHAT_END] * 2
    assert "document_begin_id" not in configs[0]


def test_a_tokenizer_without_the_trained_ids_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(UserError, match="has no token 77, which the training used"):
        exported(tmp_path, None, {"begin_id": 77, "end_id": END})
    assert not list(tmp_path.glob("out*"))


def test_ids_that_a_template_adds_are_found_on_both_sides():
    assert added_ids([1, 2, 3], [1, 2, 3]) == ([], [])
    assert added_ids([9, 1, 2], [1, 2]) == ([9], [])
    assert added_ids([1, 2, 9], [1, 2]) == ([], [9])
    assert added_ids([8, 1, 2, 9], [1, 2]) == ([8], [9])
    assert added_ids([1, 1, 2], [1, 2]) == ([1], [])
    assert added_ids([5, 6], [1]) == ([5, 6], [])
