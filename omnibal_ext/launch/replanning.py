"""`--replan`: corrects a run's profile by what the run measured."""

from dataclasses import fields
from pathlib import Path

from omnibal_ext.costs.corrected import Compared, corrected
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.launch.folder import METRICS
from omnibal_ext.launch.planning import Planning
from omnibal_ext.output import say
from omnibal_ext.run_metrics import profile_check

CORRECTED = "profile.corrected.json"
"""The corrected profile's file in the run's folder; the original stays."""


def corrected_profile(planning: Planning) -> Path:
    """Return the path of the corrected profile for a new plan; if nothing was measured since an earlier --replan, of
    the one made then. With --check nothing is written.

    Raises UserError if nothing was measured, for a run of another model, and if the run's profile is missing.
    """
    run_dir, path = planning.run_dir, planning.run_dir / CORRECTED
    check, made = profile_check(run_dir / METRICS), Profile.load(path) if path.exists() else None
    if check is None:
        if made:
            return path
        raise UserError(
            f"--replan: {run_dir / METRICS} has nothing measured by part of the model, which a run writes after its "
            "eighth iteration; run longer, or leave --replan out"
        )
    given = Profile.load(planning.profile_path) if planning.profile_path.exists() else None
    names = [planning.architecture.name, *(profile.model for profile in (made, given) if profile)]
    if not any(planning.architecture.was_noted(name, check["model_hash"]) for name in names):
        raise UserError(
            f"--replan: the run in {run_dir} was of another model (hash {check['model_hash']}) than "
            f"{planning.architecture.name!r} (hash {planning.architecture.hash}); give its --model"
        )
    source = next((one for one in (made, given) if one and one.hash == check["profile_hash"]), None)
    by = {"profile_hash": check["profile_hash"], "iterations": check["iterations"]}
    if source is None:
        if made and by.items() <= made.corrected_by.items():
            return path
        raise UserError(
            f"--replan: profile {planning.profile_path} is not the one that the run in {run_dir} was planned from "
            f"(hash {check['profile_hash']}); give that one by --profile, or leave --replan out"
        )
    if planning.flags.check:
        return path if source is made else planning.profile_path
    names = [entry.name for entry in fields(Compared)]
    compared = [Compared(*(part[name] for name in names)) for part in check["parts"]]
    corrected(source, compared, by).save(path)
    if not planning.flags.json:
        numbers = ", ".join(map(str, check["iterations"]))
        say(f"profile corrected by iterations {numbers} of the run; give --profile {path} to keep it in later starts")
    return path
