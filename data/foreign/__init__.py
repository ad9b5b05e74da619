"""Token files of other tools into a corpus: start with importing.py.

importing.py        the whole import of `make corpus-import`
import_checks.py    settings and files that an import refuses
known_formats.py    formats with a header, known by their first bytes or form
flat_arrays.py      statistics that contradict a wrongly declared flat array
token_files.py      finds token files and reads their documents, format by format
linking.py          takes a Megatron pair as a shard without a copy
rewriting.py        writes the documents of a file into new shards
"""
