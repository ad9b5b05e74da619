"""Text into a corpus, by many workers: start with ingest.py.

assemble.py                From finished units to the shards of a corpus: which documents, whi
duplicates.py              Exact duplicates among documents, by a 16-byte digest of their text
encoding.py                Text to ids in a worker: by `tokenizers`, the reference, or by `gig
filters.py                 Filters on documents: length, and shares of letters, digits and sym
held_out.py                Documents that a file says are held out: by their text or by their
ingest.py                  Building a corpus from text: `make corpus IN= OUT= TOKENIZER= WORKE
inputs.py                  Text inputs of a corpus: which files, in which order, of what kind,
provenance.py              Where each document came from: `<shard>.docs.parquet` beside each s
publish.py                 The last files of a corpus made from text: what became of each inpu
reading.py                 Reading one unit of the input: a stream of records, one for each ro
settings.py                The knobs of `make corpus`: what becomes of the text of the inputs
shuffle.py                 Documents in a random order: `make corpus
train_tokenizer.py         A tokenizer of your own: `make tokenizer IN= VOCAB= OUT=`
unit.py                    The work on one unit of the input, in any process: read, clean, fil
workers.py                 Tasks on several processes, with one progress bar
"""
