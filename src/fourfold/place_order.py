"""Keeps the places along z in one order where each of them runs other parts of a model.

Weights are gathered over z, and gradients reduced, in the order of a place's own code, and all places must send the
same messages. A mixture runs an expert only where a row has chosen it. So the first pass of a kind records the messages
of all places (each step is compared first), and every later pass follows this record: a place that skips a module takes
part in its gathers, hands in zeros for its gradients, and needs to ask nobody.

Only whole elements of a ModuleList or ModuleDict that has several alike may be skipped by some places. Every other
difference from the record must be the same on all places: they meet in the job's store and record anew, or raise.

Invariant: all places along z follow the same record, because it only changes where all of them have met.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from fourfold import comm
from fourfold.engine import BACKWARD, OrderedGather, in_backward
from fourfold.errors import LateRanksError, UnlikeRanksError
from fourfold.gradients import Gradients
from fourfold.job import Channel
from fourfold.layout import GATHERED
from fourfold.param_group import GroupMember, ParamGroup

MOST_RECORDS = 8
"""Records of one kind of pass that are kept: so many ways of running a model may take turns without being recorded
again."""


class Step(NamedTuple):
    """A message that all places along z send: weights that are gathered, or gradients that are reduced."""

    op: str
    names: tuple[str, ...]
    kind: str = ""
    """The kind of what is gathered (`OrderedGather`)."""


GATHER, REDUCE = "gather", "reduce"
END = Step("end", ())
"""What a place wants that has sent all messages of its pass."""


class Choices:
    """The modules that rows may choose: elements of a ModuleList or ModuleDict that has several of them alike."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.siblings: dict[str, list[str]] = {}
        """For each such module all that are alike, itself included, in their order."""
        for name, module in modules:
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                alike: dict[Hashable, list[str]] = {}
                for own, child in module.named_children():
                    shapes = tuple((own, tuple(parameter.shape)) for own, parameter in child.named_parameters())
                    alike.setdefault((type(child), shapes), []).append(f"{name}.{own}".lstrip("."))
                self.siblings |= {path: paths for paths in alike.values() if len(paths) > 1 for path in paths}
        self._around: dict[Step, list[str]] = {}

    @property
    def nested(self) -> bool:
        """Whether such modules contain others, as blocks contain experts."""
        parts = (path.split(".") for path in self.siblings)
        return any(".".join(each[:end]) in self.siblings for each in parts for end in range(1, len(each)))

    def around(self, step: Step) -> list[str]:
        """Return the modules with choices that contain all parameters of a step, outermost first."""
        known = self._around.get(step)
        if known is None:
            parts = [name.split(".") for name in step.names]
            first = parts[0] if parts else []
            paths = (".".join(first[:end]) for end in range(1, len(first)))
            known = self._around[step] = [
                path
                for path in paths
                if path in self.siblings and all(name.startswith(f"{path}.") for name in step.names)
            ]
        return known

    def may_skip(self, steps: Sequence[Step], begin: int, end: int) -> bool:
        """Return whether a place may leave out steps[begin:end]: they are whole runs of modules with choices."""
        return all(
            any(self._within(steps, at, path, begin, end) for path in self.around(steps[at]))
            for at in range(begin, end)
        )

    def _within(self, steps: Sequence[Step], at: int, path: str, begin: int, end: int) -> bool:
        first = last = at
        while first > 0 and path in self.around(steps[first - 1]):
            first -= 1
        while last + 1 < len(steps) and path in self.around(steps[last + 1]):
            last += 1
        return begin <= first and last < end

    def completed(self, steps: list[Step], known: Callable[[str], bool], *, downwards: bool) -> list[Step]:
        """Add steps for modules that no place has chosen yet, as their siblings have them."""
        groups = {paths[0]: paths for paths in self.siblings.values()}
        for paths in sorted(groups.values(), key=lambda paths: paths[0].count(".")):  # outer modules first
            steps = self._with_all_of(paths, steps, known, downwards=downwards)
        return steps

    def _with_all_of(
        self, paths: list[str], steps: list[Step], known: Callable[[str], bool], *, downwards: bool
    ) -> list[Step]:
        """Add the missing modules of a group to each round, in which the code goes through the group once."""
        place = {path: number for number, path in enumerate(paths)}
        runs: list[tuple[int, int, int]] = []  # begin, end, which module
        for at, step in enumerate(steps):
            own = next((place[path] for path in self.around(step) if path in place), None)
            if own is None:
                continue
            if runs and runs[-1][1:] == (at, own):
                runs[-1] = (runs[-1][0], at + 1, own)
            else:
                runs.append((at, at + 1, own))
        rises = [later[2] - earlier[2] for earlier, later in pairwise(runs)]
        balance = sum(rise > 0 for rise in rises) - sum(rise < 0 for rise in rises)
        downwards = balance < 0 or (balance == 0 and downwards)
        rounds: list[list[tuple[int, int, int]]] = []
        for number, run in enumerate(runs):
            if number and (rises[number - 1] < 0 if downwards else rises[number - 1] > 0):
                rounds[-1].append(run)
            else:
                rounds.append([run])
        added: dict[int, list[Step]] = {}
        for round_ in rounds:
            here = {own: (begin, end) for begin, end, own in round_}
            order = range(len(paths))[:: -1 if downwards else 1]
            for at, own in enumerate(order):
                if own in here:
                    continue
                before = next((other for other in reversed(order[:at]) if other in here), None)
                model = before if before is not None else next(other for other in order[at:] if other in here)
                begin, end = here[model]
                made = [_renamed(step, paths[model], paths[own]) for step in steps[begin:end]]
                if all(known(name) for step in made for name in step.names):
                    added.setdefault(end if before is not None else begin, []).extend(made)
        return [step for at in range(len(steps) + 1) for step in (*added.get(at, ()), *steps[at : at + 1])]


def _read(text: str) -> Step:
    op, names, kind = json.loads(text)
    return Step(op, tuple(names), kind)


def _renamed(step: Step, path: str, other: str) -> Step:
    return step._replace(names=tuple(other + name[len(path) :] for name in step.names))


class PlaceOrder:
    """The order in which the places along z send the messages of one model."""

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        gradients: Gradients,
        members: Mapping[str, Callable[[], GroupMember]],
    ) -> None:
        """`modules` are all of the model, and `members` gives its parameters, by name."""
        self.gradients, self.grid, self.engine, self._members = gradients, gradients.grid, gradients.engine, members
        self._names = {id(parameter): name for name, (parameter, _) in gradients.parameters.items()}
        self._choices = Choices(modules)
        self._known: dict[Hashable, list[list[Step]]] = {}
        """The records of each kind of pass. The last one is tried first."""
        self._kind: Hashable = None
        self._record: list[Step] = []
        self._at = 0
        """How many steps of the record the running pass has taken."""
        self._active = self._recording = self._taking_part = False
        self._last = END
        self._steps: dict[tuple[Hashable, ...], Step] = {}
        self._gathers: dict[Step, OrderedGather] = {}
        self._channel: Channel | None = None
        if self._choices.nested:
            self._run_products_at_once()

    def _run_products_at_once(self) -> None:
        """Hold no product back behind messages.

        Gathers and reductions must alternate in one way on all places, and products that wait for messages would make
        it depend on which experts ran. All places come to this together, so backward passes are recorded anew.
        """
        if self.engine.wgrad_queue.most:
            self.engine.wgrad_queue.most = 0
            self._known.pop(BACKWARD, None)

    # --- passes

    def begin(self, kind: Hashable) -> None:
        """Begin a pass. Passes of one kind are expected to send the same messages."""
        self._active = not self.grid.muted
        self._kind, self._last = kind, END
        self._recording = kind not in self._known
        self._record, self._at = [] if self._recording else self._known[kind][-1], 0

    def finish(self) -> None:
        """End a pass that has succeeded on this place: take part in what other places still send."""
        if not self._is_in_pass():
            return
        if not self._recording and not self._skip_to(END):
            self._meet(END)
        if self._recording:
            self._agree_on(END)
            known, backward = self._known.setdefault(self._kind, []), self._kind == BACKWARD
            complete = self._choices.completed(self._record, self._members.__contains__, downwards=backward)
            if not backward and len(complete) > len(self._record):
                self._run_products_at_once()  # nobody has run some module, so rows choose
            known.append(complete)
            del known[:-MOST_RECORDS]
        self._kind = None

    def forget(self) -> None:
        """Give up a pass that has failed."""
        self._kind, self._active = None, False

    def _is_in_pass(self) -> bool:
        """Return whether a pass is running; a backward pass begins with its first message."""
        if self._active and in_backward() and self._kind != BACKWARD:
            self.gradients.come_to_backward()
            self.begin(BACKWARD)
        return self._active and self._kind is not None

    # --- messages

    def before_gather(self, wanted: OrderedGather) -> None:
        """Come to the place of a gather in the order of all places."""
        if self._taking_part or not self._is_in_pass():
            return
        step = self._step(GATHER, wanted.parameters, wanted.kind)
        self._gathers[step] = wanted
        self._come_to(step)

    def before_reduction(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Come to the place of a reduction in the order of all places; return whether other places may skip it."""
        if not self._is_in_pass():
            return False
        step = self._step(REDUCE, parameters)
        if not self._taking_part:
            self._come_to(step)
        return bool(self._choices.around(step))

    def _step(self, op: str, parameters: Sequence[Tensor], kind: str = "") -> Step:
        key = op, kind, *map(id, parameters)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = Step(op, tuple(self._names[id(parameter)] for parameter in parameters), kind)
        return known

    def _come_to(self, step: Step) -> None:
        if not self._recording:
            while not self._is_next(step) and self._waits_before(step):
                self.engine.wgrad_queue.run_one()
            if self._is_next(step):
                self._at += 1
                return
            if self._skip_to(step):
                return
            self._meet(step)
        if self._recording:
            self._agree_on(step)

    def _is_next(self, step: Step) -> bool:
        return self._at < len(self._record) and self._record[self._at] == step

    def _waits_before(self, step: Step) -> bool:
        """Return whether products wait for a message, and the record has the reduction of one before this step.

        Where others run a module, the messages behind which such products run, this place may skip it.
        """
        if not self.engine.wgrad_queue.jobs or step not in self._record[self._at :]:
            return False
        return any(
            self.gradients.expects(each.names)
            for each in self._record[self._at : self._record.index(step, self._at)]
            if each.op == REDUCE
        )

    def _skip_to(self, step: Step) -> bool:
        """Take part in what the record has before this step; return False if that cannot be left out."""
        record, begin = self._record, self._at
        end = len(record)
        if step is not END:
            end = next((at for at in range(begin, len(record)) if record[at] == step), -1)
        if end < 0 or not self._choices.may_skip(record, begin, end):
            return False
        for at in range(begin, end):
            self._at = at + 1
            self._take_part(record[at])
        self._at = end + (step is not END)
        return True

    def _take_part(self, step: Step) -> None:
        """Send what other places send and this one does not need."""
        self._taking_part = True
        try:
            group = self._group(step)
            if step.op == REDUCE:
                group.hand_in_nothing()
            else:
                known = self._gathers.get(step)
                prefetcher, wanted = self.engine.prefetcher, group if known is None or not known.is_current() else known
                prefetcher.release(wanted, prefetcher.take(wanted, 1))
                if self._kind != BACKWARD:
                    self.gradients.forward_pass.use(group.ids)
        finally:
            self._taking_part = False

    def _group(self, step: Step) -> ParamGroup:
        members = tuple(self._members[name]() for name in step.names)
        return ParamGroup(
            self.grid, self.gradients.policy, self.gradients, step.names[0], members, step.kind or "group"
        )

    # --- where all places meet

    def _agree_on(self, step: Step) -> None:
        """Record the next steps of all places, up to this one of this place."""
        while (chosen := self._chosen(step)) != step:
            self._note(chosen)
            self._take_part(chosen)
        if step is not END:
            self._note(step)

    def _note(self, step: Step) -> None:
        self._record.append(step)
        self._at += 1
        self._last = step

    def _chosen(self, step: Step) -> Step:
        """Return the step that all places take next, of those that they want."""
        text = json.dumps(step)
        if comm.equal_along(zlib.crc32(text.encode()), self.grid, (GATHERED,)):
            return step
        verdict = self._ask(text, self._judge)
        if not verdict:
            raise self._error(step)
        self._run_products_at_once()
        return _read(verdict)

    def _judge(self, texts: Sequence[str]) -> str:
        """Return the step of the earliest module with choices; "" if no place has come to one."""
        wanted = map(_read, texts)
        chosen = [step for step in dict.fromkeys(wanted) if self._choices.around(step)]
        return json.dumps(min(chosen, key=self._distance)) if chosen else ""

    def _distance(self, step: Step) -> tuple[int, bool, int]:
        """Return how far a step is from the last one: places end a mixture, and a round of experts, before the next."""
        alike = 0
        for own, last in zip(
            step.names[0].split("."), self._last.names[0].split(".") if self._last.names else [], strict=False
        ):
            if own != last:
                break
            alike += 1
        paths = self._choices.around(step)
        number = self._choices.siblings[paths[-1]].index(paths[-1])
        group = self._choices.siblings[paths[-1]]
        before = next((group.index(path) for path in self._choices.around(self._last) if path in group), None)
        if self._kind == BACKWARD:
            number, before = -number, None if before is None else -before
        return -alike, before is not None and number < before, number

    def _meet(self, step: Step) -> None:
        """Meet the other places, which must leave the record here too, and go on with another record or a new one."""
        self.engine.wgrad_queue.run_all()
        done, next_steps = self._record[: self._at], [] if step is END else [step]
        texts = json.dumps([str(self._kind), self._at, step])
        if self._ask(texts, lambda texts: str(len(set(texts))), step) == "1":
            for steps in reversed(self._known[self._kind]):
                fits = steps[: self._at] == done and steps[self._at :][: len(next_steps)] == next_steps
                if fits and (next_steps or len(steps) == self._at):
                    self._record, self._at = steps, self._at + len(next_steps)
                    return
        self._recording, self._record = True, done

    def _ask(self, text: str, judge: Callable[[Sequence[str]], str], step: Step | None = None) -> str:
        if self._channel is None:
            self._channel = Channel("places along z", self.grid.ranks_along((GATHERED,)))
        try:
            # before the collectives in which the others may wait reach their deadline
            return self._channel.decide(text, judge, self.grid.deadline / 2)
        except LateRanksError as late:
            if step is None:
                raise
            raise self._error(step) from late

    def _error(self, step: Step) -> UnlikeRanksError:
        what = "to end its pass" if step is END else f"to use {step.names[0].rpartition('.')[0] or step.names[0]}"
        return UnlikeRanksError(
            f"this place is about {what}, and another place of axis {GATHERED} another layer: parameters are gathered "
            f"over {GATHERED}, so all places must use the same layers in the same order (as under FSDP); a place may "
            "leave out elements of a ModuleList or ModuleDict that has several alike, and nothing else; let every "
            f"place run the layer, on no rows if need be, or use a grid with {GATHERED}=1"
        )
