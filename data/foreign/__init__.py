"""Token files of other tools into a corpus: start with importing.py.

importing.py               A corpus from tokenized data of other tools: `make corpus-import IN
linking.py                 Pairs of Megatron files that become shards as they are: two links a
rewriting.py               Tokenized files that are written anew: other types, and files whose
token_files.py             Tokenized data of other tools, as they lie on disk: documents of id
"""
