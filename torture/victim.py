"""A training in a process of its own, to be killed: ``python -m torture.victim DIR N``.

It says when it begins, and goes on with what the folder holds.
"""

import sys
from pathlib import Path

from .training import Training


def main() -> None:
    """Train to the end."""
    out, updates = Path(sys.argv[1]), int(sys.argv[2])
    training = Training()
    # Compiled before it begins, so that kills hit the training.
    training.fit(None, updates=1)
    begun = any((out / name).exists() for name in ('checkpoints', 'metrics.jsonl'))
    print('begins', flush=True)
    training.fit(out, resume=begun, updates=updates)
    print('ended', flush=True)


if __name__ == '__main__':
    main()
