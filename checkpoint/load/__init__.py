"""Choosing a checkpoint, reading it, and what may change on the way.

allowed_changes.py         What may change between a checkpoint and the recipe that goes on fr
choosing.py                Which checkpoints there are, whether they are whole, which to resum
outside_weights.py         Where the weights of step 0 come from: chance, a Hugging Face folde
restoring.py               Loading: rank 0 chooses a checkpoint, every rank reads what its fra
weight_rows.py             Weights from elsewhere, read by rows: a Hugging Face folder, or a c
"""
