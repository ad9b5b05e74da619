"""The decoder as pipeline stages: the same blocks as DeepSpeed layer specs, under the same names.

    stage 0          token ids -> embedding -> blocks ------------\\
    stages between                             hidden -> blocks ---+--> (micro_batch, seq, hidden)
    last stage                                 hidden -> blocks -> norm -> head -> loss

Rule: only hidden states are sent between stages. Each rank reads the batch of its data rank anyway,
and `data.stream.collect` proves by hash that the copies are equal; so every stage takes what the
blocks need to know about documents (segment ids, cumulative lengths, the longest length as a number
on the host) from its own copy. Shapes are therefore fixed, DeepSpeed exchanges them once, and there
is one message per micro-batch and boundary.

A stage runs its blocks itself, as `Decoder` does. From `PipelineModule` it uses the partition into
layers, the tie between embedding and head (gradients are summed over both copies and counted once
in the norm), and the groups. Parameters have the names that they have in `Decoder`; a tied head's
weight has the embedding's name and is marked `is_copy`; both are marked `is_tied`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from model.attention import prepare
from model.config import DecoderConfig
from model.decoder import Block, run_blocks
from model.layers import Embedding, RMSNorm
from model.loss import Head
from parallel import tensor
from parallel.mesh import Mesh

DOCUMENTS = ("segment_ids", "cu_seqlens", "max_seqlen")
EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


class Stage(PipelineModule):
    """The layers of this rank's pipeline stage, in order, under `mesh.layout.bounds`.

    Before each batch `begin` receives its micro-batches. `forward` and `loss_fn` then take them in
    order, and every schedule of DeepSpeed runs forwards in that order.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: Mesh,
        recompute: str = "none",
        sequence: bool = True,
    ):
        self.config, self.recompute = config, recompute
        layout = mesh.layout
        self.first_block = layout.bounds[mesh.pipeline.index]
        specs = layer_specs(config, tensor.local_config(config, mesh.tensor))
        self._all_paths = [path for path, _ in specs]
        # DeepSpeed prints a table here; and autograd would record the broadcast of tied weights.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            super().__init__(
                [spec for _, spec in specs],
                topology=PipeModelDataParallelTopology(
                    num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data
                ),
                loss_fn=self._loss,
                # The embedding is layer 0, so block b is layer b + 1; norm and head come last.
                partition_method=[0, *(bound + 1 for bound in layout.bounds[1:-1]), len(specs)],
            )
        for path, layer in self.paths.items():
            tensor.apply(layer, mesh, config, sequence, prefix=path)
        if config.tie_word_embeddings:
            for path in {EMBEDDING, HEAD} & self.paths.keys():
                self.paths[path].weight.is_tied = True
        if self.is_tied_copy:
            self.paths[HEAD].weight.is_copy = True
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._targets: Tensor | int = 1
        self._scale = 1.0

    def _partition_layers(self, method: list[int]) -> None:
        """Use `partition_method` as the bounds themselves."""
        self.parts = method
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(method[stage], method[stage + 1])

    def to(self, *_: Any, **__: Any) -> Stage:
        """Do nothing: layers are made on their device and in their dtype; `meta` in a dry run."""
        return self

    @property
    def paths(self) -> dict[str, nn.Module]:
        """Canonical path -> layer, in order."""
        own = self._all_paths[self._local_start : self._local_stop]
        return dict(zip(own, self.forward_funcs, strict=True))

    @property
    def blocks(self) -> list[Block]:
        """The decoder blocks of this stage."""
        return [layer for layer in self.forward_funcs if isinstance(layer, Block)]

    @property
    def is_tied_copy(self) -> bool:
        """True where the head on this stage is a copy of the first stage's embedding."""
        return self.config.tie_word_embeddings and HEAD in self.paths

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter), in the order of the layers."""
        for path, layer in self.paths.items():
            canonical = EMBEDDING if path == HEAD and self.is_tied_copy else path
            full = f"{prefix}.{canonical}" if prefix else canonical
            yield from layer.named_parameters(full, recurse, remove_duplicate)

    def begin(
        self, micro_batches: Sequence[dict[str, Any]], targets: Tensor | int, scale: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Set the batch of the next forwards; returns (input_ids, labels) of each micro-batch.

        The sum of the losses is divided by `targets` and multiplied by `scale`.
        """
        self._batches, self._targets, self._scale = iter(micro_batches), targets, scale
        return iter([(batch["input_ids"], batch["labels"]) for batch in micro_batches])

    def forward(self, given: Tensor) -> Tensor:
        """Token ids (B, T) on the first stage, else hidden states -> hidden states (B, T, hidden).

        With sequence parallelism hidden states are those of this tensor rank's tokens.
        """
        batch = next(self._batches)
        hidden = self.paths[EMBEDDING](given) if EMBEDDING in self.paths else given
        attend = prepare(
            hidden.new_empty(*batch["input_ids"].shape, 0),  # whole also where hidden is a part
            self.config.head_dim,
            self.config.rotary,
            **{name: batch.get(name) for name in DOCUMENTS},
        )
        hidden = run_blocks(self.blocks, hidden, attend, self.recompute, first=self.first_block)
        return self.paths[NORM](hidden) if NORM in self.paths else hidden

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.paths[HEAD](hidden, labels, self._targets) * self._scale


def layer_specs(config: DecoderConfig, local: DecoderConfig) -> list[tuple[str, LayerSpec]]:
    """(canonical path, spec) of every layer; `local` is the shape of one tensor rank's shard."""
    embedding, head = (local.vocab_size, local.hidden_size), (local.hidden_size, local.vocab_size)
    if config.tie_word_embeddings:
        first: LayerSpec = TiedLayerSpec("tied", Embedding, *embedding)
        last: LayerSpec = TiedLayerSpec("tied", Head, *head)
    else:
        first, last = LayerSpec(Embedding, *embedding), LayerSpec(Head, *head)
    blocks = [
        (f"model.layers.{number}", LayerSpec(Block, local))
        for number in range(config.num_hidden_layers)
    ]
    norm = LayerSpec(RMSNorm, local.hidden_size, local.rms_norm_eps)
    return [(EMBEDDING, first), *blocks, (NORM, norm), (HEAD, last)]
