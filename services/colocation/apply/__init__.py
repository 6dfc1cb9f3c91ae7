"""Carries plans out: Jobs, pods, statuses, events."""
