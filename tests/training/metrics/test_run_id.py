"""The id of a tracked run beside the checkpoints."""

from jaxshard.training.metrics.run_id import RunId


def test_a_kept_id_counts_where_a_step_was_saved(tmp_path):
    id = RunId("wandb", None, tmp_path / "run")
    assert id.find() is None
    id.keep("abc")
    assert id.find() is None  # nothing to go on from: the training begins anew
    (tmp_path / "run" / "10").mkdir()
    assert id.find() == "abc" and id._replace(given="xyz").find() == "xyz"
    assert RunId("mlflow", None, tmp_path / "run").find() is None


def test_without_a_folder_only_a_given_id_is_known():
    RunId("wandb", None, None).keep("abc")
    assert RunId("wandb", None, None).find() is None and RunId("wandb", "abc", None).find() == "abc"
