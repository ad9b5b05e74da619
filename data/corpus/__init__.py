"""A corpus on disk: manifest, shards, index, block hashes, tokenizer; and the built-in corpora.

corpus.py           opens a corpus and checks it against its manifest: start here
shards.py           reads a split as one long row of tokens with document starts
indexed.py          Megatron's .bin and .idx: header, type codes, offsets
block_hashes.py     one xxh3-64 per 8 MiB block of a .bin, checked before the block is used
shard_writer.py     writes one shard and publishes it when it is complete
corpus_writer.py    documents of text into a corpus folder, for the built-in corpora
documents.py        rules for text: encoding, line ends, blank documents
tokenizer.py        trains, opens, identifies and saves tokenizers
token_bytes.py      the text bytes of each token, for losses in bits per byte
build.py            builds a built-in corpus once, under a lock
build_lock.py       one process builds, the others wait and know for whom
build_report.py     the report at the end of a build and of `make corpus-info`
sotu.py             the default corpus: addresses of US presidents
stdlib.py           source code of the Python standard library, for mixtures
synthetic.py        a Markov source whose entropy is known exactly
"""
