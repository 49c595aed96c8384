"""`jaxshard train --wandb --mlflow` with the real packages, offline: one run of each, also where training goes on."""

import math

import pytest

from jaxshard.commands.main import main

TINY = ["train", "--change", "depth=1,width=16,heads=2", "--batch", "8", "--seq", "8", "--sample", "0"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_training_that_goes_on_is_one_run_of_each_service(monkeypatch, tmp_path):
    library = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    uri = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (tmp_path / "text.txt").write_text("0123456789" * 200)
    words = [*TINY, "--data", "text.txt", "--checkpoint", "run", "--wandb", "project", "--mlflow", "experiment"]
    assert main([*words, "--steps", "1"]) == 0
    assert main([*words, "--steps", "2", "--resume"]) == 0
    client = library.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [one.step for one in losses] == [1, 2] and all(math.isfinite(one.value) for one in losses)
    assert run.info.status == "FINISHED" and run.data.params["strategy"] == "fsdp"
    assert run.data.params["layout.mesh.data"] == "8" and run.data.tags["recipe.steps"] == "2"
    id = (tmp_path / "run" / ".wandb-run").read_text().strip()
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2 and all(name.endswith(id) for name in folders)
