"""Output that a page shows, compared with what its code prints.

A page shows output in a ``text`` block right after a Python block, or in a comment
``# prints ...`` at the end of a line. ``...`` stands for any text, on a line of its own
for any lines. A number with a decimal point may differ by rounding: by one unit of its
last digit.
"""

import re

SHOWN = re.compile(r'```python\n(.*?)```(?:\s*```text\n(.*?)```)?', re.DOTALL)
NUMBER = re.compile(r'[-+]?\d+\.\d+(?:e[-+]?\d+)?')


def expected_outputs(text):
    """For every Python block of a page what it shows as its output; None if nothing."""
    found = []
    for code, output in SHOWN.findall(text):
        comments = re.findall(r'# prints (.*)$', code, re.MULTILINE)
        assert not (output and comments), 'shown twice'
        # Lines between those that have a comment may print, too.
        lines = ['...', *(part for c in comments for part in (c, '...'))]
        found.append(output or ('\n'.join(lines) if comments else None))
    return found


def matches(expected, printed):
    """Whether a printed text is the one that a page shows."""
    numbers = []
    pattern = ''.join(_pattern(line, numbers) for line in expected.strip().splitlines())
    lines = ''.join(f'{line.rstrip()}\n' for line in printed.strip().splitlines())
    match = re.fullmatch(pattern, lines)
    if match is None:
        return False
    found = match.groups()
    return all(is_near(a, b) for a, b in zip(numbers, found, strict=True))


def _pattern(line, numbers):
    """The pattern of a line and its line break; each number is a group."""
    if line.strip() == '...':
        return r'(?:.*\n)*?'
    parts, end = [], 0
    for number in NUMBER.finditer(line):
        parts += [_literal(line[end : number.start()]), f'({NUMBER.pattern})']
        numbers.append(number[0])
        end = number.end()
    return ''.join([*parts, _literal(line[end:].rstrip())]) + r'\n'


def _literal(text):
    return re.escape(text).replace(r'\.\.\.', '.*?')


def is_near(shown, found):
    """Whether two numbers differ by no more than a unit of the last digit shown."""
    digits, _, exponent = shown.partition('e')
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition('.')[2]))
    return abs(float(shown) - float(found)) <= 1.001 * unit
