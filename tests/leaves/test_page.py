"""The page of a report: whole, safe, the same every time, and true to the model."""

import html
import io
import os
import pathlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

import braintrace as bt
import pages
from braintrace.report.boxes import shortened, width_of
from braintrace.report.drawing import Drawing

VOID = {'meta', 'br'}


@pytest.fixture(scope='module')
def reports():
    return {name: make() for name, make in pages.MADE.items()}


@pytest.fixture(scope='module')
def texts(reports):
    return {
        name: r.to_html(memory=pages.plan(r) if r.rule else None)
        for name, r in reports.items()
    }


class Reader(HTMLParser):
    """Elements as (tag, attributes, text), and whether every one is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ''])
        assert len(attributes) == len(dict(attributes))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, kind=None):
        return [
            e
            for e in self.elements
            if e[0] == tag and (kind is None or kind in e[1].get('class', '').split())
        ]


def body(text):
    """The page without its style and script."""
    return re.sub(r'<(style|script)>.*?</\1>', '', text, flags=re.DOTALL)


@pytest.mark.parametrize('name', pages.MADE)
def test_page(name, reports, texts):
    report, text = reports[name], texts[name]
    page = Reader(text)
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert [e[2] for e in page.all('h1')] == [report.model]
    assert report.model in page.all('title')[0][2]
    assert [e[0] for e in page.elements if re.fullmatch('h[1-6]', e[0])][:3] == [
        'h1',
        'h2',
        'h2',
    ]
    ids = [e[1]['id'] for e in page.elements if 'id' in e[1]]
    assert len(ids) == len(set(ids))

    assert not re.search(r'https?:|src=|@import|url\((?!#)|<link', text)
    assert len(page.all('script')) == 1
    drawing = ET.fromstring(re.search(r'<svg.*?</svg>', text, re.DOTALL).group())
    assert drawing.tag == 'svg'

    rows = {e[2] for e in page.all('th') if e[1].get('scope') == 'row'}
    titles = [e[2] for e in page.all('title')]
    for record in report.credits:
        assert record.context['name'] in rows
        if record.context['reason'] != 'the step never reads it':
            assert record.context['name'] in titles
    for group in report.hidden_groups:
        assert f'group {group.index}' in titles
        assert all('.'.join(map(str, path)) in titles for path in group.hidden_paths)

    cuts = [r for r in report.diagnostics if r.kind == 'cut']
    numbers = {
        i for part in (*report.chart.edges, *report.chart.nodes) for i in part.cuts
    }
    assert numbers == set(range(1, len(cuts) + 1))
    assert {f'cut-{i}' for i in numbers} == {i for i in ids if i.startswith('cut-')}
    assert {e[1]['href'] for e in page.all('a')} <= {f'#{i}' for i in ids}
    told = page.all('article')
    for cut in cuts:
        ends, _, reason = cut.message.partition(' cut at ')
        assert any(ends in e[2] and reason.rpartition('): ')[2] in e[2] for e in told)


def test_the_same_every_time(texts):
    for name in ('gru', 'strange'):
        report = pages.MADE[name]()
        assert (
            report.to_html(memory=pages.plan(report) if report.rule else None)
            == texts[name]
        )


def test_names_are_only_text(texts):
    text = body(texts['strange'])
    assert '<script' not in text
    assert '<b>' not in text
    assert '<i>' not in text
    shown = html.unescape(re.sub(r'<[^>]*>', '', text))
    for name in (
        pages.SCRIPT,
        pages.BOLD,
        pages.LONG,
        '重み',
        '<i>Strange</i>',
        '# <b> & "a comment"',
    ):
        assert name in shown


def test_sources_are_shown_around_the_line(reports, texts):
    lines = pathlib.Path(pages.__file__).read_text(encoding='utf-8').splitlines()
    page = Reader(texts['strange'])
    heads = [e[2] for e in page.all('h3')]
    sources = {
        r.context['source']
        for r in reports['strange'].diagnostics
        if r.context and 'source' in r.context
    }
    assert {os.path.relpath(source) for source in sources} <= set(heads)
    assert all(source.startswith(pages.__file__) for source in sources)
    for source in sources:
        article = page.all('article')[heads.index(os.path.relpath(source))]
        n = int(source.rpartition(':')[2])
        width = len(str(n + 2))
        excerpt = ''.join(f'{i:{width}} {lines[i - 1]}\n' for i in range(n - 2, n + 3))
        assert excerpt in article[2]
        assert f'{n:{width}} {lines[n - 1]}\n' in [e[2] for e in page.all('mark')]


def test_chart_of_a_gru(reports):
    chart = reports['gru'].chart
    names = {
        n: node.parameters[0].split('.')[-3] if node.parameters else node.kind
        for n, node in enumerate(chart.nodes)
    }
    ways = {(names[e.source], names[e.target], e.delayed): e.cuts for e in chart.edges}
    assert ways == {
        ('input', 'Wrz', False): (),
        ('group', 'Wrz', True): (1,),
        ('input', 'Wh', False): (),
        ('Wrz', 'Wh', False): (2,),
        ('group', 'Wh', True): (1,),
        ('Wrz', 'group', False): (),
        ('Wh', 'group', False): (),
        ('group', 'group', True): (),
        ('group', 'readout', False): (),
        ('readout', 'output', False): (),
    }
    assert [n.title for n in chart.operations_of('cell.Wh.weight.bias')] == [
        'matmul + add'
    ]


def test_chart_of_strange_ways(reports):
    chart = reports['strange'].chart
    kinds = {
        (chart.nodes[e.source].kind, chart.nodes[e.target].kind): e for e in chart.edges
    }
    assert kinds['group', 'state'].delayed
    moved = next(e for e in chart.edges if e.target == e.source and e.cuts)
    assert chart.nodes[moved.source].names == (pages.BOLD,)
    assert [
        e.differentiable
        for e in chart.edges
        if chart.nodes[e.target].title == 'output 2'
    ] == [False]


def test_cuts_in_part_and_inside(reports):
    chart = reports['loop'].chart
    first, second, scan = [
        n for n, node in enumerate(chart.nodes) if node.kind == 'operation'
    ]
    ways = {(e.source, e.target): (e.cuts, e.partly) for e in chart.edges if e.cuts}
    assert ways == {
        (first, second): ((1,), False),
        (second, scan): ((3,), True),
        (scan + 1, scan): ((2,), True),
    }
    assert [node.cuts for node in chart.nodes if node.cuts] == [(4,)]
    assert not any(e.partly for e in reports['gru'].chart.edges)


def test_traces_and_memory(reports, texts):
    text = body(texts['gru'])
    size = sum(4 * 2 * 4 * i for i in (3, 4)) + 4 * 2 * 4
    assert f'trace {size} B' in text
    assert 'BPTT' in text
    assert '4.8 MiB' in text
    assert 'width:100.0%' in text
    assert 'Memory' not in [e[2] for e in Reader(texts['stack']).all('h2')]
    assert 'trace of the whole net' in texts['rtrl']
    assert 'can carry a trace' in texts['stack']


def test_files_and_notebooks(tmp_path, reports, texts):
    learner = pages.learner(
        pages.Net(pages.brainstate.nn.GRUCell(3, 4, w_init=pages.ZERO)), pages.X
    )
    learner.write_report(tmp_path / 'page.html')
    plain = learner.report.to_html()
    assert (tmp_path / 'page.html').read_text(encoding='utf-8') == plain
    file = io.StringIO()
    assert learner.report.to_html(file) == file.getvalue() == plain
    for shown in (learner, learner.report, learner.graph):
        (frame,) = Reader(shown._repr_html_()).all('iframe')
        assert frame[1]['srcdoc'].startswith('<!doctype html>')
    assert learner._repr_html_().count('<') == 2
    assert (
        bt.D_RTRL(
            pages.Net(pages.brainstate.nn.GRUCell(3, 4, w_init=pages.ZERO))
        )._repr_html_()
        is None
    )


def test_function_info():
    info = pages.plain().module_info
    assert info.dict()['num_var_out'] == 1
    assert info.name == 'function'


def test_shortened():
    assert shortened('layers.0.weight', 15) == 'layers.0.weight'
    assert shortened('layers.0.weight', 9) == '…0.weight'
    assert width_of(shortened('重み重み重み', 7)) <= 7


@pytest.mark.parametrize('name', ['deep', 'skips'])
def test_boxes_stay_apart(name, reports, monkeypatch):
    drawn = []
    make = Drawing.__init__
    monkeypatch.setattr(
        Drawing, '__init__', lambda self, *a: (make(self, *a), drawn.append(self))[0]
    )
    reports[name].to_html()
    (drawing,) = drawn
    assert len(drawing.bands) > 1
    for i, a in enumerate(drawing.boxes):
        assert a.x >= 0
        assert a.x + a.width <= drawing.width <= 1244
        assert a.y + a.height <= drawing.height
        for b in drawing.boxes[:i]:
            assert (
                a.x + a.width < b.x
                or b.x + b.width < a.x
                or a.y + a.height < b.y
                or b.y + b.height < a.y
            )
