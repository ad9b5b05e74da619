"""A run whose ranks need 0.3 s and their arithmetic for a step, one of them FACTOR times as long.

    torchrun hardware_worker.py SLOW_RANK FROM_STEP FACTOR knob=value ...

The slow rank sleeps in its forwards for as long as makes the difference to its own time of the last
step, so that it is slow by FACTOR whatever the machine does.
"""

from __future__ import annotations

import sys
import time

from ranks import PATIENCE

import pretrain
from model.decoder import Decoder
from runtime.engine.engine import Engine
from runtime.monitor.hardware import HardwareWatch
from runtime.process import process

WORK_S = 0.3 * PATIENCE  # long beside the noise of a busy machine


def main() -> int:
    slow_rank, from_step, factor = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    model, engine = Decoder, Engine
    if any(word.startswith("parallel.pipeline=") for word in sys.argv):
        from parallel.pipeline import Stage
        from runtime.engine.pipeline_engine import PipelineEngine

        model, engine = Stage, PipelineEngine
    forward, train_step, watched = model.forward, engine.train_step, HardwareWatch.step
    state = {"micro_batches": 1, "sleep_s": 0.0, "slept_s": 0.0}

    def step(self, step, span):
        watched(self, step, span)
        own_s = span.own_s()
        is_slow = process.launched_rank() == slow_rank and step + 1 >= from_step
        state["sleep_s"] = (factor - 1) * (own_s - state["slept_s"]) if is_slow else 0.0
        state["slept_s"] = state["sleep_s"]

    def stepped(self, micro_batches, *arguments):
        state["micro_batches"] = len(micro_batches)
        return train_step(self, micro_batches, *arguments)

    def slowed(self, *arguments, **keywords):
        if self.training:
            time.sleep((WORK_S + state["sleep_s"]) / state["micro_batches"])
        return forward(self, *arguments, **keywords)

    HardwareWatch.step, engine.train_step, model.forward = step, stepped, slowed
    return pretrain.main(sys.argv[4:])


if __name__ == "__main__":
    process.leave(main())
