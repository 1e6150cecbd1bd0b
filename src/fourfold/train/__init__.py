"""The trainer: from a config to a trained model in a run folder.

schema        checks tables against dataclasses, and writes them as TOML
config        the sections of a config; reads it from TOML and from the command line
planning      fills in the config, chooses the grid, predicts the time of a step
correction    corrects the machine of a plan by what a run measures
launch        starts local ranks, restarts them, reports why they failed
rendezvous    how agents of several nodes find each other, also for torchrun
signals       Ctrl-C and SIGTERM: how they end a process, and how all ranks stop after the same step
loop          one run on one rank: build, resume, train, evaluate, end
guard         bad numbers in steps; ranks that are stuck, dead or slow
checkpoints   when a run is saved, from where it resumes, how it rolls back
metrics       metrics of every step; a profile of some steps
run_folder    the files of a run, their sinks, and the lock
progress      what people read: the terminal, log.txt, the log of each rank
"""
