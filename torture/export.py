"""Programs of gradients and streams are lowered for CPU, CUDA and TPU, which need not be there.

``jax.export`` does everything but the last step of compilation. A call of a function of
the CPU in the program would mean that it could not run elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import optax

import braintrace
from braintrace.learner.binding import bind_step_fn
from braintrace.learner.by_rule import RULES as EVERY
from braintrace.learner.carried import read_traces, rule_value
from braintrace.learner.sequences import gradient_program_of

from .progress import ROOT
from .training import check_explained

sys.path.insert(0, str(ROOT / 'tests'))
from oracle import sequence, total_of
from zoo import CASES as ZOO

TITLE = (
    'gradients and streams of ten models by every rule, lowered for CPU, CUDA and TPU'
)
MODELS = (
    'gru_batched',
    'lstm_batched',
    'lif_recurrent',
    'alif_recurrent',
    'conv1d',
    'two_compartments',
    'lru_complex',
    'embedding_input',
    'layer_norm_on_input',
    'minigru',
)
RULES = [name for name in EVERY if name != 'es_d_rtrl']
PLATFORMS = ('cpu', 'cuda', 'tpu')
KINDS = ('fresh', 'with traces', 'stream')
CASES = len(KINDS) * len(MODELS) * len(RULES)
STEPS = 4

HARMLESS = re.compile(r'Sharding|annotate|shape_assertion|SPMD|cu_threefry|tpu_')
"""Calls that every platform, or the one that is lowered for, has."""


def program_of(learner: Any, xs: tuple, fresh: bool) -> tuple[Any, tuple]:
    """The compiled gradient of a sequence, and its arguments."""
    step_fn = lambda *x: total_of(learner(*x))
    binding = bind_step_fn(learner, step_fn, xs)
    solver, program = gradient_program_of(learner, binding, learner.rule, fresh)
    parameters, states = binding.read()
    traces = [] if fresh else read_traces(learner, solver)
    weights = jnp.ones(STEPS)
    state = rule_value(learner)
    given = (parameters, states, traces, binding.inputs(xs), weights, 1.0, state)
    return program.run, given


def stream_program(learner: Any, xs: tuple) -> tuple[Any, tuple]:
    """The step of a stream with updates, and its arguments."""
    step_fn = lambda *x: total_of(learner(*x))
    stream = learner.stream(step_fn, optax.adam(1e-3))
    first = jax.tree.map(lambda x: x[0], xs)
    stream(*first)
    (program,) = stream._programs.values()
    return program.run, (program.arrays(), *first)


def calls_in(text: str) -> set[str]:
    """Names of functions outside of the program that it calls."""
    return set(re.findall(r'custom_call\s*@([\w.]+)', text))


def case(seed: int, number: int) -> str:
    """One model by one rule, as a fresh sequence, with traces or as a stream."""
    kind = KINDS[number % len(KINDS)]
    number //= len(KINDS)
    name = MODELS[number % len(MODELS)]
    rule = RULES[number // len(MODELS)]
    zoo = ZOO[name]
    with jax.enable_x64(True) if zoo.x64 else contextlib.nullcontext():
        model, inputs = zoo.build()
        learner = EVERY[rule](model)
        learner.compile_graph(*inputs)
        xs = tuple(sequence(x, STEPS) for x in inputs)
        try:
            if kind == 'stream':
                program, given = stream_program(learner, xs)
            else:
                program, given = program_of(learner, xs, kind == 'fresh')
        except (braintrace.NotSupportedError, ValueError) as error:
            check_explained(error)
            return 'refused by the rule'
        # Keys of random numbers and the like are no arguments of an export.
        flat, tree = jax.tree.flatten(given)
        run = jax.jit(lambda *leaves: program(*jax.tree.unflatten(tree, leaves)))
        export = jax.export.export(
            jax.jit(lambda *leaves: jax.tree.leaves(run(*leaves))), platforms=PLATFORMS
        )
        text = export(*flat).mlir_module()
    foreign = {c for c in calls_in(text) if not HARMLESS.search(c)}
    assert not foreign, f'{name} by {rule} calls {sorted(foreign)}'
    return f'lowered, {kind}'
