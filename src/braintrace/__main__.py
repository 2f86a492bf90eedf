"""``python -m braintrace`` is the ``braintrace`` command."""

import sys

from .cli import main

sys.exit(main())
