"""The DeepSpeed JSON: merged, every key known, confirmed by DeepSpeed.

confirm.py                 Asks DeepSpeed itself whether a resolved JSON is one it takes, befo
key_rules.py               Rules between the keys of a DeepSpeed JSON, and between it and the
keys.py                    Every key of the DeepSpeed JSON that has an effect here, and why ea
merge.py                   The DeepSpeed JSON of a run: a preset from ds_configs/, `ds.*` on t
state_bytes.py             Bytes of training state per parameter on one rank: weights, gradien
"""
