"""Write ``docs/rules.md``: what every rule costs, when it is exact, and how near its gradients come to BPTT's.

python experiments/rules.py           # all of it, measured again
python experiments/rules.py --table   # the table of rules only, in seconds
"""

import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace.learner import learner_class
from braintrace.rules import (
    PRESETS,
    Coupled,
    Factorised,
    PerParameter,
    RandomProjection,
    Rule,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'rules.md'
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


MEASURED = {'snap': {'n': 1}, 'ostlfeedforward': {'decay_or_rank': 0.9}}
"""Options other than the usual ones: SnAp's usual reach takes too long here, and the
usual decay of OSTLFeedforward leaves nothing to compare."""


def measured(name: str) -> Any:
    """A rule to compare: its name, or a learner with the options that are measured."""
    if name not in MEASURED:
        return name
    kind = learner_class(PRESETS[name])
    return kind(MODELS['GRU'](), **MEASURED[name])


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
                xs, ys, step_fn=step, rules=[measured(name) for name in names]
            ).checks:
                found.setdefault(check.rule, {}).setdefault(title, []).append(
                    check.cosine
                )
        print(title, flush=True)
    return found


def timed(name: str, units: int, steps: int) -> Callable[[], float]:
    """A function that takes the seconds of one gradient of an adaptive LIF net, traces carried."""
    net = models.AdaptiveLIF(nn, INPUTS, units)
    learner = braintrace.compile(
        net,
        name,
        jnp.ones((BATCH, INPUTS)),
        batch_size=BATCH,
        **MEASURED.get(name, {}),
    )
    xs, ys = jnp.ones((steps, BATCH, INPUTS)), jnp.ones((steps, BATCH, models.OUTPUTS))
    extra = {'modulator': 1.0} if name == 'threefactor' else {}
    step = lambda x, y: models.loss(learner(x, **extra), y)

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
        rule = preset.make(**MEASURED.get(name, {}))
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
    Coupled: 'influence on all states',
}


def described(rule: Rule) -> str:
    """The row of a rule."""
    label = rule.name.partition('(')[0]
    trace = TRACES.get(type(rule.trace), 'none')
    if 'sparse_n' in rule.trace.config:
        trace = 'influence within n steps'
    if rule.window is not None and rule.window.steps is not None:
        trace = f'windows of {rule.window.steps}'
    needs = ''
    if rule.is_modulated:
        needs = 'a modulator'
    elif rule.predictor is not None:
        needs = 'a predictor, trained at the same time'
    elif rule.signal.has_feedback_weights:
        needs = 'fixed random weights'
    memory, time = rule.cost
    name = f'[`{label}`](rules/{label.lower()}.md)'
    return f'| {name} | {trace} | {memory} | {time} | {rule.exact_when} | {needs} | {rule.use} |'


HEAD = [
    '| rule | trace | memory | time | exact when | needs | use it for |',
    '| --- | --- | --- | --- | --- | --- | --- |',
]


def table(text: str) -> list[str]:
    """The table of all rules: in the order of an older page, then those that are new."""
    rows = {
        row.split('`')[1]: row
        for name, preset in PRESETS.items()
        if name == preset.name
        for row in [described(preset.default)]
    }
    before = re.findall(r'^\| \[?`(\w+)`', text, re.MULTILINE)
    order = [name for name in before if name in rows]
    return [*HEAD, *(rows[name] for name in dict.fromkeys([*order, *rows]))]


def with_table(text: str) -> str:
    """A page with the table of the rules as they are now."""
    start = text.index(HEAD[0])
    end = text.index('\n\n', start)
    return text[:start] + '\n'.join(table(text)) + text[end:]


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
        'This page helps you to choose a learning rule. Start with `D_RTRL`.',
        '',
        '| situation | rule |',
        '| --- | --- |',
        '| the traces of `D_RTRL` are too large | `pp_prop` |',
        "| a leaky read-out | `D_RTRL` with `reach='readout'`, or `EProp`; with symmetric feedback both are the same |",
        "| several recurrent layers | `D_RTRL` with [`reach='deep'`](tutorials/reading-the-report.md#several-layers) |",
        '| credit between units over time matters, and the network is small | `SnAp` or `RTRL` |',
        '| a reward instead of a loss | `ThreeFactor` |',
        '',
        "`learner.gradient_check(..., rules=['d_rtrl', 'pp_prop'])` compares rules on your own model, and",
        "`.plot('rules.png')` draws the result. To set the options of a rule, put a learner into the list, for example",
        '`braintrace.SnAp(net, n=2)`. Each rule has a page with its formula, its options, a figure and its paper.',
        '',
        'Under every rule, read-outs and all other parameters without a trace get the whole one-step gradient.',
        '`learner.report` says which parameters of your model get a gradient equal to BPTT, and what the rule replaces',
        'for the others. In the table, B is the batch size, I the number of inputs, H of units, S of states of a unit,',
        'and T of steps.',
        '',
        *table(PAGE.read_text()),
    ]
    lines += [
        '',
        '## How near to BPTT',
        '',
        'The table has the cosine between the whole gradient of a rule and the gradient of BPTT: the mean [lowest,',
        f'highest] of {SEEDS} seeds. Networks have {UNITS} units, {STEPS} steps, and random weights, inputs',
        'and targets. The options are the defaults (SnAp: n = 1). A higher cosine does not always mean that a',
        'network learns better.',
        '',
        'In the step of a loss, SnAp, RTRL and UORO carry the credit of earlier steps along all paths, also from one',
        'unit to another. Rules with local traces carry it inside each position.',
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
        '## Measured cost',
        '',
        'The table shows how much longer a gradient of an adaptive LIF network takes if the number of units doubles',
        '(*found*), or if the number of steps doubles (*steps*). *Stated* is the ratio that the formula for time',
        'gives, where the units count among the inputs. The numbers are medians of ratios, with',
        f'{STEPS} steps, batch {BATCH} and one pass.',
        '',
        'Ratios above the stated one come from memory access: from 256 to 512 units, where more of the traces fit into',
        'the caches, D_RTRL grows by 3.1 and UORO by 3.2. A test checks that the size of traces grows as stated.',
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
        'A rule is a combination of parts. `ETraceConfig` makes new combinations. A combination without a meaning',
        'raises an error.',
        '',
        '```python',
        'import brainstate, braintrace, jax.numpy as jnp',
        '',
        "leaky = {'temporal_recursion': 'scalar_leak', 'decay': 0.9}",
        "config = braintrace.ETraceConfig(**leaky, trace_filter='kappa', kappa=0.8)",
        'net = brainstate.nn.Sequential(',
        '    brainstate.nn.GRUCell(3, 4), brainstate.nn.Linear(4, 1)',
        ')',
        'learner = braintrace.compile(net, config, jnp.ones((2, 3)), batch_size=2)',
        '```',
        '',
    ]
    return '\n'.join(lines)


if __name__ == '__main__':
    if '--table' in sys.argv:
        PAGE.write_text(with_table(PAGE.read_text()))
    else:
        PAGE.write_text(page(cosines(), growth()))
