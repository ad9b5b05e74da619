"""A corpus on disk: manifest, shards, index, block hashes, tokenizer; and the built-in ones.

block_hashes.py            Block hashes: one xxh3-64 per 8 MiB of a .bin, kept beside it, so t
build.py                   Building corpora that recipes name, once and whole: `python -m data
build_report.py            What became of the input, in lines for a person: printed at the end
corpus.py                  A corpus: a folder with manifest.json, shards, and the tokenizer th
corpus_writer.py           Writing a corpus from documents: tokenize, append the end id, cut s
documents.py               Document rules: from bytes or text to the text that is tokenized
indexed.py                 Megatron's indexed format: a `.bin` of token ids back to back and a
shard_writer.py            Writing one shard: `.bin`, `.idx` and `.xxh`, streamed, and publish
shards.py                  Reading a split of a corpus: its shards, end to end, as one long ro
sotu.py                    The default corpus: addresses of US presidents since 1790, from the
stdlib.py                  A second text for mixtures: the source code of the running Python's
synthetic.py               A corpus whose entropy is known exactly: documents of a first-order
tokenizer.py               Tokenizers: train one, load any Hugging Face folder, encode, identi
"""
