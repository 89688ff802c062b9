"""Every figure that a run writes, and the test that reckons it once more from raw inputs.

`unit/test_figures.py` holds that the tests are there, `system/test_training.py` that a run writes these and no others.
Figures of packing are in `unit/packing/test_summary.py`, of plans in `unit/layout/test_predictions.py`, what these are
made from in `unit/layout/test_every_field.py`, figures of reports in `unit/report/test_figures.py`.
"""

_METERS = "tests/unit/monitoring/test_meters.py::"
_INTERVAL = _METERS + "test_an_interval_is_reported_over_all_ranks"
_RATIO = _METERS + "test_dist_ratio_is_the_mean_share_of_waiting"
_LOSSES = _METERS + "test_losses_of_sources_are_their_tokens_means"
_EVALUATION = _METERS + "test_an_evaluation_is_a_mean_over_tokens_not_over_iterations"
_STAGE_METER = "tests/unit/monitoring/test_stage_meter.py::"
_STAGES = _STAGE_METER + "test_an_interval_is_its_iterations"
_PACE = _METERS + "test_pace_is_of_what_samples_need_and_not_of_what_ran"
TRAINING = {
    **dict.fromkeys(("iteration", "iterations", "consumed_samples", "epoch", "seconds", "samples"), _INTERVAL),
    **dict.fromkeys(("samples_per_second", "useful_tokens_per_second", "padding"), _INTERVAL),
    **dict.fromkeys(("dist_ratio_vit", "dist_ratio_llm", "dist_ratio_attention"), _RATIO),
    **dict.fromkeys(("dist_ratio_audio", "dist_ratio_film"), _RATIO),
    **dict.fromkeys(("loss", "source_losses"), _LOSSES),
    **dict.fromkeys(("model_tflops", "mfu"), _PACE),
    **dict.fromkeys(("bubble", "stage_seconds"), _STAGES),
    "stage_peak_bytes": _STAGE_METER + "test_figures_of_all_ranks_are_gathered_by_replica_and_rank",
    **dict.fromkeys(
        ("replaced_samples", "skipped_steps"),
        "tests/unit/monitoring/test_bad_samples.py::test_what_went_wrong_stands_in_the_metrics",
    ),
}
"""Of a line of metrics.jsonl."""
ONLY_ON_GPUS = {"mfu", "stage_peak_bytes"}
ONLY_WITH_FURTHER = {"dist_ratio_audio", "dist_ratio_film"}
EVALUATION = {
    **dict.fromkeys(("loss", "source_losses", "samples"), _EVALUATION),
    "seconds": _METERS + "test_evaluating_takes_nothing_from_the_training_rates",
}
"""Of an evaluation in it."""
