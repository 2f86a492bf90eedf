"""Chromium as Qt has it, with the options of Chromium's own command that browser.py uses.

Runs in an environment with PyQt6-WebEngine:

    python web_engine.py --window-size=1500,900 [--dump-dom] [--screenshot=FILE] [--dark] URL
"""

import argparse
import os
import sys

os.environ.setdefault('QT_QPA_PLATFORM', 'offscreen')
SCHEME = f'preferredColorScheme={0 if "--dark" in sys.argv else 1}'
FLAGS = f'--no-sandbox --disable-gpu --blink-settings={SCHEME}'
# Read when the engine is imported.
os.environ['QTWEBENGINE_CHROMIUM_FLAGS'] = FLAGS

from PyQt6.QtCore import QTimer, QUrl  # noqa: E402
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

SETTLED = 1500
"""Milliseconds after which a loaded page is taken to be drawn."""
LONGEST = 60_000
"""Milliseconds after which a page is given up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--window-size', default='1500,900')
    parser.add_argument('--dump-dom', action='store_true')
    parser.add_argument('--screenshot')
    parser.add_argument('--dark', action='store_true')
    parser.add_argument('url')
    options = parser.parse_args()
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(*map(int, options.window_size.split(',')))

    def drawn() -> None:
        if options.screenshot:
            view.grab().save(options.screenshot)
        if options.dump_dom:
            view.page().toHtml(lambda text: (print(text), app.quit()))
        else:
            app.quit()

    view.loadFinished.connect(lambda _: QTimer.singleShot(SETTLED, drawn))
    QTimer.singleShot(LONGEST, lambda: app.exit(1))
    view.load(QUrl(options.url))
    view.show()
    return app.exec()


if __name__ == '__main__':
    sys.exit(main())
