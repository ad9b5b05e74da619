"""The batch of step N for any rank: start with stream.py.

stream.py        the stream: from a step to the micro-batches of one rank
skips.py         the skip list: from a train step to its data step; masks
schedule.py      the batch schedule: from a data step to its samples
mixture.py       the mixture: from a sample to a source and its draw
order.py         the order: from a draw to an epoch and a window
samples.py       reads samples of several sources and checks their ids
windows.py       windows of ids into inputs, labels, segments, cumulative lengths
masks.py         targets that masks and damaged blocks take away
sources.py       opens and checks the corpora of a recipe
run_checks.py    checks of a whole run before step 1: epochs, updates, targets
evaluation.py    the evaluation set
prefetch.py      a background thread that prepares the next steps
ledger.py        the ledger: samples and batch hash of each step
collect.py       gathers the ranks' sample hashes and writes the ledger
usage.py         checks that a run used each sample once
trace.py         from a step to its documents and back
"""
