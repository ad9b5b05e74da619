"""Runs side by side.

agreement.py               Two records of one run, held against each other: identical, the fir
folder.py                  The folder of a comparison: `runs/<comparison>/`, beside the folder
pictures.py                The pictures of a report: speed, step, memory and communication sid
recorded_code.py           The code that a run was trained with, put together again from its r
replay_segments.py         How to train a run again: the replay segments between its starts, rewinds
and
report.py                  The report of a comparison as Markdown, and its main table for the
results.py                 What the runs of a comparison say, read from their own records, and
runner.py                  Starts the runs of a comparison one after the other, through the en
tensorboard_pages.py       A comparison in TensorBoard: one run per variant, one for the repor
variants.py                What a comparison runs: the variants of a sweep, their names, and t
"""
