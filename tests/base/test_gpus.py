"""GPUs that a host shows."""

from __future__ import annotations

from base import gpus


def test_hidden_gpus_are_not_visible(monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidiactl"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus.visible_gpus() == ["/dev/nvidia0"]
