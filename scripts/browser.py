"""Open the pages of reports in a headless Chromium: light and dark, narrow and wide, and look for what is wrong.

Every page gets a script (browser.js) that checks sizes, texts in their boxes, contrast, sorting and the keyboard.
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'tests'))

import pages  # noqa: E402

SIZES = {'narrow': 360, 'wide': 1400}
ENGINE = ROOT / '.venv-browser' / 'bin' / 'python'
"""The environment that `make browser` builds, with the Chromium of Qt."""


def run(*options: str, dark: bool = False) -> str:
    """What Chromium prints: that of the variable CHROME, else that of Qt."""
    chrome = os.environ.get('CHROME')
    if chrome is None:
        scheme = ['--dark'] * dark
        command = [str(ENGINE), str(ROOT / 'scripts' / 'web_engine.py'), *scheme]
        return _printed([*command, *options])
    with tempfile.TemporaryDirectory() as profile:
        given = [
            '--headless',
            '--no-sandbox',
            '--disable-gpu',
            '--hide-scrollbars',
            f'--user-data-dir={profile}',
            f'--blink-settings=preferredColorScheme={0 if dark else 1}',
        ]
        return _printed([chrome, *given, *options])


def _printed(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def look(text: str, file: Path, width: int, dark: bool) -> list[str]:
    """What is wrong with a page in a frame of this width; a window cannot be so narrow."""
    expected = f'const EXPECTED = {json.dumps({"width": width, "dark": dark})};'
    errors = 'window.pageErrors = []; addEventListener("error", (e) => pageErrors.push(e.message));'
    text = text.replace('<head>', f'<head><script>{errors}</script>', 1)
    script = (ROOT / 'scripts' / 'browser.js').read_text(encoding='utf-8')
    inner = html.escape(
        text.replace('</body>', f'<script>{expected}{script}</script></body>')
    )
    frame = f'<iframe srcdoc="{inner}" style="border:0;width:{width}px;height:900px"></iframe>'
    style = '<style>:root { color-scheme: light dark; } body { margin: 0; }</style>'
    file.write_text(
        f'<!doctype html><meta charset="utf-8">{style}{frame}', encoding='utf-8'
    )
    dom = run('--dump-dom', '--window-size=1500,900', file.as_uri(), dark=dark)
    found = re.search(r'<pre id="findings">(.*?)</pre>', dom, re.DOTALL)
    if found is None:
        return ['the checks did not run to their end']
    findings = json.loads(html.unescape(found.group(1)))
    return (
        findings['bad']
        + ['nothing was drawn'] * (not findings['boxes'])
        + ['no rows'] * (not findings['rows'])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--picture', type=Path, help='also write a picture of a page, for the docs'
    )
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, text in pages.pages():
            for size, width in SIZES.items():
                for dark in (False, True):
                    bad = look(text, Path(folder) / f'{name}.html', width, dark)
                    failed += bool(bad)
                    print(
                        f'{name:12} {size:7} {"dark" if dark else "light":6} {"fine" if not bad else "WRONG"}'
                    )
                    print(
                        ''.join(f'    {line}\n' for line in dict.fromkeys(bad)), end=''
                    )
        if arguments.picture:
            file = Path(folder) / 'picture.html'
            file.write_text(pages.example(), encoding='utf-8')
            run(
                f'--screenshot={arguments.picture.resolve()}',
                '--window-size=1320,1260',
                file.as_uri(),
            )
    return min(failed, 1)


if __name__ == '__main__':
    sys.exit(main())
