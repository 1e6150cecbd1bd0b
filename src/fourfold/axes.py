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
FOLDED = ("expert", "ex", "ez", "edata")
"""A second way to number the ranks of one pipe coordinate, by which experts are cut. These axes have no ranks of their
own either: expert * ex * ez * edata = x * z * data, and y is common to both ways."""
FOLD_SIZES = FOLDED[:-1]
"""The sizes of a fold that are given; `edata` is what they leave. If all are 1, experts are cut like other weights."""
FOLDED_ALONG = ("x", "z", "data")
"""The axes whose ranks a fold numbers in another way."""
FOLD = ("expert", "ex", "y", "ez", "edata")
"""The axes that may cut a tensor of experts where the grid is folded, outermost cut first."""
GIVEN_BESIDES = (CONTEXT, *FOLD_SIZES)
"""The sizes of a grid that are given besides those of its axes; each is 1 unless it is given."""
MESSAGE_AXES = (*AXES, CONTEXT, *FOLDED)
"""What messages go along: every axis, context groups, and the axes of the fold."""

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
    "expert": "expert parallelism: the number of ranks that share the experts, to which tokens are sent",
    "ex": "tensor parallelism of experts: the number of ranks that share the width inside each expert",
    "ez": "FSDP of experts: the number of ranks that share the stored weights of each expert",
}
"""The meaning of each size of a grid: first the name by which people know it, then what the size counts."""

MOST_DEVICES = 1 << 20
"""The most devices of a grid: several times the largest machines. More are a slip, and a search would take for ever."""

BATCH = ("data", "z")
"""The axes that cut the rows of a batch, outermost cut first. A place is a coordinate of these: its ranks hold the same
rows."""
REPLICA = "data"
"""The axis over which every parameter and every complete gradient is replicated, but for those of a fold."""
REPLICAS = (REPLICA, "edata")
"""The axes over which complete gradients are replicated: that of most parameters, and that of experts on a fold."""
