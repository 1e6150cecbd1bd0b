"""Watches over a run: tapes and their diagnosis, dead and stuck ranks, stragglers, replicas, checks before a run."""
