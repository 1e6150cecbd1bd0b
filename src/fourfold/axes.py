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

CONTEXT = "context"
"""How many neighbouring places share their rows and hold parts of the sequences. It has no ranks of its own: a context
group consists of ranks along z and data, so that nothing that is stored depends on it."""
MESSAGE_AXES = (*AXES, CONTEXT)
"""What messages go along: every axis, and context groups."""

OFFLOAD = "offload"
"""The name of copies between a device and its host, which a step may wait for as for messages along an axis."""
WAITED_FOR = (*MESSAGE_AXES, OFFLOAD)
"""What computation may wait for: messages along an axis, and copies."""

AXIS_MEANINGS = {
    "x": "tensor parallelism: the number of ranks that share the width inside sublayers, such as heads",
    "y": "tensor parallelism, second dim: the number of ranks that share the width of the residual stream",
    "z": "FSDP: the number of ranks that share the stored weights and the rows of a batch",
    "data": "DDP: the number of replicas of the model, each with rows of its own",
    "pipe": "pipeline parallelism: the number of ranks that hold different layers",
    "context": "context parallelism: the number of places that share their rows, each with parts of the sequences",
}
"""The meaning of each size of a grid: first the name by which people know it, then what the size counts."""

BATCH = ("data", "z")
"""The axes that cut the rows of a batch, outermost cut first. A place is a coordinate of these: its ranks hold the same
rows."""
REPLICA = "data"
"""The axis over which every parameter and every complete gradient is replicated."""
