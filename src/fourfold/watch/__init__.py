"""Watches over a run: tapes of what ranks do and their diagnosis, dead and stuck ranks, peers, checks before a run."""
