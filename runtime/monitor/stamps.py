"""Time stamps on a GPU: events in the current stream, which are read when the device has passed
them. Units: seconds of the device's own time line.
"""

from __future__ import annotations

from typing import Any


def cuda_stamp() -> Any:
    """An event in the current CUDA stream; taking it does not wait for the device."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def cuda_seconds(begin: Any, end: Any) -> float:
    """Seconds of the device between two events. Waits for the second one where it is to come."""
    end.synchronize()  # returns at once where the step is over, as it is one step later
    return begin.elapsed_time(end) / 1000  # CUDA gives milliseconds
