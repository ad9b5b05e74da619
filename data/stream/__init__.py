"""The batch of step N for any rank: start with stream.py.

collect.py                 From the ranks' sample hashes to the ledger: each rank knows its ow
evaluation.py              What a run is evaluated on: the first windows of each source's vali
ledger.py                  The ledger: for each step, which samples it trained on and the hash
masks.py                   Which targets of a batch are left out: masked documents, and window
mixture.py                 The mixture: which source serves sample n, and as its how-manieth d
order.py                   The order of a source: which window is its k-th draw
prefetch.py                One background thread that makes the next items while the current o
samples.py                 Samples of several sources: their document starts and their token i
schedule.py                The batch schedule: how many sequences step N trains on, which, and
skips.py                   What of the data is left out: which data step train step N uses, an
sources.py                 The sources of a recipe: opened, checked, and how far a run uses th
stream.py                  The stream: the batch of step N, for any rank of any layout
trace.py                   From a step to its documents, and from a document to every step tha
usage.py                   Whether a run used each sample once: what the ledger of its current
windows.py                 From windows of token ids to what the model takes: inputs, labels,
"""
