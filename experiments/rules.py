"""Write ``docs/rules.md``: what every rule costs, when it is exact, and how near its gradients come to BPTT's.

python experiments/rules.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace.rules import PRESETS, Coupled, RandomProjection, Reach, Rule
from braintrace.solver import Factorised, PerParameter, RandomFeedback

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / 'benchmarks'))
import models  # noqa: E402

nn = brainstate.nn
INPUTS, UNITS, BATCH, STEPS, SEEDS = 8, 16, 4, 50, 5
MODELS = {
    'tanh RNN': lambda: models.Gated(nn, 'ValinaRNNCell', INPUTS, UNITS),
    'GRU': lambda: models.Gated(nn, 'GRUCell', INPUTS, UNITS),
    'LSTM': lambda: models.Gated(nn, 'LSTMCell', INPUTS, UNITS),
    'adaptive LIF': lambda: models.AdaptiveLIF(nn, INPUTS, UNITS),
    'LIF, synapses, 2 layers': lambda: models.SynapticStack(nn, INPUTS, UNITS, 2),
}


def cosines() -> dict[str, dict[str, list[float]]]:
    """Cosines of whole gradients by rule and model, over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    names = [
        n
        for n in PRESETS
        if n not in ('es_d_rtrl', 'ostlrecurrent', 'bptt', 'threefactor')
    ]
    for title, make in MODELS.items():
        learner = braintrace.compile(
            make(), 'd_rtrl', jnp.ones((BATCH, INPUTS)), batch_size=BATCH
        )
        step = lambda x, y, learner=learner: models.loss(learner(x), y)
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            brainstate.random.seed(seed)
            for path, state in make().states(brainstate.ParamState).items():
                learner.param_states[path].value = state.value
            xs = jnp.asarray(rng.normal(size=(STEPS, BATCH, INPUTS)) + 0.5, jnp.float32)
            ys = jnp.asarray(
                rng.normal(size=(STEPS, BATCH, models.OUTPUTS)), jnp.float32
            )
            for check in learner.gradient_check(
                xs, ys, step_fn=step, rules=names
            ).checks:
                found.setdefault(check.rule, {}).setdefault(title, []).append(
                    check.cosine
                )
        print(title, flush=True)
    return found


def timed(name: str, units: int, steps: int) -> Callable[[], float]:
    """A function that takes the seconds of one gradient of an adaptive LIF net, traces carried."""
    net = models.AdaptiveLIF(nn, INPUTS, units)
    learner = braintrace.compile(net, name, jnp.ones((BATCH, INPUTS)), batch_size=BATCH)
    xs, ys = jnp.ones((steps, BATCH, INPUTS)), jnp.ones((steps, BATCH, models.OUTPUTS))
    taught = {'modulator': 1.0} if name == 'threefactor' else {}
    step = lambda x, y: models.loss(learner(x, **taught), y)

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(learner.etrace_grad(xs, ys, step_fn=step))
        return time.perf_counter() - start

    seconds()
    return seconds


def growth() -> dict[str, tuple[int, float, float, float]]:
    """By rule: units, how much longer it should take if they double, how much it does, and if steps double."""
    found = {}
    for name, preset in PRESETS.items():
        if name in preset.aliases:
            continue
        rule = preset.default
        units = 24 if '³' in rule.cost[1] else 512
        runs = [
            timed(name, *size)
            for size in ((units, STEPS), (2 * units, STEPS), (units, 2 * STEPS))
        ]
        rounds = [[run() for run in runs] for _ in range(7)]
        wide, long = (statistics.median(r[i] / r[0] for r in rounds) for i in (1, 2))
        grown = [
            stated(rule.cost[1], B=BATCH, I=INPUTS + h, H=h, T=STEPS)
            for h in (units, 2 * units)
        ]
        found[rule.name] = units, grown[1] / grown[0], wide, long
        print(rule.name, *found[rule.name], flush=True)
    return found


def stated(formula: str, **sizes: int) -> float:
    """The value of a cost such as ``T·B·H³·I``."""
    return eval(
        formula.replace('·', '*').replace('³', '**3').replace('²', '**2'), sizes
    )


TRACES: dict[type, str] = {
    PerParameter: 'one for each parameter',
    Factorised: 'two factors',
    RandomProjection: 'rank one',
    Coupled: 'all on all',
    Reach: 'what is reached',
}


def described(rule: Rule) -> str:
    """The row of a rule."""
    label = rule.name.partition('(')[0]
    trace = TRACES.get(type(rule.trace), 'none')
    if rule.window is not None and rule.window.steps is not None:
        trace = f'windows of {rule.window.steps}'
    needs = ''
    if rule.is_modulated:
        needs = 'a modulator'
    elif rule.predictor is not None:
        needs = 'a predictor that learns along'
    elif isinstance(rule.signal, RandomFeedback):
        needs = 'fixed random weights'
    memory, time = rule.cost
    return f'| `{label}` | {trace} | {memory} | {time} | {rule.exact_when} | {needs} | {rule.use} |'


def page(
    found: dict[str, dict[str, list[float]]],
    grown: dict[str, tuple[int, float, float, float]],
) -> str:
    """The page, in Markdown."""
    lines = [
        '# Choose a rule',
        '',
        '<!-- made by `make rules`; the words are those of `braintrace.rules` -->',
        '',
        'Start with `D_RTRL`. If its traces are too large, take `pp_prop`; if units must talk to each other over time',
        'and the net is small, `SnAp` or `RTRL`; if there is no loss but a reward, `ThreeFactor`.',
        "`learner.gradient_check(..., rules=['d_rtrl', 'pp_prop'])` compares them on your own model, and",
        "`.plot('rules.png')` draws it; `braintrace.SnAp(net, n=2)` in the list is a rule with its options.",
        '',
        'B batch, I inputs, H units, S states of a unit, T steps. Whatever the rule, read-outs and every other',
        'parameter without a trace get the whole one-step gradient. `learner.report` says which parameters of your',
        "model get a gradient equal to BPTT's under the rule, and what replaces part of it for the others.",
        '',
        '| rule | trace | memory | time | exact when | needs | use it for |',
        '| --- | --- | --- | --- | --- | --- | --- |',
    ]
    lines += [
        described(preset.default)
        for name, preset in PRESETS.items()
        if name == preset.name
    ]
    lines += [
        '',
        '## How near to BPTT',
        '',
        f'Cosine of the whole gradient, mean [least, most] of {SEEDS} seeds: {UNITS} units, {STEPS} steps, random',
        'weights, inputs and targets, the default options; a cosine does not order how well nets learn.',
        "SnAp, RTRL and UORO are read through the whole of a loss's own step, local traces through its own units.",
        '',
        f'| rule | {" | ".join(MODELS)} |',
        f'| --- | {" | ".join("---" for _ in MODELS)} |',
    ]
    text = lambda v: f'{np.mean(v):.2f} [{min(v):.2f}, {max(v):.2f}]'
    lines += [
        f'| {rule} | {" | ".join(text(row[title]) for title in MODELS)} |'
        for rule, row in found.items()
    ]
    lines += [
        '',
        '## What it costs, measured',
        '',
        f'How much longer a gradient of an adaptive LIF net takes ({STEPS} steps, batch {BATCH}, one pass;',
        'medians of ratios) if its units double, beside the ratio of the formula above with the units among the',
        'inputs; and if its steps double. That traces grow as stated is a test. More than stated is memory: from',
        '256 to 512 units, whose traces are nearer to the caches, D_RTRL grows by 3.1 and UORO by 3.2.',
        '',
        '| rule | units | stated | found | steps |',
        '| --- | --- | --- | --- | --- |',
        *(
            f'| {name} | {h} to {2 * h} | {a:.1f} | {b:.1f} | {c:.1f} |'
            for name, (h, a, b, c) in grown.items()
        ),
        '',
        '## Parts',
        '',
        'A rule is a combination, and `ETraceConfig` makes new ones; combinations without a meaning are refused.',
        '',
        '```python',
        'import brainstate, braintrace, jax.numpy as jnp',
        '',
        "leaky = {'temporal_recursion': 'scalar_leak', 'decay': 0.9}",
        "config = braintrace.ETraceConfig(**leaky, trace_filter='kappa', kappa=0.8)",
        'learner = braintrace.compile(brainstate.nn.GRUCell(3, 4), config, jnp.ones((2, 3)), batch_size=2)',
        '```',
        '',
    ]
    return '\n'.join(lines)


if __name__ == '__main__':
    (ROOT / 'docs').mkdir(exist_ok=True)
    (ROOT / 'docs' / 'rules.md').write_text(page(cosines(), growth()))
