"""The axes of the grid: the one list from which everything else derives how many there are.

This file imports nothing, so that command-line options can be parsed before torch is imported.
"""

CUTS = ("x", "y", "z", "data")
"""The axes that may cut a tensor, outermost cut first. The ranks of one pipe coordinate span them: they hold the same
layers, and their parameters are DTensors on a mesh with one dim for each."""
PIPE = "pipe"
"""The axis along which ranks hold different layers."""
AXES = (*CUTS, PIPE)
"""Every axis. A grid has one rank along each axis that nobody names. To add an axis, begin here; docs/extending.md
lists the other files that an axis touches."""

AXIS_MEANINGS = {
    "x": "tensor parallelism: the number of ranks that share the width inside sublayers, such as heads",
    "y": "tensor parallelism, second dim: the number of ranks that share the width of the residual stream",
    "z": "FSDP: the number of ranks that share the stored weights and the rows of a batch",
    "data": "DDP: the number of replicas of the model, each with rows of its own",
    "pipe": "pipeline parallelism: the number of ranks that hold different layers",
}
"""The meaning of each axis: first the name by which people know it, then what the size of the axis counts."""

BATCH = ("data", "z")
"""The axes that cut the rows of a batch, outermost cut first. A place is a coordinate of these: its ranks hold the same
rows."""
REPLICA = "data"
"""The axis over which every parameter and every complete gradient is replicated."""
