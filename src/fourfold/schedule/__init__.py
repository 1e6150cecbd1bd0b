"""Stages and schedules of a pipeline as data. Imports no torch and talks to no other rank.

`stages` says which units of a model a pipe rank holds, `action` what a schedule is and when it is valid, `named` builds
the published schedules, `play` computes their times, `find` searches for better ones, and `text` draws them and reads
and writes torch's CSV. The runtime, the planner and the command read the same `Schedule`.
"""
