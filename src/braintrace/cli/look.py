"""Commands that look at a user's model: explain, check, bench."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import inspect
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import brainunit as u
import jax
import jax.numpy as jnp
import numpy as np

from .. import compile as compile_model
from .._brainstate import brainstate
from ..errors import printable, three_parts
from ..files import write_whole
from ..frontends.failures import unset_environment
from ..learner import Learner
from ..rules.exactness import EQUAL
from ..source_lines import failing_line

Result = tuple[Any, str, int]
"""For machines, for people, and the exit code."""


def say(text: str) -> None:
    """Print progress, apart from the result; of several processes the first does."""
    if jax.process_index() == 0:
        print(printable(text), file=sys.stderr, flush=True)


def attempted(name: str, make: Callable[[], Any]) -> tuple[Any, str]:
    """What a function gives, and why it failed, which is also said in one line.

    For pictures and pages, none of which is a reason to lose a result.
    """
    try:
        return make(), ''
    except Exception as error:
        reason = ' '.join(str(error).split()) or 'no reason given'
        reason = f'{type(error).__name__}: {reason[:300]}'
        say(f'{name} was not made: {reason}')
        return None, reason


@contextmanager
def time_step(text: str | None) -> Iterator[None]:
    """Around a command: brainstate's ``dt``, a number or one with a unit of time."""
    if text is None:
        yield
        return
    found = re.fullmatch(r'\s*([0-9.]+(?:e-?[0-9]+)?)\s*([a-z]*)\s*', text)
    units: Any = u
    unit = {'': 1.0, 's': units.second, 'ms': units.ms, 'us': units.us}
    try:
        number = float(found[1]) if found is not None else 0.0
    except ValueError:
        number = 0.0
    if found is None or found[2] not in unit or not 0 < number < math.inf:
        raise ValueError(
            three_parts(
                f'--dt {text}',
                'it is the time from one step to the next, a number above 0',
                '--dt 1.0 for a model without units, --dt 0.1ms for one with units',
            )
        )
    with brainstate.environ.context(dt=number * unit[found[2]]):
        yield


def load(text: str, *more: Any) -> Any:
    """What ``module:name``, ``file.py:name`` or ``module:name(literals)`` is, if a
    model, or else gives when called.

    ``more``: arguments before the literals.
    """
    where, colon, call = text.rpartition(':')
    if not colon:
        raise ValueError(
            three_parts(
                f'a model {text!r}',
                'it names no function',
                'module:name or file.py:name',
            )
        )
    try:
        node: Any = ast.parse(call, mode='eval').body
        node = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        arguments = [ast.literal_eval(a) for a in node.args]
        keywords = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
        name = ast.unparse(node.func)
    except (SyntaxError, ValueError, TypeError) as error:
        why = 'it cannot be read: a name, and literals in brackets'
        raise ValueError(
            three_parts(f'a model {text!r}', why, "e.g. 'brainstate.nn:GRUCell(3, 16)'")
        ) from error
    found = _module(where)
    for part in name.split('.'):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            own = [name for name in dir(found) if _is_from(found, name)]
            fix = ' or '.join(near or own[:8]) or f'a function of {where}'
            raise ValueError(
                three_parts(f'a model {text!r}', f'{where} has no {part!r}', fix)
            )
        found = getattr(found, part)
    if isinstance(found, brainstate.nn.Module) and not more:
        return found
    try:
        _signature(found).bind(*more, *arguments, **keywords)
    except TypeError as error:
        needed = [
            f'{p.name}=...'
            for p in _signature(found).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        wanted = (
            'a function of the numbers of inputs and outputs'
            if more
            else 'a function without arguments'
        )
        given = ', '.join(needed[len(more) :]) or 'units=16'
        raise ValueError(
            three_parts(
                f'a model {text!r}',
                f'{name}: {error}',
                f"{wanted}, or '{where}:{name}({given})' with their values",
            )
        ) from error
    try:
        return found(*more, *arguments, **keywords)
    except Exception as error:
        advice = unset_environment(error) or _other_units(error)
        if advice is not None:
            reason = error.args[0] if error.args else error
            why = f'{name}: {" ".join(str(reason).split())}{failing_line(error)}'
            raise ValueError(three_parts(f'a model {text!r}', why, advice)) from error
        raise


def _is_from(module: Any, name: str) -> bool:
    """Whether a public function or class of this name was written in the module."""
    x, home = getattr(module, name, None), getattr(module, '__name__', '')
    is_own = callable(x) and getattr(x, '__module__', None) == home
    return is_own and not name.startswith('_')


def _signature(found: Any) -> inspect.Signature:
    """The arguments that a function takes, or a class to make an instance."""
    if not isinstance(found, type):
        return inspect.signature(found)
    # The metaclass of brainstate's modules takes any arguments.
    own = inspect.signature(found.__init__)
    return own.replace(parameters=list(own.parameters.values())[1:])


def _other_units(error: Exception) -> str | None:
    """The advice for a model whose times have units, or none, unlike ``dt``."""
    dt = brainstate.environ.get('dt', default=None)
    if dt is None or not re.search('unit|dimension', str(error), re.IGNORECASE):
        return None
    other = '--dt 1.0' if isinstance(dt, u.Quantity) else '--dt 1.0ms'
    return f'{other}, if that is due to dt={dt}'


def _module(where: str) -> Any:
    if where.endswith('.py'):
        file = Path(where)
        if not file.exists():
            raise ValueError(
                three_parts(
                    f'a model of {where}', 'there is no such file', 'the path of a file'
                )
            )
        spec: Any = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)
        sys.path.insert(0, str(file.parent))
        spec.loader.exec_module(module)
        return module
    if not all(part.isidentifier() for part in where.split('.')):
        raise ValueError(
            three_parts(
                f'a model of {where!r}',
                'it is neither the name of a module nor a file that ends in .py',
                'a module that Python finds from here, or a file.py',
            )
        )
    sys.path.insert(0, '')
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ValueError(
            three_parts(
                f'a model of {where}',
                f'{error}',
                'a module that Python finds from here, or a file.py',
            )
        ) from error


def compiled(options: argparse.Namespace, rule: str) -> tuple[Learner, tuple]:
    """The learner of the user's model, and its example inputs."""
    brainstate.random.seed(options.seed)
    found = load(options.model)
    model, *inputs = found if isinstance(found, tuple) else (found,)
    if model is None or isinstance(model, (int, float, str)):
        raise TypeError(
            three_parts(
                f'a model {options.model!r}',
                f'it gives {model!r}',
                'a function that returns a model, or (model, x)',
            )
        )
    inputs = [jnp.zeros(shape) for shape in options.input] or inputs
    if not inputs:
        raise ValueError(
            three_parts(
                f'{options.model} without an example of its inputs',
                'the step is traced on an example',
                '--input 8,3 (a batch of 8 with 3 channels), or a factory that '
                'returns (model, x)',
            )
        )
    say(f'compiling {options.model}, {rule}')
    first = jax.tree.leaves(inputs)[0]
    batch = options.batch or (first.shape[0] if jnp.ndim(first) > 1 else None)
    return compile_model(
        model, rule, *inputs, batch_size=batch, seed=options.seed
    ), tuple(inputs)


def sequences(inputs: tuple, steps: int, seed: int) -> tuple:
    """Sequences of normal numbers in the shape of example inputs; whole numbers and the
    like are repeated."""
    rng = np.random.default_rng(seed)

    def drawn(x: Any) -> jax.Array:
        shape, kind = (steps, *jnp.shape(x)), jnp.result_type(x)
        if jnp.issubdtype(kind, jnp.floating):
            return jnp.asarray(rng.normal(size=shape), kind)
        return jnp.broadcast_to(x, shape)

    return tuple(jax.tree.map(drawn, inputs))


def task_of(
    options: argparse.Namespace, learner: Learner, inputs: tuple
) -> tuple[tuple, Distance]:
    """Random sequences for a model, and the loss of a step."""
    data = sequences(inputs, options.steps, options.seed)
    return data, Distance(learner, options.seed)


class Distance:
    """The loss of a step when the user gave none: outputs against fixed random
    targets."""

    def __init__(self, learner: Learner, seed: int):
        self.learner, self.seed = learner, seed

    def __call__(self, *inputs: Any) -> Any:
        outputs = jax.tree.leaves(self.learner(*inputs))
        rng = np.random.default_rng(self.seed)
        real = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(
            jnp.mean(jnp.abs(x - rng.normal(size=x.shape).astype(x.dtype)) ** 2)
            for x in real
        )


def explain(options: argparse.Namespace) -> Result:
    """Compile a model and show what was found."""
    learner, _ = compiled(options, options.rule)
    report, plan = learner.report, learner.memory_plan(options.steps)
    text = f'{report}\n\n{plan}'
    if options.html:
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        write_whole(options.html, report.to_html(memory=plan))
        text += f'\n\npage: {printable(options.html)}'
    result = {
        'groups': [
            {
                'states': ['.'.join(map(str, p)) for p in g.hidden_paths],
                'positions': list(g.varshape),
            }
            for g in report.hidden_groups
        ],
        'parameters': [
            {
                'name': r.context['name'],
                'gradient': report.gradients[r.context['name']].kind,
                'reason': report.gradients[r.context['name']].reason,
                'credit': r.context['credit'],
            }
            for r in report.credits
        ],
        'diagnostics': [
            {'kind': str(r.kind), 'level': r.level.name, 'message': r.message}
            for r in report.diagnostics
        ],
        'memory': {
            'steps': plan.steps,
            'one_pass': plan.one_pass,
            'two_pass': plan.two_pass,
            'bptt': plan.bptt,
        },
    }
    return result, text, 0


def check(options: argparse.Namespace) -> Result:
    """Gradients of rules against BPTT; fails where the report says that they are equal
    and they are not."""
    if options.plot and Path(options.plot).suffix not in ('.png', '.svg', '.pdf'):
        raise ValueError(
            three_parts(
                f'--plot {options.plot}',
                'its name does not end in the name of a picture format',
                'rules.png, .svg or .pdf',
            )
        )
    learner, inputs = compiled(options, 'd_rtrl')
    data, loss = task_of(options, learner, inputs)
    found = learner.gradient_check(*data, step_fn=loss, rules=options.rules)
    text = f'{options.steps} random steps, loss: distance to random targets\n\n{found}'
    wrong = [
        f'{row.name} under {c.rule}: relative error {row.relative_error:.1e}'
        for c in found.checks
        for row in c.rows
        if row.gradient == EQUAL and row.relative_error > 1e-3
    ]
    if wrong:
        text += '\n\nreported as equal to BPTT, but different:\n' + '\n'.join(
            f'  {line}' for line in wrong
        )
    if options.plot:
        Path(options.plot).parent.mkdir(parents=True, exist_ok=True)
        _, reason = attempted(options.plot, lambda: found.plot(options.plot))
        text += '' if reason else f'\n\npicture: {printable(options.plot)}'
    rows = lambda c: {
        r.name: {'gradient': r.gradient, 'cosine': r.cosine, 'norm_ratio': r.norm_ratio}
        for r in c.rows
    }
    return (
        {c.rule: {'cosine': c.cosine, 'parameters': rows(c)} for c in found.checks},
        text,
        int(bool(wrong)),
    )


def bench(options: argparse.Namespace) -> Result:
    """Time rules on a model, round by round, beside BPTT and the forward pass."""
    runs: dict[str, Any] = {}
    for rule in ['bptt', *options.rules]:
        learner, inputs = compiled(options, rule)
        data, loss = task_of(options, learner, inputs)
        if not runs:
            runs['forward'] = lambda f=learner.evaluate, d=data, s=loss: f(
                *d, step_fn=s
            )
        runs[rule] = lambda f=learner.etrace_grad, d=data, s=loss: f(
            *d, step_fn=s, fresh=True
        )
    for name, run in runs.items():
        say(f'compiling {name}')
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    ratio = lambda a, b: statistics.median(
        x / y for x, y in zip(times[a], times[b], strict=True)
    )
    result = {
        name: {
            'milliseconds': 1e3 * statistics.median(times[name]),
            'times_forward': ratio(name, 'forward'),
            'bptt_over': ratio('bptt', name),
        }
        for name in runs
    }
    lines = [
        f'{options.steps} steps, medians of {options.rounds} rounds',
        f'{"":10}      ms  x forward  BPTT / it',
    ]
    lines += [
        f'{name:10}{r["milliseconds"]:8.2f}'
        f'{r["times_forward"]:11.2f}{r["bptt_over"]:11.2f}'
        for name, r in result.items()
    ]
    return result, '\n'.join(lines), 0
