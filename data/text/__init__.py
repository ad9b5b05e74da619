"""Text into a corpus, by many workers: start with ingest.py.

ingest.py             the whole build of `make corpus`, resumable after a kill
settings.py           the knobs of `make corpus`
inputs.py             finds the input files and their kinds
unit_plan.py          cuts the input into units of work
reading.py            reads one unit: a stream of records, good or bad, each with its place
filters.py            drops documents by length and by shares of characters
encoding.py           text to ids, by `tokenizers` or by `gigatoken`
unit.py               the work on one unit: read, clean, filter, tokenize, write
workers.py            runs tasks on several processes with one progress bar
duplicates.py         finds documents with equal text
held_out.py           documents that a file names for validation
assemble.py           finished units into shards
shuffle.py            a random order of all documents
provenance.py         the side file that names the origin of each document
publish.py            the last files of a corpus and its manifest
train_tokenizer.py    trains a tokenizer: `make tokenizer`
"""
