"""Faults on purpose: what a training, a checkpoint and a learner make of them.

Each file is a part: ``TITLE``, ``CASES`` (how many a whole run has) and ``case(seed,
number)``, which returns what happened in a few words, or raises. ``python -m torture``
runs them, stores how far it has come, and shows what to run again.
"""
