"""One file for each make command: commands/<name>.py is `make <name>`. Nobody imports them.

audit.py                   rebuild the batches of a run and compare them with its ledger
audit_diff.py              find the first step with different batches in two runs
branch.py                  a new run that goes on from a checkpoint of another, without a copy
checkpoints.py             the checkpoints of a run, one a line
compare.py                 run the variants of a recipe side by side, or put runs that exist s
corpus.py                  build a corpus from text
corpus_import.py           make a corpus from token files of other tools
corpus_info.py             describe a corpus from its manifest
corpus_verify.py           read every byte of a corpus and compare with the manifest
doctor.py                  is this machine, or every host of HOSTFILE, fit for a run, and whic
dryrun.py                  any rank's part of a run, built on a machine without its ranks, GPU
events.py                  what happened in a run, one line each, the newest last
export.py                  writes a checkpoint as a Hugging Face folder
goodput.py                 where every second of a run went, and the best checkpoint.interval
history.py                 the lineage of a run as a tree: segments, where each parts from the
knobs.py                   every knob of a recipe and every key of the DeepSpeed JSON, from th
layouts.py                 every way to lay a recipe out on a number of ranks
merge.py                   a new run with the average of checkpoints of another
pretrain.py                check everything in one short process, then become or start the run
profile.py                 some steps of a run again, under torch's profiler, and where their
recipes.py                 the recipes with size, length and axes, from the same arithmetic as
replay.py                  a suspicious step again, twice, from the same state and batch, comp
reproduce.py               train a run again from its record alone, and compare every number
rewind.py                  take a run back to one of its checkpoints, and leave out data steps
runs.py                    all runs, one line each
sample.py                  `python -m commands.sample RUN --prompt TEXT`: text from a checkpoi
show.py                    what a recipe would do on a number of ranks
status.py                  what a run is doing now, or how it ended, and the next command
stop.py                    asks a run to save and end, and waits until it has
tensorboard.py             TensorBoard on all runs, or on one run or comparison
tokenizer.py               train a byte-level BPE tokenizer
verify.py                  read every byte of checkpoints and compare digests
budget.py             compute-optimal size and tokens for GPU-hours, money or days
plan.py               the best layouts for a recipe on a cluster, ranked and explained
plan_check.py         the predictions of the planner beside published runs
"""
