"""The two e-prop tasks by NEST and by this library, beside each other: losses, and time for each step.

    python scripts/eprop_in_nest.py --nest PYTHON    PYTHON is an interpreter that can import nest
    PYTHON scripts/eprop_in_nest.py --simulate TASK  what the first starts: one task by NEST, as JSON
    python scripts/eprop_in_nest.py --ours TASK      one task by this library, as JSON

Weights, inputs and targets are those of ``tests/eprop_numpy.py``, which both read. NEST has one step of delay on the
way in, one to the read-out and one among outputs; generators start at step 1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'tests'))
sys.path.insert(0, str(ROOT / 'tests' / 'gradients'))

import numpy as np  # noqa: E402

import eprop_numpy as eprop  # noqa: E402

ITERATIONS = 5
TASKS = {'regression': eprop.REGRESSION, 'classification': eprop.CLASSIFICATION}
FIRST, LAG = 1, 4
"""The step at which generators start, and that at which outputs answer to them."""


# ---------------------------------------------------------------- NEST


def units(nest, task):
    """The recurrent population."""
    common = {
        'C_m': 1.0,
        'E_L': 0.0,
        'V_m': 0.0,
        'V_th': task.threshold,
        'tau_m': task.tau_v,
        't_ref': float(task.refractory),
        'c_reg': task.penalty,
        'f_target': 1000 * task.target_rate,
        'regular_spike_arrival': not task.gain_is_leak,
        'surrogate_gradient_function': 'piecewise_linear',
        'surrogate_gradient_height': 0.3 / task.threshold,
        'surrogate_gradient_width': task.threshold,
    }
    plain = nest.Create('eprop_iaf_bsshslm_2020', task.adaptive_from, common)
    adaptive = task.units - task.adaptive_from
    if not adaptive:
        return plain
    own = {'adapt_tau': task.tau_a, 'adapt_beta': float(task.beta[-1])}
    return plain + nest.Create(
        'eprop_iaf_adapt_bsshslm_2020', adaptive, {**common, **own}
    )


def optimizer(name):
    """The optimiser of a task, and whether gradients are divided by the window."""
    limits = {'batch_size': 1, 'Wmin': -100.0, 'Wmax': 100.0}
    if name == 'regression':
        return {'type': 'gradient_descent', 'eta': 1e-4, **limits}, False
    adam = {'beta_1': 0.9, 'beta_2': 0.999, 'epsilon': 1e-8}
    return {'type': 'adam', 'eta': 5e-3, **adam, **limits}, True


def simulate(name, threads=1):
    """Losses of all iterations and seconds for each step, of one task by NEST."""
    import nest

    task, start = TASKS[name], eprop.drawn(name)
    batches = [start.batch() for _ in range(ITERATIONS)]
    spikes = np.concatenate([xs[:, 0] for xs, _ in batches])
    steps = len(spikes)
    nest.ResetKernel()
    nest.verbosity = nest.VerbosityLevel.ERROR
    nest.set(
        resolution=1.0,
        eprop_update_interval=float(task.steps),
        eprop_learning_window=float(task.window),
        eprop_reset_neurons_on_update=True,
        total_num_virtual_procs=threads,
    )
    generators = nest.Create('spike_generator', task.inputs)
    relays = nest.Create('parrot_neuron', task.inputs)
    recurrent = units(nest, task)
    loss = 'mean_squared_error' if name == 'regression' else 'cross_entropy'
    outputs = nest.Create(
        'eprop_readout_bsshslm_2020',
        task.outputs,
        {
            'C_m': 1.0,
            'E_L': 0.0,
            'V_m': 0.0,
            'tau_m': task.tau_out,
            'loss': loss,
            'regular_spike_arrival': False,
        },
    )
    targets = nest.Create('step_rate_generator', task.outputs)
    meter = nest.Create(
        'multimeter',
        {
            'record_from': ['readout_signal', 'target_signal'],
            'interval': 1.0,
            'start': float(LAG),
            'stop': float(LAG + steps),
        },
    )

    method, averages = optimizer(name)
    model = 'eprop_synapse_bsshslm_2020'
    nest.SetDefaults(model, {'optimizer': method, 'average_gradient': averages})
    every = {'rule': 'all_to_all', 'allow_autapses': False}
    synapse = {'synapse_model': model, 'delay': 1.0, 'tau_m_readout': task.tau_out}
    static = {'synapse_model': 'static_synapse', 'delay': 1.0}
    rate = {'synapse_model': 'rate_connection_delayed', 'delay': 1.0}
    back = 'eprop_learning_signal_connection_bsshslm_2020'
    # NEST has weights as (to, from).
    learned = lambda w: {**synapse, 'weight': np.ascontiguousarray(w.T)}
    nest.Connect(generators, relays, 'one_to_one', static)
    nest.Connect(relays, recurrent, every, learned(start.w_in))
    nest.Connect(recurrent, recurrent, every, learned(start.w_rec))
    nest.Connect(recurrent, outputs, every, learned(start.w_out))
    feedback = {'synapse_model': back, 'delay': 1.0, 'weight': start.feedback}
    nest.Connect(outputs, recurrent, every, feedback)
    nest.Connect(targets, outputs, 'one_to_one', {**rate, 'receptor_type': 2})
    if name == 'classification':
        nest.Connect(
            outputs, outputs, every, {**rate, 'receptor_type': 1, 'weight': 1.0}
        )
    nest.Connect(meter, outputs, 'all_to_all', static)

    times = np.arange(steps) + float(FIRST)
    generators.set([{'spike_times': times[x > 0]} for x in spikes.T])
    if name == 'regression':
        wanted = np.concatenate([ys[:, 0] for _, ys in batches])
        changes = np.arange(steps) + float(LAG)
    else:
        wanted = np.concatenate([np.eye(task.outputs)[ys] for _, ys in batches])
        changes = np.arange(ITERATIONS) * float(task.steps) + LAG
    given = [{'amplitude_times': changes, 'amplitude_values': y} for y in wanted.T]
    targets.set(given)

    begin = time.perf_counter()
    nest.Simulate(float(LAG + steps + 1))
    seconds = time.perf_counter() - begin
    found = meter.get('events')
    by_output = lambda key: np.stack(
        [found[key][found['senders'] == i] for i in np.unique(found['senders'])]
    ).reshape(task.outputs, ITERATIONS, task.steps)[..., -task.window :]
    y, target = by_output('readout_signal'), by_output('target_signal')
    if name == 'regression':
        losses = 0.5 * np.sum((y - target) ** 2, axis=(0, 2))
    else:
        losses = -np.mean(np.sum(target * np.log(y), axis=0), axis=-1)
    return {
        'losses': losses.tolist(),
        'seconds': seconds / steps,
        'version': nest.__version__,
    }


# ---------------------------------------------------------------- ours


def ours(name, double):
    """The same by this library; the first iteration, which compiles, is not timed."""
    import brainstate
    import jax
    import jax.numpy as jnp

    from test_golden import Trained

    dtype, precision = (jnp.float64, 64) if double else (jnp.float32, 32)
    with (
        jax.enable_x64(double),
        brainstate.environ.context(precision=precision, dt=1.0),
    ):
        trained = Trained(name, dtype)
        losses = trained.by_etrace_grad()
        again = [trained.batch() for _ in range(10)]
        options = {'step_fn': trained.step, 'reduction': 'sum', 'has_aux': True}
        optimiser = trained.optimizer

        def iteration(batch):
            found, _ = trained.learner.etrace_grad(*batch, fresh=True, **options)
            trained.learner.apply(found, optimiser)
            jax.block_until_ready(
                [s.value for s in trained.learner.param_states.values()]
            )

        iteration(again[0])
        begin = time.perf_counter()
        for batch in again[1:]:
            iteration(batch)
        seconds = (time.perf_counter() - begin) / 9 / trained.task.steps
    return {'losses': losses, 'seconds': seconds}


def compared(python):
    """Print both tasks by all."""
    worst = 0.0
    for name in TASKS:
        command = [python, __file__, '--simulate', name]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        by = {
            'NEST': json.loads(done.stdout.splitlines()[-1]),
            'braintrace, double': ours(name, double=True),
            'braintrace, single': ours(name, double=False),
        }
        print(f'\n{name}: losses of the first {ITERATIONS} iterations')
        for label, found in by.items():
            losses = '  '.join(f'{x:.12g}'.ljust(14) for x in found['losses'])
            micro = f'{1e6 * found["seconds"]:.1f} µs a step'
            print(f'  {label:20} {losses}  {micro}')
        pair = (
            np.array(by['NEST']['losses']),
            np.array(by['braintrace, double']['losses']),
        )
        apart = float(np.max(np.abs(pair[1] / pair[0] - 1)))
        print(
            f'  largest relative difference of NEST and braintrace, double: {apart:.1e}'
        )
        worst = max(worst, apart)
    return worst


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--nest', metavar='PYTHON')
    parser.add_argument('--simulate', metavar='TASK', choices=TASKS)
    parser.add_argument('--ours', metavar='TASK', choices=TASKS)
    parser.add_argument('--cores', choices=('1', 'all'), default='1')
    options = parser.parse_args()
    cores = os.cpu_count() if options.cores == 'all' else 1
    if options.simulate:
        print('\n' + json.dumps(simulate(options.simulate, cores)))
    elif options.ours:
        os.sched_setaffinity(0, set(range(cores)))
        print('\n' + json.dumps(ours(options.ours, double=False)))
    elif compared(options.nest or sys.executable) > 1e-9:
        sys.exit('losses differ by more than 1e-9')


if __name__ == '__main__':
    main()
