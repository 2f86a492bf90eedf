"""Spiking units with adaptive thresholds count cues and answer after a pause, trained by ``braintrace.fit``.

A shorter form of the task of Bellec et al. (2020). The slow threshold of a unit keeps what the membrane potential
loses, and so does the eligibility trace on it. Pictures go to ``out``, if you name a folder. Run it with

    python examples/evidence.py out/evidence_example

The task at its full length: ``braintrace train evidence``.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import optax

import braintrace
from braintrace import plots


def main(
    updates: int = 150,
    units: int = 60,
    batch: int = 32,
    out: str | None = None,
    **timing: int,
) -> tuple:
    """Accuracy before and after."""
    timing = timing or {'cues': 5, 'cue': 20, 'every': 30, 'delay': 150, 'recall': 30}
    task = braintrace.tasks.EvidenceAccumulation(rate=0.2, **timing)
    net = braintrace.networks.ALIF(task.inputs, task.outputs, units, tau_a=400.0)
    learner = braintrace.compile(
        net, 'd_rtrl', jnp.zeros((batch, task.inputs)), batch_size=batch
    )
    learner.report.show()
    supervised = braintrace.Supervised(
        learner, task, batch, penalty=lambda: net.rate.penalty(0.02)
    )
    history = braintrace.fit(
        learner,
        **supervised.parts(),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3)),
        updates=updates,
    )
    before, after = history['accuracy'][:5].mean(), history['accuracy'][-5:].mean()
    print(
        f'{task.steps} steps, {task.cues} cues: accuracy {before:.2f} before, {after:.2f} after'
    )
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        plots.learning_curves({'d_rtrl': [history]}, Path(out) / 'learning.png')
        plots.activity(
            learner, supervised.batches(updates), task.kind, Path(out) / 'activity.png'
        )
    return before, after


if __name__ == '__main__':
    main(out=sys.argv[1] if len(sys.argv) > 1 else None)
