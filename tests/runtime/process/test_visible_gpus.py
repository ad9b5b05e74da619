"""GPUs that a host shows."""

from __future__ import annotations

from runtime.process import visible_gpus


def test_hidden_gpus_are_not_visible(monkeypatch):
    files = ["/dev/nvidia0", "/dev/nvidiactl"]
    monkeypatch.setattr(visible_gpus.glob, "glob", lambda pattern: files)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus.visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus.visible_gpus() == ["/dev/nvidia0"]
