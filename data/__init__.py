"""Text becomes a tokenized corpus; corpora become the batch of step N.

stream/     the batch of step N for any rank: start here
corpus/     a corpus on disk, and the built-in corpora
text/       text into a corpus: `make corpus`, `make tokenizer`
foreign/    token files of other tools into a corpus: `make corpus-import`
"""
