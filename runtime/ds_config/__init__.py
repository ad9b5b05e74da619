"""The DeepSpeed JSON of a run: merged, every key known, confirmed by DeepSpeed.

merge.py        Preset, `ds.*` and recipe -> one JSON with the origin of each key
keys.py         Every key: who reads it, or why it is refused
idle_keys.py    Keys of public files that change nothing here: left out, with one line
key_rules.py    Rules between keys, and between the JSON and the recipe
confirm.py      Asks the installed DeepSpeed whether it accepts a resolved JSON
state_bytes.py  Bytes of training state per parameter on one rank
"""
