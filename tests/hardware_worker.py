"""A run whose ranks need 0.2 s for a step, one of them more from a step on: for test_hardware.py.

torchrun hardware_worker.py SLOW_RANK FROM_STEP FACTOR knob=value ...
"""

from __future__ import annotations

import sys
import time

import pretrain
from model.decoder import Decoder
from runtime import process
from runtime.engine import Engine

WORK_S = 0.2


def main() -> int:
    slow_rank, from_step, factor = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    forward, train_step, set_lr = Decoder.forward, Engine.train_step, Engine.set_lr
    state = {"step": 0, "micro_batches": 1}

    def counted(self, lr):
        state["step"] += 1
        set_lr(self, lr)

    def stepped(self, micro_batches, *arguments):
        state["micro_batches"] = len(micro_batches)
        return train_step(self, micro_batches, *arguments)

    def slowed(self, *arguments, **keywords):
        is_slow = process.launched_rank() == slow_rank and state["step"] >= from_step
        if self.training:
            time.sleep(WORK_S * (factor if is_slow else 1.0) / state["micro_batches"])
        return forward(self, *arguments, **keywords)

    Engine.set_lr, Engine.train_step, Decoder.forward = counted, stepped, slowed
    return pretrain.main(sys.argv[4:])


if __name__ == "__main__":
    process.leave(main())
