"""Runs side by side: the library part of `make compare`, `make profile` and `make reproduce`.

    variants -> runner -> the runs' own records -> results -> report, pictures, tensorboard_pages
    a record -> replay_segments, recorded_code -> the same run again -> agreement

agreement.py           compares the records of two runs: identical, or the first difference
folder.py              the folder of a comparison, `runs/<comparison>/`, and its lock
pictures.py            PNG pictures of a report: speed, memory, communication, losses
ranking.py             orders variants by validation loss, with the spread over seeds
recorded_code.py       checks out the code that a run was trained with
replay_segments.py     the starts that train a recorded run again, one after the other
report.py              the report as Markdown, and its main table for the terminal
results.py             reads the records of the runs and computes what is compared
runner.py              checks all variants, then starts their runs one after the other
tensorboard_names.py   short names of the curves that TensorBoard shows
tensorboard_pages.py   writes a comparison as TensorBoard runs, one for each variant
variants.py            the variants of a sweep, the names of their runs and their order
"""
