"""launch/trainjob.yaml: what Kubeflow Trainer's schema takes, and nothing it would drop."""

from __future__ import annotations

import pytest
import yaml
from ranks import ROOT

MANIFEST = yaml.safe_load((ROOT / "launch" / "trainjob.yaml").read_text())
models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
)


def fits(manifest: dict) -> bool:
    """Whether the schema takes a manifest whole: it drops what it does not know."""
    return models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


def test_the_manifest_fits_the_schema_and_nothing_is_dropped():
    assert MANIFEST["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert MANIFEST["kind"] == "TrainJob"
    assert fits(MANIFEST)


def test_the_check_finds_misspelt_and_misplaced_keys():
    for change in (
        {"trainer": MANIFEST["spec"]["trainer"] | {"nodes": 2}},
        {"runtimePatches": [{"manager": "x", "template": {}}]},
        {"podTemplateOverrides": []},
    ):
        assert not fits(MANIFEST | {"spec": MANIFEST["spec"] | change})
    for change in ({"trainer": {"numNodes": "two"}}, {"trainer": {"command": "torchrun"}}):
        with pytest.raises(ValueError, match="validation error"):
            fits(MANIFEST | {"spec": MANIFEST["spec"] | change})


def test_pods_start_the_entry_under_torchrun_with_the_project_on_shared_storage():
    trainer = MANIFEST["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "/project/pretrain.py"]
    assert trainer["args"] == ["recipe=7b"]
    (patch,) = MANIFEST["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"project": "/project", "shm": "/dev/shm"}
    assert {volume["name"] for volume in pod["volumes"]} == set(mounted)
