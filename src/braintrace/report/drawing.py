"""A chart as inline SVG: columns from left to right in bands that wrap, straight ways
as curves, the others in lanes.

Columns are the layers of a chart without its delayed arrows. An arrow to the next
column is a curve; any other leaves its column downwards (back in time, or to a later
band) or upwards (past columns), follows a lane between two bands and enters its target
from the left. Arrows of one source and one kind share a lane.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from .boxes import (
    CHARACTER,
    PAD,
    ROW,
    TITLE,
    Box,
    shortened,
)
from .chart import Chart, Edge
from .markup import Markup, style_of, tag

BAND = 1244
LANE, GAP, BADGE = 9, 28, 24


class Drawing:
    """A chart laid out; ``boxes`` has the text of each of its nodes."""

    def __init__(self, chart: Chart, boxes: Sequence[Box]):
        self.boxes = list(boxes)
        self.edges = [e for e in chart.edges if e.source != e.target or e.cuts]
        self._assign_layers()
        self._order_columns()
        for room in range(BAND, 400, -60):
            self._assign_bands(room)
            self._place()
            if self.width <= BAND:
                break

    # ------------------------------------------------------------ columns and bands

    def _assign_layers(self) -> None:
        """The longest way from an input, then as far right as what it feeds allows;
        circles are broken."""
        todo = list(range(len(self.boxes)))
        left = [e for e in self.edges if not e.delayed and e.source != e.target]
        forward: list[Edge] = []
        while todo:
            free = [n for n in todo if not any(e.target == n for e in left)] or todo[:1]
            todo = [n for n in todo if n not in free]
            left = [e for e in left if e.target not in free]
            for e in self.edges:
                if e.source in free and not e.delayed and e.target in todo:
                    forward.append(e)
                    source, target = self.boxes[e.source], self.boxes[e.target]
                    target.layer = max(target.layer, source.layer + 1)
            left = [e for e in left if e.source not in free]
        last = max(box.layer for box in self.boxes)
        for n in reversed(range(len(self.boxes))):
            box = self.boxes[n]
            fed = [self.boxes[e.target].layer for e in forward if e.source == n]
            if box.kind == 'output':
                box.layer = max(last, 1)
            elif box.kind in ('operation', 'state') and fed:
                box.layer = max(box.layer, min(fed) - 1)
        self._close_gaps()

    def _close_gaps(self) -> None:
        used = sorted({box.layer for box in self.boxes})
        for box in self.boxes:
            box.layer = used.index(box.layer)

    @cached_property
    def columns(self) -> list[list[int]]:
        """Boxes of every layer."""
        found: dict[int, list[int]] = defaultdict(list)
        for n, box in enumerate(self.boxes):
            found[box.layer].append(n)
        return [found[layer] for layer in sorted(found)]

    def _assign_bands(self, room: int) -> None:
        """As many columns in a band as fit, broken after a column of groups where there
        is one."""
        widths = [
            max(self.boxes[n].width for n in column) + GAP for column in self.columns
        ]
        bands: list[list[int]] = [[]]
        for layer, width in enumerate(widths):
            band = bands[-1]
            if band and sum(widths[i] for i in band) + width > room + GAP:
                whole = [
                    i
                    for i in band
                    if any(self.boxes[n].kind == 'group' for n in self.columns[i])
                ]
                rest = [i for i in band if whole and i > whole[-1]]
                bands[-1] = [i for i in band if i not in rest]
                bands.append(rest)
            bands[-1].append(layer)
        self.bands = bands
        for b, band in enumerate(bands):
            for layer in band:
                for n in self.columns[layer]:
                    self.boxes[n].band = b

    def _order_columns(self) -> None:
        """Boxes near those that feed them."""
        place = {n: i for column in self.columns for i, n in enumerate(column)}
        feeds = defaultdict(list)
        for e in self.edges:
            if self.boxes[e.source].layer < self.boxes[e.target].layer:
                feeds[e.target].append(e.source)
                feeds[e.source].append(e.target)
        for _ in range(4):
            for column in self.columns:
                mean = {
                    n: sum(place[m] for m in feeds[n]) / len(feeds[n])
                    if feeds[n]
                    else place[n]
                    for n in column
                }
                column.sort(key=lambda n, mean=mean: (mean[n], n))
                place.update((n, i) for i, n in enumerate(column))

    # ------------------------------------------------------------ ways

    def _is_straight(self, e: Edge) -> bool:
        a, b = self.boxes[e.source], self.boxes[e.target]
        return a.band == b.band and b.layer == a.layer + 1

    def _corridors(self, e: Edge) -> tuple[int, int]:
        """The corridor in which an arrow leaves its band and the one in which it
        arrives; number b is above band b."""
        a, b = self.boxes[e.source], self.boxes[e.target]
        if a.band == b.band:
            ahead = b.layer > a.layer
            return (a.band, a.band) if ahead else (a.band + 1, a.band + 1)
        return (a.band + 1, b.band) if b.band > a.band else (a.band, b.band + 1)

    @staticmethod
    def _net(e: Edge) -> tuple:
        return e.source, kind_of(e), e.delayed

    def _place(self) -> None:
        self._set_ports()
        routed = [e for e in self.edges if not self._is_straight(e)]
        self._exits = _numbered(
            (self.boxes[e.source].layer, self._net(e)) for e in routed
        )
        self._entries = _numbered(
            (self.boxes[e.target].layer, self._net(e)) for e in routed
        )
        self._margins = _numbered(
            ('margin', self._net(e)) for e in routed if len({*self._corridors(e)}) > 1
        )
        self._badges = {self.boxes[e.target].layer: BADGE for e in self.edges if e.cuts}
        self._place_across()
        self._lanes = self._assign_lanes(routed)
        self._place_down()

    def _place_across(self) -> None:
        self.width = 0.0
        self._left: dict[int, float] = {}
        self._right: dict[int, float] = {}
        for band in self.bands:
            x = 14.0 + LANE * len(self._margins)
            for layer in band:
                entries = sum(key[0] == layer for key in self._entries)
                if entries or layer != band[0]:
                    x += (
                        LANE * entries
                        + self._badges.get(layer, 0)
                        + (16 if layer == band[0] else GAP)
                    )
                self._left[layer] = x
                wide = max(self.boxes[n].width for n in self.columns[layer])
                for n in self.columns[layer]:
                    self.boxes[n].x = x + (wide - self.boxes[n].width) / 2
                x += wide
                self._right[layer] = x
                x += LANE * sum(key[0] == layer for key in self._exits)
            self.width = max(self.width, x + 14)

    def _place_down(self) -> None:
        y = 8.0
        self._tops = []
        for b, band in enumerate([*self.bands, []]):
            mine = [n for (corridor, _), n in self._lanes.items() if corridor == b]
            lanes = max(mine, default=-1) + 1
            self._tops.append(y + 8)
            y += 12 + LANE * lanes + (16 if 0 < b < len(self.bands) else 4)
            heights = {
                i: sum(self.boxes[n].height + 20 for n in self.columns[i]) - 20
                for i in band
            }
            tallest = max(heights.values(), default=0)
            for layer in band:
                top = y + (tallest - heights[layer]) / 2
                for n in self.columns[layer]:
                    self.boxes[n].y, top = top, top + self.boxes[n].height + 20
            y += tallest
        self.height = y

    def _set_ports(self) -> None:
        """Arrows into a box by where they come from: above, the column before from top
        to bottom, below."""

        def order(e: Edge) -> tuple:
            a, b = self.boxes[e.source], self.boxes[e.target]
            arrives = 0 if self._corridors(e)[1] == b.band else 2
            side = 1 if self._is_straight(e) else arrives
            return side, self.columns[a.layer].index(e.source), e.delayed, a.layer

        for n, box in enumerate(self.boxes):
            box.ports = sorted((e for e in self.edges if e.target == n), key=order)

    def _turns(self, e: Edge) -> tuple[float, float]:
        """Where an arrow turns after its source and before its target, from the
        left."""
        a, b, net = self.boxes[e.source].layer, self.boxes[e.target].layer, self._net(e)
        return (
            self._right[a] + 12 + LANE * self._exits[a, net],
            self._left[b] - 16 - self._badges.get(b, 0) - LANE * self._entries[b, net],
        )

    def _assign_lanes(self, routed: Sequence[Edge]) -> dict[tuple, int]:
        """The lane of every (corridor, net); nets side by side share one."""
        spans: dict[tuple, list[float]] = defaultdict(list)
        for e in routed:
            leave, arrive = self._corridors(e)
            out, into = self._turns(e)
            spans[leave, self._net(e)] += [out, into if leave == arrive else 0.0]
            spans[arrive, self._net(e)] += [into, out if leave == arrive else 0.0]
        ends = {key: (min(span), max(span)) for key, span in spans.items()}
        lanes: dict[tuple, int] = {}
        taken: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for key in sorted(ends, key=lambda k: (k[0], ends[k][1] - ends[k][0], k[1])):
            low, high = ends[key]
            lane = 0
            while any(low <= b and a <= high for a, b in taken[key[0], lane]):
                lane += 1
            taken[key[0], lane].append((low, high))
            lanes[key] = lane
        return lanes

    def _path(self, e: Edge) -> str:
        a, b = self.boxes[e.source], self.boxes[e.target]
        start, end = (a.x + a.width, a.exit(e)), (b.x - 1, b.entry(e))
        if self._is_straight(e):
            bend = max((end[0] - start[0]) * 0.5, 18)
            from_ = f'{_n(start[0])} {_n(start[1])}'
            to = f'{_n(end[0] - bend)} {_n(end[1])} {_n(end[0])} {_n(end[1])}'
            return f'M{from_}C{_n(start[0] + bend)} {_n(start[1])} {to}'
        net, (out, into) = self._net(e), self._turns(e)
        leave, arrive = self._corridors(e)
        level = lambda corridor: (
            self._tops[corridor] + LANE * self._lanes[corridor, net]
        )
        points = [start, (out, start[1]), (out, level(leave))]
        if leave != arrive:
            side = 8 + LANE * self._margins['margin', net]
            points += [(side, level(leave)), (side, level(arrive))]
        return _rounded([*points, (into, level(arrive)), (into, end[1]), end])

    # ------------------------------------------------------------ marks

    def svg(self, title: str, description: str) -> Markup:
        """The drawing."""
        width, height = _n(self.width), _n(self.height)
        heads = map(_arrow_head, ('now', 'last', 'cut', 'plain'))
        marked = [box for box in self.boxes if box.cuts]
        ways = sorted(self.edges, key=lambda e: (bool(e.cuts), e.differentiable))
        return tag(
            'svg',
            tag('title', title, id='drawing-title'),
            tag('desc', description, id='drawing-text'),
            tag('defs', *heads),
            *map(self._way, ways),
            *(self._box(n) for n in range(len(self.boxes))),
            *(self._edge_badge(e) for e in ways if e.cuts),
            *(_badge(box.x + box.width - 4, box.y, box.cuts) for box in marked),
            role='group',
            **{'aria-labelledby': 'drawing-title drawing-text'},
            width=width,
            height=height,
            viewBox=f'0 0 {width} {height}',
        )

    def _way(self, e: Edge) -> Markup:
        kind = kind_of(e)
        head = {'marker-end': f'url(#head-{kind})'}
        return tag(
            'path',
            tag('title', self._description(e)),
            d=self._path(e),
            class_=f'way {kind}',
            **head,
        )

    def _description(self, e: Edge) -> str:
        way = f'{self.boxes[e.source].title} → {self.boxes[e.target].title}'
        notes = ['value of the last step'] * e.delayed + ['no gradient passes'] * (
            not e.differentiable
        )
        notes += [f'cut {_ranges(e.cuts)}' + ' in part' * e.partly] * bool(e.cuts)
        return ', '.join([way, *notes])

    def _box(self, n: int) -> Markup:
        box = self.boxes[n]
        room = box.width - 2 * PAD
        title = shortened(box.title, int(room / CHARACTER['title']))
        children = [
            tag('rect', width=box.width, height=box.height, rx=7),
            tag('text', title, x=PAD, y=PAD + 13, class_='title'),
        ]
        for i, row in enumerate(box.rows):
            y, indent = PAD + TITLE + ROW * i + 11, 20 if row.chip else 0
            text = shortened(row.text, int((room - indent) / CHARACTER['row']))
            if row.chip:
                chip = (
                    tag('circle', cx=PAD + 7, cy=y - 4, r=7),
                    tag('text', row.chip[0].upper(), x=PAD + 7, y=y),
                )
                children.append(tag('g', *chip, class_=f'chip {style_of(row.chip)}'))
            said = tag('title', row.full or row.text)
            kind = 'row faint' if row.faint else 'row'
            children.append(tag('text', said, text, x=PAD + indent, y=y, class_=kind))
        where = f'translate({_n(box.x)} {_n(box.y)})'
        return tag(
            'g',
            tag('title', box.title),
            *children,
            class_=f'box {box.kind}',
            transform=where,
        )

    def _edge_badge(self, e: Edge) -> Markup:
        box = self.boxes[e.target]
        return _badge(box.x - 11, box.entry(e), e.cuts)


def _arrow_head(kind: str) -> Markup:
    """The end of an arrow of a kind."""
    return tag(
        'marker',
        tag('path', d='M0 0L8 4L0 8z', class_=f'head {kind}'),
        id=f'head-{kind}',
        viewBox='0 0 8 8',
        refX='7',
        refY='4',
        markerWidth='8',
        markerHeight='8',
        orient='auto',
        markerUnits='userSpaceOnUse',
    )


def _badge(right: float, y: float, cuts: Sequence[int]) -> Markup:
    """Numbers of cuts, as a link to the first."""
    text = _ranges(cuts)
    width = 12 + 7 * len(text)
    return tag(
        'a',
        tag('rect', x=_n(right - width), y=_n(y - 8), width=width, height=16, rx=8),
        tag('text', text, x=_n(right - width / 2), y=_n(y + 4)),
        href=f'#cut-{cuts[0]}', class_='badge', **{'aria-label': f'cut {text}'},
    )  # fmt: skip


def kind_of(e: Edge) -> str:
    """The kind of line that an arrow is drawn by."""
    if e.cuts and not e.partly:
        return 'cut'
    if not e.differentiable:
        return 'plain'
    return 'last' if e.delayed else 'now'


def _numbered(keys: Iterable[tuple]) -> dict[tuple, int]:
    """A number for every key, counted for each first part on its own."""
    found: dict[tuple, int] = {}
    for key in keys:
        found.setdefault(key, sum(k[0] == key[0] for k in found))
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in short: 1–3, 7; no more than two parts."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    ranges = [str(p[0]) if len(p) == 1 else f'{p[0]}–{p[-1]}' for p in parts]
    return ','.join(ranges[:2]) + ('…' if len(ranges) > 2 else '')


def _n(value: float) -> str:
    return f'{value:.1f}'.removesuffix('.0')


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """A way along points with round corners."""
    points = [p for i, p in enumerate(points) if i == 0 or p != points[i - 1]]
    found = [f'M{_n(points[0][0])} {_n(points[0][1])}']
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        a, b = (_towards(corner, end) for end in (before, after))
        found.append(
            f'L{_n(a[0])} {_n(a[1])}Q{_n(corner[0])} {_n(corner[1])} {_n(b[0])} '
            f'{_n(b[1])}'
        )
    return ''.join([*found, f'L{_n(points[-1][0])} {_n(points[-1][1])}'])


def _towards(
    corner: tuple[float, float], end: tuple[float, float]
) -> tuple[float, float]:
    dx, dy = end[0] - corner[0], end[1] - corner[1]
    length = max(abs(dx) + abs(dy), 1e-6)
    step = min(7, length / 2)
    return corner[0] + dx / length * step, corner[1] + dy / length * step
