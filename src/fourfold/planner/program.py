"""The program of a reference model: what one rank's host does in a training step, from sizes alone.

The same structure as the layers', written from the equations (docs/math.md) on a `Stage`. Memory-bound work is counted
in bytes that kernels read and write: elementwise passes over activations of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fourfold.engine import Turns
from fourfold.planner.rehearse import LANDED, Flight, Landed, Stage, Weights
from fourfold.planner.volume import Volume
from fourfold.planner.work import Attention, Kernel, Product, Work

Moving = Flight | Landed


@dataclass(frozen=True, slots=True)
class Program:
    """A step's work in the host's order, and where in it the phases begin."""

    work: list[Work]
    phases: list[tuple[int, str]]


def step_program(volume: Volume, *, micro_steps: int = 1, optimizer: bool = True) -> Program:
    """One step of a run that has found its order: from the optimizer's last word, whose parameters may still be on
    their way between replicas, to its next one."""
    model = Model(volume)
    model.stage.recording = True  # in the first pass the engine finds its order, as the runtime's does
    model.step(1, optimizer=optimizer)
    model.stage.recording = False
    model.phases.clear()
    model.step(micro_steps, optimizer=optimizer)
    return Program(model.stage.work, model.phases)


class Stream:
    """The residual stream: whether something that a sublayer adds is still on its way."""

    __slots__ = ("delta",)

    def __init__(self, delta: Moving | None = None) -> None:
        self.delta = delta

    def read(self) -> None:
        if self.delta is not None:
            self.delta.land()


class Model:
    """A transformer on a stage."""

    def __init__(self, volume: Volume) -> None:
        self.volume, self.config = volume, volume.config
        self.stage = Stage(volume)
        self.engine = self.stage.engine
        self.halves = [replace(volume, rows=half["rows"], half=half["half"]) for half in volume.halves()]
        self.item = volume.compute_itemsize
        self.phases: list[tuple[int, str]] = []

    # --- a step

    def step(self, micro_steps: int, *, optimizer: bool) -> None:
        stage, volume = self.stage, self.volume
        if optimizer and volume.policy.shard_optimizer:
            self._enter_phase("forward")
            stage.owed.gather_parameters()
        if micro_steps > 1:
            stage.communicate(volume.count_targets())
        for index in range(micro_steps):
            self._enter_phase("forward")
            self.engine.begin("training")
            self.forward(counted=micro_steps > 1)
            self._enter_phase("backward")
            stage.run_backward(accumulating=index < micro_steps - 1)
        if optimizer:
            self._enter_phase("optimizer")
            self.optimize()

    def _enter_phase(self, name: str) -> None:
        self.phases.append((len(self.stage.work), name))

    def optimize(self) -> None:
        """The norm of gradients, and AdamW: p, g, m, v are read, p, m, v written."""
        stage, volume = self.stage, self.volume
        shard = sum(rows * row_nbytes for rows, row_nbytes in stage.owed.members.values())
        own = shard // volume.shape.data if volume.policy.shard_optimizer else shard
        stage.compute(Kernel("gradient norm", own))
        stage.communicate(volume.clip())
        stage.compute(Kernel("AdamW", 7 * own))

    def forward(self, *, counted: bool) -> None:
        volume, stage = self.volume, self.stage
        read = self.logits
        if volume.policy.loss_chunk:
            stage.communicate(volume.loss_sums(1 if counted else 2))
            read = self.chunked_share
        if volume.policy.recompute == "block":
            streams = self.engine.take_turns([self.embed(half) for half in self.halves])
            for index in range(self.config.layers):
                streams = self.block_again(index, streams)
            self.engine.take_turns([read(*each) for each in zip(streams, self.halves, strict=True)])
        else:
            self.engine.take_turns([self.through(half, read) for half in self.halves])
        if volume.policy.loss_chunk:
            stage.communicate(volume.loss_sums(1))
        else:
            self.loss(counted=counted)

    def through(self, half: Volume, read: Callable[[Stream, Volume], Turns[None]]) -> Turns[None]:
        stream = yield from self.embed(half)
        for index in range(self.config.layers):
            stream = yield from self.block(index, stream, half)
        yield from read(stream, half)

    def block_again(self, index: int, streams: list[Stream]) -> list[Stream]:
        return self.stage.recompute(
            lambda: self.engine.take_turns(
                [self.block(index, *each) for each in zip(streams, self.halves, strict=True)]
            )
        )

    # --- the operators

    def enter(self, half: Volume, label: str) -> Moving:
        return self.stage.fly("x", lambda: half.enter(label), lambda: half.enter(label, backward=True))

    def leave(self, half: Volume, label: str) -> Moving:
        return self.stage.fly("x", lambda: half.leave(label), lambda: half.leave(label, backward=True))

    def spread(self, half: Volume, n: int, label: str) -> Moving:
        self._turn_over(half.m * n, label)
        return self.stage.fly("y", lambda: half.spread(n, label), lambda: half.spread(n, label, backward=True))

    def collect(self, half: Volume, n: int, label: str) -> Moving:
        self._turn_over(half.m * n, label)
        return self.stage.fly("y", lambda: half.collect(n, label), lambda: half.collect(n, label, backward=True))

    def _turn_over(self, elements: int, label: str) -> None:
        """Features cut over y lie side by side in a message and one after another in a tensor."""
        if self.volume.shape.y > 1 and self.volume.sharded:
            kernel = Kernel(f"turn over {label}", 2 * elements * self.item)
            self.stage.compute(kernel)
            self.stage.on_backward(lambda: self.stage.compute(kernel), reads=False)

    # --- embedding, norms, head, loss

    def embed(self, half: Volume) -> Turns[Stream]:
        table = Weights("embedding", ("embedding.weight",), ((half.vocab_rows, half.k),))
        self.lookup(table, half.m)
        leaving = self.leave(half, "embedding")
        if leaving.travels:
            yield
        leaving.land()
        if self.config.positions == "learned":
            places = Weights("positions", ("positions.weight",), ((self.config.seq, half.k),))
            self.lookup(places, half.m_rest)
        self.dropout(half)
        return Stream()

    def lookup(self, table: Weights, tokens: int) -> None:
        stage, turns = self.stage, self.engine.turn.of
        rows, k = table.matrices[0]
        nbytes = 2 * tokens * k * self.item
        with stage.using(table, "unit", turns):
            stage.compute(Kernel(f"lookup {table.label}", nbytes))

        def backward() -> None:
            stage.compute(Kernel(f"dw {table.label}", nbytes + rows * k * self.volume.reduce_itemsize))
            stage.add_gradients("unit", table, turns)

        stage.on_backward(backward)

    def dropout(self, half: Volume) -> None:
        if self.config.dropout:
            kernel = Kernel("dropout", 3 * half.m_rest * half.k * self.item)
            self.stage.compute(kernel)
            self.stage.on_backward(lambda: self.stage.compute(kernel))

    def norm(self, label: str, half: Volume) -> None:
        """Adds up the residual stream too: reads a and delta, writes their sum and its norm."""
        names = (f"{label}.weight", f"{label}.bias")[: len(half.norm_vectors)]
        self._norm(Weights(label, names, (), tuple(half.norm_vectors)), half.m_rest * half.k, half)

    def head_norm(self, label: str, elements: int) -> None:
        self._norm(Weights(label, (f"{label}.weight",), (), (self.config.head_dim,)), elements, None)

    def _norm(self, weights: Weights, elements: int, cut: Volume | None) -> None:
        """With `cut`, statistics of that half over y."""
        stage, turns, label = self.stage, self.engine.turn.of, weights.label
        one_pass = elements * self.item
        with stage.using(weights, "unit", turns):
            stage.compute(Kernel(f"norm {label}", 4 * one_pass))
            if cut is not None:
                stage.communicate(cut.norm_statistics(label))

        def backward() -> None:
            with stage.using(weights.first_vector(), "unit", turns):
                stage.compute(Kernel(f"dnorm {label}", 5 * one_pass))
                if cut is not None:
                    stage.communicate(cut.norm_sums(label))
            stage.add_gradients("unit", weights, turns)

        stage.on_backward(backward)

    def logits(self, stream: Stream, half: Volume) -> Turns[None]:
        yield
        stream.read()
        self.norm("norm", half)
        yield from self.expand([half.vocab_columns], "head", half, names=(self.table,), rows=[half.vocab_rows])

    @property
    def table(self) -> str:
        return "embedding.weight" if self.config.tied else "head.weight"

    def loss(self, *, counted: bool) -> None:
        """E9 reads the logits, E10 reads them and writes their gradient."""
        stage = self.stage
        for half in self.halves:
            stage.compute(Kernel("loss", self._logits_nbytes(half, half.m)))
            stage.communicate(half.loss_statistics())
        stage.communicate(self.volume.loss(counted=counted))
        stage.on_backward(
            lambda: stage.compute(*(Kernel("dlogits", 2 * self._logits_nbytes(half, half.m)) for half in self.halves))
        )

    def _logits_nbytes(self, half: Volume, tokens: int) -> int:
        return tokens * (half.vocab_columns // (half.shape.y if half.sharded else 1)) * self.item

    def chunked_share(self, stream: Stream, half: Volume) -> Turns[None]:
        """In chunks forward finds the gradients too."""
        stage, turns = self.stage, self.engine.turn.of
        yield
        stream.read()
        self.norm("norm", half)
        table = Weights("head", (self.table,), ((half.vocab_rows, half.k),))
        entering = self.enter(half, "head")
        if entering.travels:
            yield
        entering.land()
        columns = half.vocab_columns
        with stage.using(table, "weights", turns):
            for tokens in half.chunks:
                stage.compute(Product("E1 head", tokens, half.k, columns))
                stage.communicate(half.spread(columns, "head", tokens=tokens))
                stage.compute(Kernel("loss", self._logits_nbytes(half, tokens)))
                stage.communicate(half.merged(tokens))
                stage.compute(Kernel("dlogits", 2 * self._logits_nbytes(half, tokens)))
                stage.communicate(half.spread(columns, "head", tokens=tokens, backward=True))
                stage.compute(Product("E2 head", tokens, columns, half.k), Product("E3 head", columns, tokens, half.k))

        def backward() -> None:
            stage.compute(Kernel("scale head", 2 * (half.m * half.k * self.item + 4 * columns * half.k)))
            stage.add_gradients("unit", table, turns)

        stage.on_backward(backward)

    # --- a block

    def block(self, index: int, stream: Stream, half: Volume) -> Turns[Stream]:
        again = self.volume.policy.recompute == "block"
        prefix = f"layers.{index}"
        if stream.delta is not None:
            yield
        if again:
            stream.read()
            stream.delta = None
        stream.read()
        self.norm(f"{prefix}.attention_norm", half)
        leaving = yield from self.attention(f"{prefix}.attention", half)
        yield
        leaving.land()
        self.dropout(half)
        self.norm(f"{prefix}.mlp_norm", half)
        yield from self.mlp(f"{prefix}.mlp", half)
        if self.engine.recomputing and not self.config.dropout:
            return Stream(LANDED)
        leaving = self.leave(half, f"{prefix}.mlp.down")
        if self.config.dropout:
            yield
            leaving.land()
            self.dropout(half)
            leaving = LANDED
        return Stream(leaving)

    def expand(
        self,
        widths: list[int],
        label: str,
        half: Volume,
        *,
        names: tuple[str, ...],
        rows: list[int] | None = None,
        spread: int | None = None,
    ) -> Turns[None]:
        """Layers that read one tensor; `spread` columns of their output where the rest goes another way."""
        entering = self.enter(half, label)
        if entering.travels:
            yield
        entering.land()
        matrices, biases = half.expand_weights(rows or widths)
        weights = Weights(label, names, tuple(matrices), tuple(biases[: len(names) - len(matrices)]))
        self.stage.product(weights, half.m, sum(widths), lambda: half.entered_again(label))
        if spread is None:
            spreading = self.spread(half, sum(widths), label)
            yield
            spreading.land()

    def contract(self, n: int, label: str, half: Volume) -> Turns[None]:
        collecting = self.collect(half, n, label)
        if collecting.travels:
            yield
        collecting.land()
        biases = (half.k,) if self.config.bias else ()
        weights = Weights(label, (f"{label}.weight", f"{label}.bias")[: 1 + len(biases)], ((half.k, n),), biases)
        self.stage.product(weights, half.m, half.k, lambda: half.collected_again(n, label))

    def attention(self, prefix: str, half: Volume) -> Turns[Moving]:
        """Until what `out` gives is on its way to rest."""
        label, widths = f"{prefix}.q+k+v", [half.q, half.kv, half.kv]
        names = tuple(f"{prefix}.{name}.weight" for name in "qkv")
        if self.config.bias:
            names += tuple(f"{prefix}.{name}.bias" for name in "qkv")
        if half.shares_kv:
            yield from self.expand(widths, label, half, names=names, spread=half.q)
            spreading = self.spread(half, half.q, label)
            sharing = self.stage.fly("y", lambda: half.kv_over_y(label), lambda: half.kv_over_y(label, backward=True))
            yield
            spreading.land()
            sharing.land()
            if self.config.kv_heads % half.shape.x:
                self.stage.fly("x", lambda: half.kv_over_x(label), lambda: half.kv_over_x(label, backward=True)).land()
        else:
            yield from self.expand(widths, label, half, names=names)
        if self.volume.policy.recompute == "attention":
            self.stage.recompute(lambda: self.mix(prefix, half))
        else:
            self.mix(prefix, half)
        yield from self.contract(half.q, f"{prefix}.out", half)
        return self.leave(half, f"{prefix}.out")

    def mix(self, prefix: str, half: Volume) -> None:
        """Between the two products; a causal mask leaves half of the scores."""
        stage, config = self.stage, self.config
        inner = half.shape.y if half.sharded else 1
        q = half.m * half.q // inner
        kv = half.m * (2 * half.kv // inner if not half.shares_kv else 2 * self._kv_heads(half) * config.head_dim)
        if config.qk_norm:
            self.head_norm(f"{prefix}.q_norm", q)
            self.head_norm(f"{prefix}.k_norm", kv // 2)
        if config.positions == "rope":
            turned = Kernel("rotate", (2 * q + 2 * kv) * self.item)
            stage.compute(turned)
            stage.on_backward(lambda: stage.compute(turned))
        flops, nbytes = 2 * q * half.seq, (2 * q + kv) * self.item
        stage.compute(Attention(f"attention {prefix}", flops, nbytes))
        stage.on_backward(lambda: stage.compute(Attention(f"dattention {prefix}", 2 * flops, 2 * nbytes)))

    def _kv_heads(self, half: Volume) -> int:
        """KV heads that this rank's queries read."""
        heads = half.q // self.config.head_dim // (half.shape.y if half.sharded else 1)
        return min(max(1, heads * self.config.kv_heads // self.config.heads), self.config.kv_heads)

    def mlp(self, prefix: str, half: Volume) -> Turns[None]:
        """Until `down` has multiplied."""
        stage = self.stage
        widths, label = half.mlp_reads(prefix)
        layers = label.removeprefix(f"{prefix}.").split("+")
        kinds = ("weight", "bias") if self.config.bias else ("weight",)
        names = tuple(f"{prefix}.{name}.{kind}" for kind in kinds for name in layers)
        yield from self.expand(widths, label, half, names=names)
        hidden = half.m * widths[0] // (half.shape.y if half.sharded else 1) * self.item
        reads = len(widths) * hidden
        stage.compute(Kernel(f"activate {prefix}", reads + hidden))
        stage.on_backward(lambda: stage.compute(Kernel(f"dactivate {prefix}", 2 * reads + hidden)))
        yield from self.contract(widths[0], f"{prefix}.down", half)
