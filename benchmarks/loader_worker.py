"""Runs one contender of benchmarks.loader and delivers batches on demand.

    python loader_worker.py NAME FOLDER         reads seconds from stdin, one a line;
                                                answers {"tokens": ..., "cpu_s": ..., "wall_s": ...}

FOLDER holds the corpus of `benchmarks.loader`. Rule: every contender delivers shuffled batches of
BATCH sequences of SEQ_LEN tokens from the same file, in one process without workers, in its
cheapest form: labels or int64 ids that it does not make are not added.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BATCH, SEQ_LEN, VOCAB, EOD, SEED = 8, 2048, 50304, 0, 1234
CORPUS = "c"


def ours(folder: Path, attend: str) -> Iterator:
    """Stream.step: int64 inputs and labels, segment ids, cumulative lengths, a hash per sample."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from data.stream.schedule import read_schedule
    from data.stream.stream import open_stream
    from recipes.schema import Data, Source

    data = Data(sources={CORPUS: Source(corpus=CORPUS)}, attend=attend)
    schedule = read_schedule(BATCH * SEQ_LEN, SEQ_LEN)
    stream = open_stream(data, SEED, SEQ_LEN, schedule, folder, VOCAB)
    step = 0
    while True:
        step += 1
        yield stream.step(step, 0, 1, BATCH)


def litdata(folder: Path) -> Iterator:
    """StreamingDataset with TokensLoader, shuffled, stacked."""
    import torch
    from litdata import StreamingDataset, TokensLoader, optimize

    made = folder / "litdata"
    if not (made / "index.json").is_file():
        optimize(
            fn=litdata_tokens,
            inputs=[str(folder / CORPUS / "train-00000.bin")],
            output_dir=str(made),
            chunk_bytes="64MB",
            item_loader=TokensLoader(),
            num_workers=1,
        )
    data = StreamingDataset(
        str(made), item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True, seed=SEED
    )
    while True:
        items = []
        for item in data:
            items.append(item)
            if len(items) == BATCH:
                yield torch.stack(items)
                items = []


def litdata_tokens(path: str) -> Iterator:
    """Yield the tokens of a file in parts, for litdata's writer."""
    import numpy as np
    import torch

    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    for start in range(0, len(tokens), 1 << 20):
        yield torch.from_numpy(tokens[start : start + (1 << 20)].astype(np.int32))


def megatron(folder: Path, with_masks: bool) -> Iterator:
    """GPTDataset over the same .bin and .idx, default collate; no square attention mask."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import default_collate

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = EOD, -1, VOCAB, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LEN,
        blend=([str(folder / CORPUS / "train-00000")], None),
        split="1,0,0",
        path_to_cache=str(folder / "megatron"),
        tokenizer=Tokenizer(),
        reset_position_ids=with_masks,
        reset_attention_mask=with_masks,
        eod_mask_loss=with_masks,
        create_attention_mask=False,
    )
    samples = 1 << 20
    train = BlendedMegatronDatasetBuilder(
        GPTDataset, [samples, 0, 0], lambda: True, config
    ).build()[0]
    at = 0
    while True:
        yield default_collate([train[at + i] for i in range(BATCH)])
        at = (at + BATCH) % (samples - BATCH)


def olmo(folder: Path, with_masks: bool) -> Iterator:
    """NumpyFSLDataLoader in process, with document lengths for masks."""
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset

    data = NumpyFSLDataset(
        str(folder / CORPUS / "train-00000.bin"),
        sequence_length=SEQ_LEN,
        pad_token_id=EOD,
        eos_token_id=EOD,
        vocab_size=VOCAB,
        generate_doc_lengths=with_masks,
    )
    work = folder / "olmo"
    data.work_dir = work
    data.prepare()
    loader = NumpyFSLDataLoader(
        data,
        collator=DataCollator(pad_token_id=EOD),
        global_batch_size=BATCH * SEQ_LEN,
        work_dir=work,
        seed=SEED,
        shuffle=True,
        num_threads=0,
        num_workers=0,
    )
    epoch = 0
    while True:
        epoch += 1
        loader.reshuffle(epoch)
        yield from loader


def grain(folder: Path) -> Iterator:
    """MapDataset over a memory map, shuffled and batched."""
    import grain
    import numpy as np

    class Windows:
        def __init__(self):
            self.tokens = np.memmap(folder / CORPUS / "train-00000.bin", np.uint16, "r")

        def __len__(self):
            return (len(self.tokens) - 1) // SEQ_LEN

        def __getitem__(self, index):
            return np.array(self.tokens[index * SEQ_LEN : index * SEQ_LEN + SEQ_LEN + 1])

    data = grain.MapDataset.source(Windows()).shuffle(seed=SEED).repeat().batch(BATCH)
    at = 0
    while True:
        yield data[at]
        at += 1


def datasets(folder: Path) -> Iterator:
    """A map-style Dataset of whole windows, read in random order as numpy."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, load_from_disk

    made = folder / "datasets"
    if not made.is_dir():
        tokens = np.memmap(folder / CORPUS / "train-00000.bin", np.uint16, "r")
        count = (len(tokens) - 1) // SEQ_LEN
        shape, strides = (count, SEQ_LEN + 1), (2 * SEQ_LEN, 2)
        windows = np.lib.stride_tricks.as_strided(tokens, shape, strides).ravel()
        column = pa.FixedSizeListArray.from_arrays(pa.array(windows), SEQ_LEN + 1)
        Dataset(pa.table({"input_ids": column})).save_to_disk(str(made))
    data = load_from_disk(str(made)).with_format("numpy")
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(len(data))
        for start in range(0, len(order) - BATCH, BATCH):
            yield data[order[start : start + BATCH].tolist()]


CONTENDERS = {
    "ours-plain": lambda folder: ours(folder, "across"),
    "ours-masks": lambda folder: ours(folder, "within"),
    "litdata-plain": litdata,
    "megatron-plain": lambda folder: megatron(folder, False),
    "megatron-masks": lambda folder: megatron(folder, True),
    "olmo-plain": lambda folder: olmo(folder, False),
    "olmo-masks": lambda folder: olmo(folder, True),
    "grain-plain": grain,
    "datasets-plain": datasets,
}


def main(name: str, folder: Path) -> None:
    """Serve turns until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not be read as an answer
    batches = CONTENDERS[name](folder)
    next(batches)
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        wanted = float(line)
        cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
        while time.process_time() - cpu < wanted:
            next(batches)
            tokens += BATCH * SEQ_LEN
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        answer = {"tokens": tokens, "cpu_s": cpu, "wall_s": wall}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
