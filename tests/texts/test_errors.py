"""Bad input: what is said, and that nothing of the user's is touched."""

import ast
import threading
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace as bt
from zoo import CASES
from zoo.base import Step, hidden, weight

B, I, H = 2, 3, 4  # noqa: E741
X = jnp.ones((B, I))


def gru(batch=B):
    model = bt.nn.GRUCell(I, H)
    brainstate.nn.init_all_states(
        model, **({} if batch is None else {'batch_size': batch})
    )
    return model


def small(step):
    return Step(step, w=weight(I, H), h=hidden(B, H))


def leaky(step):
    """A model whose step first spoils its state and draws a random number, then goes wrong in its own way."""

    def noisy(m, x):
        m.h.value = 0.5 * m.h.value + brainstate.random.randn(B, H)
        return step(m, x)

    return small(noisy)


def write_parameter(m, x):
    m.w.value = 0.9 * m.w.value
    return x @ m.w.value


def change_shape(m, x):
    m.h.value = jnp.concatenate([m.h.value, x @ m.w.value])


def change_dtype(m, x):
    m.h.value = (m.h.value + x @ m.w.value).astype(jnp.float16)


def create_state(m, x):
    m.made = brainstate.HiddenState(x @ m.w.value)
    m.h.value = m.h.value + m.made.value


def ask_for_a_value(m, x):
    return x @ m.w.value if x.sum() > 0 else m.h.value


def fail(m, x):
    raise RuntimeError('boom')


def never_write(m, x):
    return m.h.value + x @ m.w.value


def misspell(m, x):
    return m.hiden.value + x


class Unready(brainstate.nn.Module):
    """States made by a helper of `init_state`, one of them before it."""

    def __init__(self, early):
        super().__init__()
        self.w = weight(I, H)
        if early:
            self.early = hidden(B, H)

    def init_state(self, *args, **kwargs):
        self.make()

    def make(self):
        self.late = hidden(B, H)

    def update(self, x):
        self.late.value = 0.5 * self.late.value + x @ self.w.value


def no_hidden_state(m, x):
    return x @ m.w.value


def no_parameter(m, x):
    m.h.value = 0.9 * m.h.value


UNTRAINED = {'no parameter': (lambda: small(no_parameter), (X,), 'no parameter')}
"""Models that have a graph, and no learner."""
BAD = {  # model, arguments, a word of the message
    'no states': (lambda: bt.nn.GRUCell(I, H), (X,), 'GRUCell whose states are not init'),
    'too few arguments': (gru, (), 'called with 0'),
    'too many arguments': (gru, (X, X), 'called with 2'),
    'wrong width': (gru, (jnp.ones((B, 7)),), 'check their shapes'),
    'input without batch': (gru, (jnp.ones(I),), 'batch_size='),
    'states without batch': (lambda: gru(None), (X,), 'batch_size='),
    'never written': (lambda: small(never_write), (X,), 'only reads h'),
    'parameter written': (lambda: leaky(write_parameter), (X,), 'writes parameter w'),
    'state changes shape': (lambda: leaky(change_shape), (X,), r'\(2, 4\).*\(4, 4\)'),
    'state changes type': (lambda: leaky(change_dtype), (X,), "'float32'.*'float16'"),
    'state created': (lambda: leaky(create_state), (X,), 'creates state made'),
    'python if': (lambda: leaky(ask_for_a_value), (X,), 'jax.lax.cond'),
    'failing step': (lambda: leaky(fail), (X,), r'errors.py:\d+: raise'),
    'misspelt': (lambda: leaky(misspell), (X,), "reads 'hiden'"),
    'helper not called': (lambda: Unready(False), (X,), 'Unready whose states are not init'),
    'one state made': (lambda: Unready(True), (X,), "Unready that reads 'late'"),
    'no hidden state': (lambda: small(no_hidden_state), (X,), 'no hidden state$'),
}  # fmt: skip


def snapshot(model):
    """Every state object and the very value it holds."""
    return {path: (state, state.value) for path, state in model.states().items()}


@pytest.mark.parametrize('name', [*BAD, *UNTRAINED])
def test_nothing_is_touched(name):
    make, args, word = (BAD | UNTRAINED)[name]
    model = make()
    before, key = snapshot(model), brainstate.random.DEFAULT.value
    compiled = (
        bt.compile_etrace_graph
        if name in BAD
        else lambda model, *args: bt.D_RTRL(model).compile_graph(*args)
    )
    with pytest.raises(bt.CompilationError, match=f'(?m){word}'):
        compiled(model, *args)
    assert brainstate.random.DEFAULT.value is key
    after = model.states()
    assert all(
        after[path] is state and state.value is value
        for path, (state, value) in before.items()
    )


def decay(m, x):
    m.h.value = 0.5 * m.h.value + x @ m.w.value
    return m.h.value


def test_a_parameter_that_a_step_writes_is_not_supported():
    """The step is valid, so that it is caught as either error."""
    for kind in (bt.NotSupportedError, bt.CompilationError):
        with pytest.raises(kind, match='writes parameter w'):
            bt.compile(leaky(write_parameter), 'd_rtrl', X)
    learner = bt.compile(small(decay), 'd_rtrl', X)

    def step(x):
        learner.model.w.value = 0.9 * learner.model.w.value
        return jnp.sum(learner(x))

    with pytest.raises(bt.NotSupportedError, match='writes parameter w'):
        learner.etrace_grad(X[None], step_fn=step)


@pytest.mark.parametrize('model', [None, 3, 'gru', lambda state: state])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match='a model of type'):
        bt.compile_etrace_graph(model, X)
    with pytest.raises(TypeError, match='ETraceGraphExecutor'):
        bt.ETraceGraphExecutor(model)
    with pytest.raises(TypeError, match='brainstate modules only'):
        bt.extract_module_info(model, X)


def test_a_good_compilation_touches_nothing_either():
    model = leaky(no_hidden_state)
    before, key = snapshot(model), brainstate.random.DEFAULT.value
    with jax.checking_leaks():
        graph = bt.compile_etrace_graph(model, X)
    assert snapshot(model) == before
    assert all(state.value is before[path][1] for path, state in model.states().items())
    assert brainstate.random.DEFAULT.value is key
    assert [path[:2] for path in graph.report.dynamic_states] == [
        ('<outside>', 'RandomState')
    ]


def test_a_state_outside_the_model_is_left_alone():
    outside = brainstate.HiddenState(jnp.zeros((B, H)))

    def step(m, x):
        outside.value = 0.5 * outside.value + x @ m.w.value
        m.h.value = m.h.value + outside.value
        return fail(m, x) if m.broken else m.h.value

    model = small(step)
    value = outside.value
    model.broken = True
    with pytest.raises(bt.CompilationError, match='boom'):
        bt.compile_etrace_graph(model, X)
    assert outside.value is value
    model.broken = False
    graph = bt.compile_etrace_graph(model, X)
    assert outside.value is value
    assert any(path[0] == '<outside>' for path in graph.hid_path_to_group)


def test_recursion():
    inner = gru()
    model = small(lambda m, x: bt.compile_etrace_graph(inner, x))
    with pytest.raises(NotImplementedError, match='being compiled'):
        bt.compile_etrace_graph(model, X)
    assert len(bt.compile_etrace_graph(inner, X).hidden_groups) == 1


def test_threads_do_not_disturb_each_other():
    names = ['gru_batched', 'gru_unbatched', 'brainpy_stack', 'brainpy_alif_recurrent']
    alone = {name: describe(name) for name in names}
    found, ready = {}, threading.Barrier(len(names))

    def work(name, model, inputs):
        ready.wait()
        for _ in range(3):
            found.setdefault(name, []).append(
                text_of(bt.compile_etrace_graph(model, *inputs))
            )

    threads = [
        threading.Thread(target=work, args=(name, *CASES[name].build()))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [alone[name]] * 3 for name in names}


def text_of(graph):
    return f'{graph!r}\n{graph.report.to_str("info")}\n{graph.module_info.jaxpr}'


def describe(name):
    model, inputs = CASES[name].build()
    return text_of(bt.compile_etrace_graph(model, *inputs))


def test_a_call_with_other_shapes():
    executor = bt.ETraceGraphExecutor(gru())
    executor.compile_graph(X)
    for call in (executor.solve_h2w_h2h_jacobian, executor.solve_h2w_h2h_l2h_jacobian):
        with pytest.raises(ValueError, match='compiled for'):
            call(jnp.ones((5, I)))
    np.testing.assert_array_equal(executor.model.h.value, np.zeros((B, H)))


PLAIN = {'ArgumentTypeError', 'AttributeError', 'KeyboardInterrupt', 'NotImplementedError', 'OSError'}  # fmt: skip
"""Errors that Python or argparse words, or that have no words."""

CAUGHT = {'UnexpectedTracerError', '_StateChanged', 'it returns'}
"""Errors that the package raises and catches itself."""


def words(node):
    """All names in a part of a program, and its strings."""
    parts = [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)]
    strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    found = {getattr(n, 'id', getattr(n, 'attr', '')) for n in parts}
    return found | {w.strip() for w in strings if isinstance(w, str)}


def test_every_error_has_three_parts():
    """Made where it is raised, or by a function or a class that is called there."""
    files = sorted(Path(bt.__file__).parent.rglob('*.py'))
    trees = {file: list(ast.walk(ast.parse(file.read_text()))) for file in files}
    made = {}
    for node in (node for tree in trees.values() for node in tree):
        if isinstance(node, ast.FunctionDef):
            results = [n for n in ast.walk(node) if isinstance(n, ast.Return)]
            made[node.name] = {w for n in results for w in words(n)}
        elif isinstance(node, ast.ClassDef) and node.name.endswith('Error'):
            made[node.name] = words(node)
    known = {'three_parts'} | PLAIN
    for _ in range(3):  # functions that return what such functions return
        known |= {name for name, found in made.items() if found & known}
    checked = 0
    for file, tree in trees.items():
        named = {
            ast.unparse(node.targets[0]): words(node.value)
            for node in tree
            if isinstance(node, ast.Assign)
        }
        for node in tree:
            if isinstance(node, ast.Raise) and node.exc is not None:
                said = words(node.exc)
                said |= {w for name in said for w in named.get(name, ())}
                assert said & (known | CAUGHT), f'{file}:{node.lineno}'
                checked += 1
    assert checked > 200
