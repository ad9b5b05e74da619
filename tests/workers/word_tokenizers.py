"""A word tokenizer in a Hugging Face folder, for tests."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers, processors


def word_tokenizer(folder, words, eos=None):
    """Write a tokenizer folder that our code did not make: whole words, an end token or none."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if eos in words:
        tokenizer.add_special_tokens([eos])
        pair = (eos, tokenizer.token_to_id(eos))
        tokenizer.post_processor = processors.TemplateProcessing(f"$A {eos}", special_tokens=[pair])
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder
