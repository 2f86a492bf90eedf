"""The example of the README runs and prints what is shown, its table is measured, and
the citation is that of this version."""

import json
import re
import sys
from pathlib import Path

import braintrace
from shown_output import expected_outputs, matches

ROOT = Path(__file__).parents[2]


def test_example_runs(capsys):
    text = (ROOT / 'README.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    exec(compile(code, 'README.md', 'exec'), {})
    printed = capsys.readouterr().out
    (expected,) = expected_outputs(text)
    assert matches(expected, printed), printed


def test_measured_tables_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(ROOT / 'benchmarks'), *sys.path])
    import report

    results = json.loads((ROOT / 'benchmarks' / 'results.json').read_text())
    made = report.tables(results['workloads'])
    for page, text in made.items():
        assert page.read_text() == text, 'python benchmarks/report.py'
        assert text.count(report.markdown([]).splitlines()[0]) == 1
    short = report.markdown(report.short(report.rows(results['workloads'])))
    assert short in (ROOT / 'README.md').read_text()
    assert 3 <= len(short.splitlines()) - 2 <= 8


def test_the_table_of_streams_is_that_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(ROOT / 'benchmarks'), *sys.path])
    import streams_table

    assert streams_table.PAGE.read_text() == streams_table.page()
    assert len(json.loads(streams_table.RESULTS.read_text())) > 10


def test_links_lead_to_files():
    text = (ROOT / 'README.md').read_text()
    targets = [t.partition('#')[0] for t in re.findall(r'\]\(([^)\s]+)\)', text)]
    missing = [t for t in targets if not (ROOT / t).exists()]
    assert len(targets) > 10
    assert not missing


def test_citation_has_the_version_of_the_package():
    text = (ROOT / 'CITATION.cff').read_text()
    (version,) = re.findall(r'^version: (\S+)$', text, re.MULTILINE)
    assert version == braintrace.__version__
