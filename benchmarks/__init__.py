"""Benchmarks, in a folder for each question. Each command runs from the repository's root.

    speed/        How fast is a step beside plain torch, FSDP2, TP and pipelines, and what does watching cost?
                  vs_plain_torch.py  gpu_ranks.py  hugging_face.py  watch_cost.py  timeline.py
    planner/      Are predicted seconds, memory and rankings right? How does training scale?
                  validate.py  memory_on_gpu.py  scaling.py  scaling_emulated.py
    cluster/      How fast is a step when nodes are joined by slow links?
                  emulate.py  compare.py
    context/      How fast is attention over a context group, and how long can sequences be?
                  ulysses.py  torch_context.py  trainer_documents.py  longest.py
    experts/      How fast is a mixture of experts beside plain torch and DeepSpeed?
                  block.py  deepspeed_moe.py  products.py
    checkpoint/   How fast are checkpoints beside torch.distributed.checkpoint?
                  vs_dcp.py
    shared/       Used by several of these: rank processes, workloads, the peers' models, tables, plots.
    results/      What was measured, with the date and the command.

`context`, `experts` and `planner` may import from `cluster` and `speed`, and all folders may import from `shared`;
nothing else crosses folders. With `src` on the path, torch and numpy are enough, except where a command says otherwise.
"""
