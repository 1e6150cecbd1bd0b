"""Work and bytes by place: what documents of a recorded step give each place to compute and to send.

The trainer records lengths alone. Who holds which tokens, how much attention that is and what travels are computed here
by the functions that the runtime and the planner call (`context.assign`, `context.traffic`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from fourfold.axes import CONTEXT
from fourfold.context.assign import Assignment, plan_context
from fourfold.context.traffic import members_by_document, moved_by, moved_by_document
from fourfold.context_way import ContextWay
from fourfold.report import page
from fourfold.report.page import Figure, colour, hint, plot_axis, plot_layout, table
from fourfold.report.run_data import DocumentsRecord
from fourfold.report.units import DASH, count, nbytes, plain, plural

LONGEST = 10
"""The number of documents that are listed, the longest first."""
DRAWN_PLACES = 64
"""The largest number of places that are drawn and listed, the busiest of them."""


@dataclass(slots=True)
class PlaceLoad:
    """What one place has in the step."""

    group: int
    member: int
    tokens: int = 0
    documents: int = 0
    """Documents of which it has a part."""
    pairs: int = 0
    """Pairs of query and key that its attention reads (E14)."""
    sent: int = 0
    received: int = 0
    """Bytes of K and V of one of its ranks in forward, over all of its layers (E16)."""


@dataclass(frozen=True, slots=True)
class LongDocument:
    """A document of the step, and what becomes of it."""

    length: int
    group: int
    micro_batch: int
    places: int
    """The places over which it is cut."""
    moved: int
    """Bytes of K and V that it makes all places send in forward, one rank of each counted."""


@dataclass(slots=True)
class StepLoad:
    """Work and bytes of a recorded step."""

    record: DocumentsRecord
    places: list[PlaceLoad] = field(default_factory=list)
    documents: list[LongDocument] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    """How many parts of micro-batches each way moved."""
    sent_by_way: dict[str, list[int]] = field(default_factory=dict)
    """What each place would send in a way, for the ways that were used and those that they are to be compared with."""
    imbalance: float = 1.0
    """The work of the busiest place divided by the mean, part by part: all places wait for the busiest one in each."""

    @property
    def mean(self) -> float:
        """The pairs of a place on average."""
        return sum(place.pairs for place in self.places) / len(self.places)


@lru_cache(maxsize=1)  # a page asks for its figure, and for its tables
def load_of(record: DocumentsRecord) -> StepLoad:
    """Compute what each place had in the recorded step."""
    found, members = StepLoad(record), record.members
    work: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of all places, by part
    sent: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for group, micro_batches in record.groups:
        places = [PlaceLoad(group, member) for member in range(members)]
        for number, parts in enumerate(micro_batches):
            for index, part in enumerate(parts):
                chosen = record.assignment, record.way
                assignment, way = plan_context(*chosen, part.rows, part.seq, members, part.lengths)
                work[number, index] += assignment.work
                found.ways[str(way)] += 1
                for place in places:
                    _add(place, assignment, record, way)
                    for name in _compared(way) if members > 1 else ():
                        there = moved_by(assignment, ContextWay.parse(name), place.member, *record.sizes)[0]
                        sent[name][group * members + place.member] += there * record.layers
                about = zip(
                    assignment.lengths,
                    members_by_document(assignment),
                    moved_by_document(assignment, way, *record.sizes),
                    strict=True,
                )
                found.documents += [
                    LongDocument(length, group, number, cut, moved * record.layers) for length, cut, moved in about
                ]
        found.places += places
    found.documents.sort(key=lambda one: -one.length)
    found.sent_by_way = {name: list(by_place.values()) for name, by_place in sent.items()}
    whole = sum(map(sum, work.values()))
    found.imbalance = sum(max(each) * len(each) for each in work.values()) / whole if whole else 1.0
    return found


def _compared(way: ContextWay) -> list[str]:
    return list(dict.fromkeys((str(way), "exchange", "gather")))


def _add(place: PlaceLoad, assignment: Assignment, record: DocumentsRecord, way: ContextWay) -> None:
    held = assignment.members[place.member]
    place.tokens += sum(segment.tokens for segment in held)
    place.documents += len({segment.document for segment in held})
    place.pairs += assignment.work[place.member]
    sent, received = moved_by(assignment, way, place.member, *record.sizes)
    place.sent += sent * record.layers
    place.received += received * record.layers


# --- what the page shows


def caption(load: StepLoad) -> str:
    """Return what the figure of places shows, in words."""
    record = load.record
    groups = f" in {plural(len(record.groups), 'context group')} of {record.members}" if record.members > 1 else ""
    documents, places = plural(len(load.documents), "document"), plural(len(load.places), "place")
    text = (
        f"Step {record.step:,}: {documents} on {places}{groups}. Attention is counted in pairs of query and key that "
        f"are read; the busiest place has {plain(load.imbalance, 3)} times the mean"
    )
    many = max(len(micro_batches) for _, micro_batches in record.groups) > 1
    text += ", taken micro-batch by micro-batch." if many else "."
    if record.members > 1:
        ways = ", ".join(
            way if len(load.ways) == 1 else f"{way} ({number} of {load.ways.total()})"
            for way, number in load.ways.most_common()
        )
        text += f" K and V travel by {ways}. A place is named by its group and its member."
    if record.left_out:
        text += f" {plural(record.left_out, 'more group')} recorded nothing."
    return text


def tables(load: StepLoad) -> Iterator[str]:
    """Yield the numbers of the places, of the longest documents, and of the ways."""
    record, moves = load.record, load.record.members > 1
    where = ("group", "member") if moves else ("place",)
    head = (*where, "tokens", "documents", "attention", "of the mean", *(("sent", "received") if moves else ()))
    rows = [
        (
            *((str(place.group), str(place.member)) if moves else (str(place.group),)),
            f"{place.tokens:,}", f"{place.documents:,}", count(place.pairs), plain(place.pairs / load.mean, 3),
            *((nbytes(place.sent), nbytes(place.received)) if moves else ()),
        )
        for place in drawn_places(load)
    ]  # fmt: skip
    yield table(head, rows)
    if len(load.places) > DRAWN_PLACES:
        yield hint(f"The busiest {DRAWN_PLACES} of {len(load.places):,} places.")
    if moves:
        layers = plural(record.layers, "layer")
        yield hint(
            f"Bytes are those of K and V that one rank of a place sends and receives in forward of its {layers}. "
            "Backward brings K and V again, unless policy.keep_gathered, and takes their gradients back."
        )
        yield table(("if K and V went by", "a place would send on average", "at most"), _way_rows(load))
    longest = load.documents[:LONGEST]
    several = len({one.micro_batch for one in load.documents}) > 1
    head = ("longest documents, in tokens", *(("micro-batch",) if several else ()), where[0], "cut over")
    yield table(
        (*head, *(("makes travel",) if moves else ())),
        [
            (
                f"{one.length:,}", *((str(one.micro_batch + 1),) if several else ()), str(one.group),
                plural(one.places, "place"), *((nbytes(one.moved) if one.moved else DASH,) if moves else ()),
            )
            for one in longest
        ],
    )  # fmt: skip


def _way_rows(load: StepLoad) -> Iterator[tuple[str, ...]]:
    for name, sent in sorted(load.sent_by_way.items(), key=lambda one: max(one[1])):
        shown = "gather or ring" if name == "gather" and "ring" not in load.sent_by_way else name
        yield shown + (" (used)" if name in load.ways else ""), nbytes(sum(sent) / len(sent)), nbytes(max(sent))


def drawn_places(load: StepLoad) -> list[PlaceLoad]:
    """Return the places that are shown: all, or the busiest of many, in their order."""
    busiest = sorted(load.places, key=lambda place: -place.pairs)[:DRAWN_PLACES]
    return sorted(busiest, key=lambda place: (place.group, place.member))


def places_figure(load: StepLoad) -> Figure:
    """Draw the attention of every place, and beside it the bytes that one of its ranks sends."""
    places, moves = drawn_places(load), load.record.members > 1
    names = [f"{place.group}.{place.member}" if moves else f"place {place.group}" for place in places]
    mean = load.mean
    pairs = page.bars(
        "attention", [place.pairs for place in places], names, "var(--strong)",
        "%{y}: %{customdata[0]} pairs, %{customdata[1]} of the mean",
        customdata=[[count(place.pairs), plain(place.pairs / mean, 3)] for place in places],
    )  # fmt: skip
    traces, edge = [pairs], [0.0, 0.48 if moves else 1.0]
    axes = {"xaxis": plot_axis(domain=edge, fixedrange=True, rangemode="tozero", tickformat="~s")}
    titles = [("pairs of query and key", 0.0)]
    if moves:
        text = [nbytes(place.sent) for place in places]
        sent = page.bars(
            "sent", [place.sent for place in places], names, colour(CONTEXT), "%{y} sends %{customdata}",
            customdata=text, xaxis="x2",
        )  # fmt: skip
        traces.append(sent)
        # No ticks: decimal ones would not be round numbers of MiB.
        axes["xaxis2"] = plot_axis(domain=[0.52, 1.0], fixedrange=True, rangemode="tozero", showticklabels=False)
        titles.append((f"K and V sent in forward, at most {nbytes(max(place.sent for place in places))}", 0.52))
    place = {"xref": "paper", "xanchor": "left", "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
    font = {"color": "var(--muted)", "size": 12}
    rows = plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    line = {"color": "var(--accent)", "width": 1.5, "dash": "dash"}
    layout = plot_layout(
        90 + 22 * len(places), **axes, yaxis=rows, bargap=0.3, hovermode="closest", showlegend=False,
        annotations=[{"text": text, "x": x, "font": font, **place} for text, x in titles],
        shapes=[{"type": "line", "x0": mean, "x1": mean, "yref": "paper", "y0": 0, "y1": 1, "line": line}],
    )  # fmt: skip
    return {"traces": traces, "layout": layout, "caption": caption(load) + " The dashed line is the mean."}
