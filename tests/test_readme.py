"""What is written in the README and in the docs runs as it stands."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_example_runs(capsys):
    text = (ROOT / 'README.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    exec(compile(code, 'README.md', 'exec'), {})
    printed = capsys.readouterr().out
    assert 'Wh.weight.weight' in printed
    assert 'D_RTRL against BPTT' in printed


@pytest.mark.parametrize(
    'page', sorted((ROOT / 'docs').glob('*.md')), ids=lambda p: p.stem
)
def test_docs_run(page):
    names: dict = {}
    for code in re.findall(r'```python\n(.*?)```', page.read_text(), re.DOTALL):
        exec(compile(code, page.name, 'exec'), names)


def test_measured_table_is_that_of_the_benchmark(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(ROOT / 'benchmarks'), *sys.path])
    import report

    (shown,) = re.findall(
        r'results.json -->\n(.*?)\n<!-- end',
        (ROOT / 'README.md').read_text(),
        re.DOTALL,
    )
    measured = json.loads((ROOT / 'benchmarks' / 'results.json').read_text())[
        'workloads'
    ]
    assert shown == report.markdown(report.rows(measured))
