"""Defines the workload of all contenders: one shape, one batch, one set of initial weights.

Rule: everything here is a pure function of a `Workload`, so that separate processes start from the
same weights on the same tokens. Tokens are random: speed does not depend on them. Units: sequences,
tokens.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.stream.schedule import schedule_of
from data.stream.windows import IGNORED, Batch, Rows, make_batches
from recipes.schema import Cluster, Data, Model, Optim, Recipe, Source
from runtime.resolve import Resolved, resolve

SEED = 1234
LR = 3e-4

# About 8 million parameters: the width of the tiny recipe, twice its depth.
SHAPE_8M = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Workload:
    """One training step. `threads`, `micro_batch` and `accumulation` are those of one rank."""

    precision: str = "fp32"
    threads: int = 2
    world: int = 1
    seq_len: int = 256
    micro_batch: int = 4
    accumulation: int = 2
    document_tokens: int = 64  # mean length of a document, where there are any
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE_8M))

    @property
    def rows(self) -> int:
        """Number of sequences of a step on one rank."""
        return self.micro_batch * self.accumulation

    @property
    def tokens(self) -> int:
        """Number of positions of a step on all ranks."""
        return self.rows * self.world * self.seq_len

    @property
    def shape_object(self) -> Model:
        """Shape in the form that model.cost takes."""
        return Model(**self.shape)

    def to_json(self) -> str:
        """Text for a command line; `Workload.from_json` is the inverse."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read a workload that `to_json` wrote."""
        return cls(**json.loads(text))


def recipe_of(work: Workload, **knobs: Any) -> Recipe:
    """Recipe whose step is this workload; `knobs` replace single values."""
    values: dict[str, Any] = dict(
        run="benchmark",
        seed=SEED,
        steps=1_000_000,
        warmup=0,
        model=Model(**work.shape),
        data=Data(sources={"random": Source(corpus="none")}),  # never opened
        optim=Optim(lr=LR, schedule="constant"),
        cluster=Cluster(threads=work.threads),
        seq_len=work.seq_len,
        batch_tokens=work.tokens,
        micro_batch=work.micro_batch,
        precision=work.precision,
        zero=1,
        eval_tokens=0,
    )
    return Recipe(**(values | knobs))


def resolved_of(recipe: Recipe, world: int) -> Resolved:
    """Layout and DeepSpeed JSON of `recipe` on `world` ranks."""
    return resolve(recipe, world, schedule_of(recipe))


def micro_batches(work: Workload, rank: int, attend: str) -> list[Batch]:
    """Micro-batches of this rank, from the one batch that every step repeats.

    attend: "within" cuts rows into documents, "across" leaves them whole. The last position of a
    row has no target, because Transformers' models, which shift labels themselves, have none there.
    """
    draw = np.random.default_rng([SEED, rank])
    size = (work.rows, work.seq_len + 1)
    tokens = draw.integers(0, work.shape["vocab_size"], size=size, dtype=np.int32)
    is_start = draw.random(size) < 1 / work.document_tokens
    is_start[:, 0] = True
    row, position = np.nonzero(is_start)
    rows = Rows(tokens, row, position, np.zeros(len(tokens), dtype=np.uint64))
    batches = make_batches(rows, work.micro_batch, attend)
    for batch in batches:
        batch.labels[:, -1] = IGNORED
    return batches


def count_targets(work: Workload, attend: str) -> int:
    """Number of targets of the global batch."""
    ranks = (micro_batches(work, rank, attend) for rank in range(work.world))
    return int(sum((batch.labels != IGNORED).sum() for batches in ranks for batch in batches))
