"""The README's example runs as it stands."""

import re
from pathlib import Path


def test_example_runs(capsys):
    text = (Path(__file__).parent.parent / 'README.md').read_text()
    (code,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    exec(compile(code, 'README.md', 'exec'), {})
    printed = capsys.readouterr().out
    assert 'Wh.weight.weight' in printed
    assert 'D_RTRL against BPTT' in printed
