"""The axes of the grid: the one list from which everything else derives how many there are.

This file imports nothing, so that command-line options can be parsed before torch is imported.
"""

AXES = ("x", "y", "z", "data")
"""Every axis, outermost cut of a tensor first. A grid has one rank along each axis that nobody names. To add an axis,
begin here; docs/extending.md lists the other files that an axis touches."""

BATCH = ("data", "z")
"""The axes that cut the rows of a batch, outermost cut first. A place is a coordinate of these: its ranks hold the same
rows."""
REPLICA = "data"
"""The axis over which every parameter and every complete gradient is replicated."""
