"""Monitoring of a training run: metrics, deviation from the plan and the profile, bad samples and steps."""
