"""Models of the table: each a plain step with its cuts written by hand, see `formulas`.

The step itself is compiled, as a function. Cells of libraries are compiled as modules, and their step is written out
beside them; so is that of a model with complex states, in real and imaginary parts.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import brainstate
import braintools
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid, softplus

import braintrace
from formulas import FULL, Oracle, loss

nn = brainstate.nn
spike = braintools.surrogate.sigmoid
B, I, H, O, T = 2, 3, 4, 2, 6  # batch, inputs, units, outputs, steps  # noqa: E741


@dataclass(frozen=True, eq=False)
class Case:
    """A step, the shapes of its parameters and states, and what holds for it.

    exact    no position feeds another across time, so that D-RTRL is BPTT
    rest     how much the loss counts states themselves
    seen     the output is ``read(p, seen(new))``, and ``also(p, old)``
    linked   a read-out with a memory whose decay is constant
    """

    step: Callable
    p: Any
    s: Any
    x: Any = (I,)
    exact: bool = False
    rest: float = 0.2
    seen: Callable | None = None
    read: Callable | None = None
    also: Callable | None = None
    linked: bool = False
    loops: bool = False
    rules: tuple = ()
    module: Callable | None = None
    model: tuple | None = None
    modulator: Any = 0.7
    back: list = field(default_factory=lambda: [drawn(H, O, seed=11)])


CASES: dict[str, Case] = {}


def drawn(*shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape)


def case(p=None, s=None, *, seen=None, read=None, also=None, **options):
    """Register a step under its own name. With ``seen``, the function gives new states alone."""

    def register(function):
        step = function
        if seen is not None:
            read_ = read or (lambda p, u: u @ p['out'])
            options.update(seen=seen, read=read_, also=also, rest=0.0)

            def step(p, s, x, cut):
                new = function(p, s, x, cut)
                out = read_(p, seen(new))
                return new, out + also(p, s) if also else out

        CASES[function.__name__] = Case(step, p, s, **options)
        return function

    return register


@functools.cache
@jax.enable_x64(True)
def oracle_of(name, mapped=False):
    """The plain model with drawn values; ``mapped``: all samples begin with the states of one, mapped over."""
    case, rng = CASES[name], np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(0.5 * rng.standard_normal(shape))
    is_shape = lambda v: isinstance(v, tuple)
    fill = lambda tree: jax.tree.map(
        lambda v: draw(*v) if is_shape(v) else jnp.asarray(v), tree, is_leaf=is_shape
    )
    if case.module is None:
        p, s = fill(case.p), fill(case.s)
    else:
        states = lambda kind: case.module().states(kind).items()
        shapes = lambda v: jax.tree.map(lambda x: draw(*x.shape), v)
        p = {k: shapes(v.value) for k, v in states(brainstate.ParamState)}
        s = {k: jnp.zeros((B, *v), float) for k, v in case.s.items()}
    xs = case.x(draw) if callable(case.x) else draw(T, B, *case.x) * 2
    if mapped:
        s = jax.tree.map(lambda v: jnp.broadcast_to(v[0], v.shape), s)
        of_one = case.step
        mapped_step = lambda p, s, x, cut: jax.vmap(lambda s, x: of_one(p, s, x, cut))(
            s, x
        )
        case = dataclasses.replace(case, step=mapped_step)
    out = jax.eval_shape(lambda: case.step(p, s, xs[0], FULL))[1]
    return Oracle(case, p, s, xs, draw(T, *out.shape))


def compiled(name, rule, mapped=False, **options):
    """A learner of a case, and its step function."""
    o = oracle_of(name, mapped)
    case = o.case
    if case.module is not None:
        learner = braintrace.compile(
            case.module(), rule, o.xs[0], batch_size=B, **options
        )
        for path, state in learner.param_states.items():
            state.value = o.p[path]
        states = lambda: [state.value for state in learner.hidden_states.values()]

        def step_fn(x, y):
            return loss(learner(x), y, states(), case.rest)

        return learner, step_fn

    given = CASES[name].step
    step, state = case.model or (lambda p, s, x: given(p, s, x, FULL), lambda s: s)
    state, x = state(o.s), o.xs[0]
    if mapped:
        state, x = jax.tree.map(lambda v: v[0], (state, x))
        options |= {'vmap': True, 'batch_size': B}

    def model(p, s, x):
        new, out = step(p, s, x)
        return new, (out, jax.tree.leaves(new) if case.rest else [])

    learner = braintrace.compile(model, rule, o.p, state, x, **options)

    def step_fn(x, y):
        out, states = learner(x)
        return loss(out, y, states, case.rest)

    return learner, step_fn


def affine(p, x):
    return x @ p['weight'] + p['bias']


def join(*values):
    return jnp.concatenate(values, axis=-1)


# ---------------------------------------------------------------- units that the loss reads through a read-out

ONE = {'h': (B, H)}


@case(
    {'w': (I, H), 'b': (H,), 'r': (H, H), 'out': (H, O)},
    ONE,
    seen=lambda new: new['h'],
    modulator=drawn(B, 1),
)
def leaky(p, s, x, cut):
    h = s['h']
    own = cut.own(p['b'], jnp.ones_like(h))
    drive = cut.dense(x, p['w']) + cut.dense(cut.old(h), p['r']) + own
    return {'h': 0.8 * h + jnp.tanh(drive)}


@case(
    {'w': (I, H), 'r': (H, H), 'b': (H,), 'beta': (H,), 'out': (H, O)},
    {'V': (B, H), 'a': (B, H)},
    seen=lambda new: spike(new['V'] - 0.1 - 0.2 * new['a']),
    modulator=drawn(H),
)
def adaptive(p, s, x, cut):
    """Threshold adaptation, spikes that reset, adapt and recur; a learned time constant."""
    V, a = s['V'], s['a']
    fired = spike(V - 0.1 - 0.2 * a)
    drive = cut.dense(x, p['w']) + cut.dense(cut.old(fired), p['r'])
    V = 0.9 * V + drive + cut.own(p['b'], jnp.ones_like(V)) - fired
    a = cut.own(sigmoid(p['beta']), a) + fired
    return {'V': V, 'a': a}


class Net(nn.Module):
    """A cell and a linear read-out."""

    def __init__(self, cell, size=H):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(size, O)

    def update(self, x):
        return self.out(self.cell(x))


def gru_step(p, h, x, cut):
    """Of the weights Wrz and Wh."""
    rz, wh = p
    gates = cut.dense(join(x, cut.old(h)), rz['weight'])
    gates = gates + cut.own(rz['bias'], jnp.ones_like(gates))
    r, z = jnp.split(sigmoid(gates), 2, axis=-1)
    drive = cut.dense(join(x, cut.now(r) * cut.old(h)), wh['weight'])
    return (1 - z) * h + z * jnp.tanh(drive + cut.own(wh['bias'], jnp.ones_like(h)))


@case(
    s={('cell', 'h'): (H,)},
    seen=lambda new: new['cell', 'h'],
    read=lambda p, u: affine(p['out', 'weight'], u),
    module=lambda: Net(nn.GRUCell(I, H)),
    modulator=drawn(B, H),
)
def gru(p, s, x, cut):
    weights = (p['cell', 'Wrz', 'weight'], p['cell', 'Wh', 'weight'])
    return {('cell', 'h'): gru_step(weights, s['cell', 'h'], x, cut)}


@case(
    {'w': (I, H), 'b': (H,), 'out': (H, O)}, ONE, seen=lambda new: new['h'], exact=True
)
def integrator(p, s, x, cut):
    return {
        'h': 0.9 * s['h']
        + cut.dense(x, p['w'])
        + cut.own(p['b'], jnp.ones_like(s['h']))
    }


@case({'w': (I, H), 'out': (H, O)}, ONE, seen=lambda new: new['h'], exact=True)
def only_leaks(p, s, x, cut):
    """RFLO is exact, and OTTT is not: the slope of tanh changes."""
    return {'h': 0.9 * s['h'] + jnp.tanh(cut.dense(x, p['w']))}


@case(
    {'w': (I, H), 'own': (H,), 'out': (H, O)},
    ONE,
    seen=lambda new: new['h'],
    exact=True,
)
def memoryless(p, s, x, cut):
    return {'h': cut.own(p['own'], cut.dense(x, p['w']))}


@case(
    {'w': (I, H), 'r': (H, H), 'out': (H, O), 'old': (H, O)},
    ONE,
    seen=lambda new: new['h'],
    also=lambda p, s: jnp.tanh(s['h']) @ p['old'],
)
def old_and_new_as_outputs(p, s, x, cut):
    """The loss reads old states directly."""
    drive = cut.dense(x, p['w']) + cut.dense(cut.old(s['h']), p['r'])
    return {'h': 0.8 * s['h'] + jnp.tanh(drive)}


@case({'w': (I, H)}, ONE, seen=lambda new: new['h'], read=lambda p, u: u, exact=True)
def states_as_outputs(p, s, x, cut):
    return {'h': 0.8 * s['h'] + cut.dense(x, p['w'])}


# ---------------------------------------------------------------- units that feed each other


@case(
    s={('cell', 'c'): (H,), ('cell', 'h'): (H,)},
    module=lambda: Net(nn.LSTMCell(I, H)),
    rules=('deep', 'rtrl'),
)
def lstm(p, s, x, cut):
    """h from the new c: two states of a group, one read by the other."""
    drive = affine(p['cell', 'W', 'weight'], join(x, cut.old(s['cell', 'h'])))
    i, g, f, o = jnp.split(drive, 4, axis=-1)
    c = sigmoid(f + 1) * s['cell', 'c'] + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return {('cell', 'c'): c, ('cell', 'h'): h}, affine(p['out', 'weight'], h)


@case({'w': (I, H), 'r': (H, H), 'out': (H, O)}, ONE)
def vanilla(p, s, x, cut):
    """All memory is mixing: only the one-step gradient is left."""
    h = jnp.tanh(x @ p['w'] + cut.old(s['h']) @ p['r'])
    return {'h': h}, h @ p['out']


@case(
    {'we': (I, H), 'wi': (I, H), 'r': (H, H), 'out': (H, O)},
    {'ge': (B, H), 'gi': (B, H), 'V': (B, H)},
)
def conductances(p, s, x, cut):
    """Excitation and inhibition that multiply the membrane; weights kept positive by a softplus."""
    V = s['V']
    fired = spike(V - 0.1)
    recurrent = cut.old(fired) @ softplus(p['r'])
    ge = 0.8 * s['ge'] + (x**2) @ softplus(p['we']) + recurrent
    gi = 0.7 * s['gi'] + jnp.abs(x) @ softplus(p['wi'])
    V = 0.9 * V + 0.1 * (ge * (3.0 - V) + gi * (-1.0 - V)) - fired
    return {'ge': ge, 'gi': gi, 'V': V}, spike(V - 0.1) @ p['out']


@case(
    {'layers': [{'rz': {'weight': (I + H, 2 * H), 'bias': (2 * H,)},
                 'h': {'weight': (I + H, H), 'bias': (H,)}},
                {'w': (H, H), 'r': (H, H)}],
     'out': (H, O)},
    {'layers': [(B, H), (B, H)]},
    rules=('deep', 'bptt', 'rtrl'),
)  # fmt: skip
def stack(p, s, x, cut):
    """Leaky recurrent units on top of a GRU of the same size."""
    (low, top), (first, h) = p['layers'], s['layers']
    first = gru_step((low['rz'], low['h']), first, x, cut)
    drive = cut.now(first) @ top['w'] + cut.old(h) @ top['r']
    h = 0.8 * h + 0.2 * jnp.tanh(drive)
    return {'layers': [first, h]}, h @ p['out']


@case(
    {'w': (I, H), 'ei': (H, O), 'ie': (O, H)},
    {'E': (B, H), 'I': (B, O)},
    rules=('deep', 'rtrl'),
)
def populations(p, s, x, cut):
    """Two groups that read each other's old states."""
    drive = x @ p['w'] - cut.old_across(s['I']) @ p['ie']
    E = 0.9 * s['E'] + drive
    return {'E': E, 'I': 0.8 * s['I'] + cut.old_across(jnp.tanh(s['E'])) @ p['ei']}, E


@case(
    {'w': (I, H), 'ee': (H, H), 'ei': (H, O), 'ie': (O, H)},
    {'E': (B, H), 'I': (B, O)},
    rules=('deep',),
)
def recurrent_populations(p, s, x, cut):
    """The same where one group feeds itself too."""
    recurrent = cut.old(jnp.tanh(s['E'])) @ p['ee']
    E = 0.9 * s['E'] + x @ p['w'] + recurrent - cut.old_across(s['I']) @ p['ie']
    return {'E': E, 'I': 0.8 * s['I'] + cut.old_across(jnp.tanh(s['E'])) @ p['ei']}, E


def convolved(x, w):
    numbers = ('NWC', 'WIO', 'NWC')
    return jax.lax.conv_general_dilated(x, w, (1,), 'SAME', dimension_numbers=numbers)


@case({'w': (3, 2, 3), 'b': (1, 3), 'r': (3, 3, 3)}, {'V': (B, 5, 3)}, x=(5, 2))
def recurrent_convolution(p, s, x, cut):
    """Kernels shared by all places, of input and recurrence."""
    fired = spike(s['V'] - 0.1)
    drive = convolved(x, p['w']) + p['b'] + convolved(cut.old(fired), p['r'])
    V = 0.9 * s['V'] + drive - fired
    return {'V': V}, spike(V - 0.1)


@case(
    {'table': (7, H), 'r': (H, H), 'out': (H, O)},
    ONE,
    x=lambda draw: np.abs(np.asarray(draw(T, B)) * 20).astype(int) % 7,
)
def embedded(p, s, i, cut):
    """Integers in; a row of the table drives the units."""
    h = 0.8 * s['h'] + jnp.tanh(p['table'][i] + cut.old(s['h']) @ p['r'])
    return {'h': h}, h @ p['out']


@case(
    {'w': (I, H), 'r': (H, H)},
    ONE,
    seen=lambda new: new['h'],
    read=lambda p, u: u @ p['r'],
    rules=('multi-step', 'tbptt', 'pp_prop'),
)
def tied(p, s, x, cut):
    """One matrix for the recurrence and the read-out."""
    drive = cut.dense(x, p['w']) + cut.dense(cut.old(s['h']), p['r'])
    return {'h': 0.8 * s['h'] + 0.2 * jnp.tanh(drive)}


@case({'w': (I, H), 'r': (H, H), 'out': (H, O)}, {'V': (B, H)}, rules=('multi-step',))
def output_from_old_state(p, s, x, cut):
    """The spikes of the old membrane are the output, the reset and the recurrence."""
    fired = spike(s['V'] - 0.1)
    V = 0.9 * s['V'] + x @ p['w'] + cut.old(fired) @ p['r'] - fired
    return {'V': V}, fired @ p['out']


@case(
    {'w': (H,), 'out': (H, O)},
    ONE,
    x=(H,),
    seen=lambda new: new['h'],
    rules=('snap 3',),
)
def ring(p, s, x, cut):
    """Units that read their left neighbour only: each step reaches one more."""
    left = jnp.roll(cut.old(s['h']), 1, axis=-1)
    return {'h': jnp.tanh(cut.own(p['w'], left) + x)}


# ---------------------------------------------------------------- layers of one group: signals pass the cuts inside it

SKIP = {'w1': (I, H), 'u1': (H, H), 'w2': (H, H), 's': (H,), 'out': (H, O)}
PAIR = {'a': (B, H), 'b': (B, H)}


def lower(p, s, x, cut):
    return jnp.tanh(0.8 * s['a'] + x @ p['w1'] + cut.old(s['a']) @ p['u1'])


@case(SKIP, PAIR)
def skip(p, s, x, cut):
    """The upper layer reads the lower one by a product, which is cut, and position by position, which is kept."""
    a = lower(p, s, x, cut)
    b = 0.9 * s['b'] + jnp.tanh(cut.now(a) @ p['w2']) + p['s'] * a
    return {'a': a, 'b': b}, b @ p['out']


@case(SKIP | {'w3': (H, H)}, PAIR | {'c': (B, H)})
def through(p, s, x, cut):
    """A third state reads both others, so a path may pass two cuts."""
    new, _ = skip(p, s, x, cut)
    a, b = new['a'], new['b']
    c = 0.7 * s['c'] + cut.now(jnp.tanh(b)) @ p['w3'] + 0.5 * b + 0.3 * a
    return {**new, 'c': c}, c @ p['out']


@case(SKIP, PAIR)
def rolled(p, s, x, cut):
    """The lower layer reads the upper one's old state, and a new state is rolled."""
    a = jnp.tanh(0.8 * s['a'] + x @ p['w1'] + 0.5 * s['b'])
    b = 0.9 * s['b'] + p['s'] * a + jnp.roll(cut.now(a), 1, -1) * p['u1'][0]
    return {'a': a, 'b': b}, jnp.tanh(b) @ p['out'] + a @ p['w2'][:, :O]


@case(SKIP, PAIR)
def cut_in_a_branch(p, s, x, cut):
    a = lower(p, s, x, cut)
    taken = lambda a: jnp.tanh(cut.now(a) @ p['w2']) + p['s'] * a
    other = lambda a: 0.5 * jnp.sin(cut.now(a) @ p['w2'].T) - p['s'] * a
    b = 0.9 * s['b'] + jax.lax.cond(x.sum() > 0, taken, other, a)
    return {'a': a, 'b': b}, b @ p['out']


@case(SKIP, PAIR)
def cut_in_a_loop(p, s, x, cut):
    """The upper layer settles in three rounds, and each round is cut."""
    a = lower(p, s, x, cut)
    one = lambda z, _: (0.7 * z + 0.3 * jnp.tanh(cut.now(z) @ p['w2']), None)
    b = 0.9 * s['b'] + p['s'] * jax.lax.scan(one, a, length=3)[0]
    return {'a': a, 'b': b}, b @ p['out']


# ---------------------------------------------------------------- positions are kept


@case(
    {'w': (I, H), 'beta': (H,), 'out': (H, O)},
    {'V': (B, H), 'a': (B, H)},
    exact=True,
    seen=lambda new: spike(new['V'] - 0.1 - 0.2 * new['a']),
)
def feedforward_alif(p, s, x, cut):
    V, a = s['V'], s['a']
    fired = spike(V - 0.1 - 0.2 * a)
    V = 0.9 * V + cut.dense(x, p['w']) - fired
    return {'V': V, 'a': cut.own(sigmoid(p['beta']), a) + fired}


@case({'w': (I, H), 'own': (H,), 'out': (H, O)}, ONE, exact=True)
def independent(p, s, x, cut):
    h = 0.7 * s['h'] + jnp.tanh(x @ p['w'] + p['own'] * s['h'])
    return {'h': h}, h @ p['out']


@case(
    {'layers': [(I, H), (H, H)], 'out': (H, O)},
    {'layers': [(B, H), (B, H)]},
    rules=('deep',),
)
def lif_stack(p, s, x, cut):
    new = []
    for w, V in zip(p['layers'], s['layers'], strict=True):
        new.append(0.9 * V + cut.now(x) @ w - spike(V - 0.1))
        x = spike(new[-1] - 0.1)
    return {'layers': new}, x @ p['out']


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [braintrace.nn.LRUCell(I, H) for _ in range(2)]
        self.out = nn.Linear(I, O)

    def update(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@case(
    s={('layers', k, f'h_{part}'): (H,) for k in range(2) for part in ('re', 'im')},
    module=Stacked,
    rules=('deep',),
)
def lru_stack(p, s, x, cut):
    """Complex numbers in two real states."""
    new = {}
    for k in range(2):
        at = lambda name, k=k: p['layers', k, name]
        pair = lambda name, k=k: [
            p['layers', k, f'{name}_{part}', 'weight']['weight']
            for part in ('re', 'im')
        ]
        into, out = (jax.lax.complex(*pair(name)) for name in 'BC')
        decay = jnp.exp(-jnp.exp(at('nu_log')) + 1j * jnp.exp(at('theta_log')))
        old = s['layers', k, 'h_re'] + 1j * s['layers', k, 'h_im']
        h = decay * old + jnp.exp(at('gamma_log')) * (cut.now(x) @ into)
        x = (h @ out).real + cut.now(x) * at('D')
        new['layers', k, 'h_re'], new['layers', k, 'h_im'] = h.real, h.imag
    return new, affine(p['out', 'weight'], x)


# ---------------------------------------------------------------- values that several positions read


def network(name, **options):
    return lambda: braintrace.networks.network(name, I, O, units=6, **options)


@case(
    s={('cell', 'h'): (5, 4)},
    exact=True,
    module=network('ssm', d_state=4, d_inner=5, dt_min=0.1, dt_max=0.9),
)
def selective_ssm(p, s, x, cut):
    """`SelectiveSSM`: Δ, B and C from the input; states (b, d, n)."""
    at = lambda name: affine(p['cell', name, 'weight'], x)
    u, dt = at('in_proj'), softplus(at('dt_proj'))
    decay = jnp.exp(-dt[:, :, None] * jnp.exp(p['cell', 'A_log']))
    h = decay * s['cell', 'h'] + (dt * u)[:, :, None] * at('B_proj')[:, None, :]
    read = jnp.einsum('bdn,bn->bd', h, at('C_proj')) + p['cell', 'D'] * u
    out = affine(p['cell', 'out_proj', 'weight'], read)
    return {('cell', 'h'): h}, affine(p['readout', 'weight'], jnp.tanh(out))


@case(
    s={('cell', 'h'): (2, 3, 4)},
    exact=True,
    module=network('attention', num_heads=2, key_size=3, value_size=4),
)
def linear_attention(p, s, x, cut):
    """`LinearAttention` with two heads; states (b, head, k, v)."""
    at = lambda name: affine(p['cell', name, 'weight'], x)
    q, k, v = (at(name).reshape(B, 2, -1) for name in ('Wq', 'Wk', 'Wv'))
    gate = sigmoid(at('Wg'))[:, :, None, None]
    h = gate * s['cell', 'h'] + jnp.einsum('bhk,bhv->bhkv', k, v)
    read = jnp.einsum('bhk,bhkv->bhv', q, h) / np.sqrt(3)
    out = affine(p['cell', 'Wo', 'weight'], read.reshape(B, -1))
    return {('cell', 'h'): h}, affine(p['readout', 'weight'], jnp.tanh(out))


shared = functools.partial(case, exact=True)
GATED = {'w_g': (I, 1), 'w': (I, 5), 'out': (5, O)}
FIVE = {'h': (B, 5)}


@shared(GATED, FIVE)
def shared_gate(p, s, x, cut):
    gate = sigmoid(x @ p['w_g'])
    h = gate * s['h'] + (1 - gate) * jnp.tanh(x @ p['w'])
    return {'h': h}, h @ p['out']


@case(GATED | {'u_g': (5, 1)}, FIVE)
def shared_gate_of_all_units(p, s, x, cut):
    """The weights of the gate are traced, the way through other units is cut."""
    gate = sigmoid(x @ p['w_g'] + cut.old(s['h']) @ p['u_g'])
    h = gate * s['h'] + x @ p['w']
    return {'h': h}, h @ p['out']


@shared(
    {'h0': (5,), 'scale': (), 'w': (I, 5), 'out': (5, O)},
    FIVE | {'count': np.int32(0)},
    rest=0.0,
)
def initial_by_counter(p, s, x, cut):
    h = jnp.where(s['count'] == 0, p['h0'] * p['scale'], s['h'])
    h = 0.9 * h + x @ p['w']
    return {'h': h, 'count': s['count'] + 1}, h @ p['out']


@shared(
    {'w': (I, 5), 'b': (5,), 'a': (8,), 'rest': (I, 4), 'out': (8, O)}, {'h': (B, 8)}
)
def dendrites_and_drive(p, s, x, cut):
    """One product: branches of two units, and a drive that two others share."""
    y, lead = jnp.tanh(x @ p['w'] + p['b']), x.shape[:-1]
    soma = y[..., :4].reshape(*lead, 2, 2).sum(-1)
    drive = jnp.broadcast_to(y[..., 4:], (*lead, 2))
    h = p['a'] * s['h'] + join(soma, drive, x @ p['rest'])
    return {'h': h}, h @ p['out']


@shared({'a': (I, 4), 'b': (I, 1)}, {'h': (B, 4)})
def joined_and_parted(p, s, x, cut):
    """Two products, joined, of which one is summed and one is shared."""
    y = join(x @ p['a'], x @ p['b'])
    summed, drive = y[:, :4].reshape(B, 2, 2).sum(-1), y[:, 4:]
    h = 0.9 * s['h'] + join(summed, jnp.broadcast_to(drive, (B, 2)))
    return {'h': h}, h


@shared(
    {'w': (I, 1), 'phase': (), 'omega': (5,), 'out': (5, O)},
    {'h': np.zeros((B, 5), complex)},
    rest=0.0,
)
def complex_drive(p, s, x, cut):
    drive = (x @ p['w']) * jnp.exp(1j * p['phase'])
    h = jnp.exp(1j * p['omega']) * 0.9 * s['h'] + drive
    return {'h': h}, jnp.real(h) @ p['out']


@jax.custom_vjp
def reverse_spike(v):
    """A surrogate spike with a derivative for reverse mode alone."""
    return (v > 0).astype(v.dtype)


reverse_spike.defvjp(
    lambda v: (reverse_spike(v), v), lambda v, bar: (bar / (1 + jnp.abs(v)) ** 2,)
)


@shared({'w': (I, 1), 'gain': (5,), 'out': (5, O)}, FIVE)
def shared_spike(p, s, x, cut):
    h = 0.9 * s['h'] + reverse_spike(x @ p['w']) * p['gain']
    return {'h': h}, h @ p['out']


# Inside branches, loops and calls. These steps are also mapped over samples, each of which takes its own branch.
inside = functools.partial(case, GATED, FIVE, exact=True, rules=('mapped',))


@inside()
def gate_in_a_branch(p, s, x, cut):
    """A value made outside is shared in one branch; the other has its own decay."""
    y = x @ p['w_g']
    h = jax.lax.cond(x.sum() > 0, lambda h: sigmoid(y) * h, lambda h: 0.7 * h, s['h'])
    h = h + x @ p['w']
    return {'h': h}, h @ p['out']


@shared(GATED, FIVE)
def weights_in_branches(p, s, x, cut):
    gated = lambda h: sigmoid(x @ p['w_g']) * h + x @ p['w']
    driven = lambda h: 0.7 * h + jnp.tanh(x @ p['w_g'])
    h = jax.lax.cond(x.sum() > 0, gated, driven, s['h'])
    return {'h': h}, h @ p['out']


@inside()
def nested_switch(p, s, x, cut):
    """Branches of branches that share in different ways, one not at all."""
    y, zeros = x @ p['w_g'], jnp.zeros_like(s['h'])
    inner = lambda: jax.lax.cond(x.max() > 1, lambda: y * s['h'], lambda: zeros - y)
    cases = [lambda: y + zeros, inner, lambda: zeros]
    drive = jax.lax.switch((jnp.abs(x).sum() * 2).astype(int) % 3, cases)
    h = 0.8 * s['h'] + 0.3 * drive + x @ p['w']
    return {'h': h}, h @ p['out']


@inside()
def gate_in_a_loop(p, s, x, cut):
    """One gate for all units, by a product of each round."""
    one = lambda h, k: (sigmoid((k * x) @ p['w_g']) * h + 0.1 * (x @ p['w']), None)
    h, _ = jax.lax.scan(one, s['h'], jnp.arange(3.0))
    return {'h': h}, h @ p['out']


@case(GATED | {'gain': ()}, FIVE, exact=True, rules=('mapped',))
def drive_carried_by_a_loop(p, s, x, cut):
    """A drive for all units that rounds change and leave behind."""

    def one(carry, _):
        drive, h = carry
        return (jnp.tanh(p['gain'] * drive), 0.9 * h + drive), drive

    (drive, h), drives = jax.lax.scan(one, (x @ p['w_g'], s['h']), None, length=3)
    h = h + x @ p['w'] + drive * drives[1]
    return {'h': h}, h @ p['out']


@inside()
def branch_in_a_loop(p, s, x, cut):
    def one(h, k):
        y = (k * x) @ p['w_g']
        return jax.lax.cond(k > 1, lambda: sigmoid(y) * h, lambda: h + y), None

    h = jax.lax.scan(one, s['h'], jnp.arange(3.0))[0] + x @ p['w']
    return {'h': h}, h @ p['out']


@jax.custom_jvp
def spread(y):
    """One value for five units, with its own derivative."""
    return jnp.broadcast_to(jnp.tanh(y), (*y.shape[:-1], 5))


@spread.defjvp
def _spread_jvp(primals, tangents):
    slope = 1 - jnp.tanh(primals[0]) ** 2
    shape = (*primals[0].shape[:-1], 5)
    return spread(*primals), jnp.broadcast_to(slope * tangents[0], shape)


@inside()
def shared_by_a_call(p, s, x, cut):
    """A call with its own derivative shares, alone and in a branch."""
    y = x @ p['w_g']
    more = jax.lax.cond(x.sum() > 0, lambda: spread(2 * y), lambda: 0.1 * s['h'])
    h = 0.8 * s['h'] + spread(y) + more + x @ p['w']
    return {'h': h}, h @ p['out']


@case({'w_k': (I, 4), 'w_v': (I, 3)}, {'m': (B, 4, 3)}, exact=True, rules=('mapped',))
def memory_in_a_branch(p, s, x, cut):
    """An outer-product memory that is written in one branch only."""
    k, v = x @ p['w_k'], x @ p['w_v']
    write = lambda m: 0.9 * m + k[..., :, None] * v[..., None, :]
    m = jax.lax.cond(x.sum() > 0, write, lambda m: 0.5 * m, s['m'])
    return {'m': m}, jnp.einsum('...k,...kv->...v', jnp.tanh(k), m)


# ---------------------------------------------------------------- loops of unknown length

loop = functools.partial(
    case,
    {'w': (I, H), 'v': (H,), 'out': (H, O)},
    ONE,
    exact=True,
    loops=True,
    rules=('bptt', 'rtrl', 'deep'),
)


def settle(v, drive):
    """Reduced until small, by rounds that the data decide."""
    goes_on = lambda v: jnp.abs(v).sum() > 4.0
    return jax.lax.while_loop(goes_on, lambda v: 0.8 * v + 0.05 * drive, v)


@loop()
def loop_before_the_state(p, s, x, cut):
    h = settle(0.9 * s['h'] + 3 * (x @ p['w']), p['v'] * s['h'])
    return {'h': h}, h @ p['out']


@loop()
def loop_before_the_output(p, s, x, cut):
    h = 0.9 * s['h'] + 2 * (x @ p['w'])
    return {'h': h}, settle(h * p['v'], h) @ p['out']


def rounds(x):
    return 2 + (x.sum() > 0).astype(int)


def repeated(x, one, h):
    goes_on = lambda c: c[0] < rounds(x)
    return jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, one(*c)), (0, h))[1]


@loop()
def weights_in_a_loop(p, s, x, cut):
    one = lambda k, h: h + 0.1 * (jnp.cos(k * x) @ p['w'] - p['v'] * h)
    h = repeated(x, one, s['h'])
    return {'h': h}, h @ p['out']


@loop()
def fori_with_bounds_of_data(p, s, x, cut):
    count = 1 + (10 * jnp.abs(x).max()).astype(int) % 4
    one = lambda k, h: 0.9 * h + 0.1 * jnp.tanh(h) * p['v']
    h = jax.lax.fori_loop(0, count, one, s['h'] + x @ p['w'])
    return {'h': h}, h @ p['out']


@case(
    {'w': (I, H), 'v': (H,), 'r': (H, H), 'out': (H, O)},
    ONE,
    loops=True,
    rules=('bptt', 'rtrl'),
)
def recurrence_in_a_loop(p, s, x, cut):
    y = x @ p['w']
    mixed = lambda h: cut.old(jnp.tanh(h * p['v'])) @ p['r']
    h = repeated(x, lambda k, h: 0.8 * h + 0.2 * (y + mixed(h)), s['h'])
    return {'h': h}, h @ p['out']


# ---------------------------------------------------------------- leaky read-outs

DECAYS = np.array([0.9, 0.5])
UNITS = {'V': (B, H), 'a': (B, H), 'y': (B, O)}
FEED = {'feed': (I, H), 'out': (H, O)}
LINKED = {'linked': True, 'rules': ('readout',)}
PARTLY = {'rules': ('readout',)}


def fired(s):
    return spike(s['V'] - 0.3 - 0.2 * s['a'])


def units(p, s, x):
    """Adaptive spiking units without any weights between them: new states, new spikes."""
    z = fired(s)
    V = 0.8 * s['V'] + x @ p['feed'] - 0.3 * z
    new = {'V': V, 'a': 0.95 * s['a'] + z}
    return new, fired(new)


def readout(p=FEED, **options):
    """Register a read-out: the function gives its new state y for spikes z."""

    def register(function):
        @functools.wraps(function)
        def step(p, s, x, cut):
            new, z = units(p, s, x)
            y = function(p, s['y'], z, cut)
            return {**new, 'y': y}, y

        return case(p, UNITS, **options)(step)

    return register


FEEDBACK = ('readout', 'eprop, readout', 'eprop, feedback', 'ostl, readout')


@readout(linked=True, rules=FEEDBACK)
def leaky_readout(p, y, z, cut):
    return 0.9 * y + cut.read(z, p['out'])


@readout(linked=True, rules=FEEDBACK)
def several_decays(p, y, z, cut):
    return DECAYS * y + (1 - DECAYS) * cut.read(z, p['out'])


@readout(FEED | {'bias': (O,), 'out': (O, H)}, **LINKED)
def readout_with_gains(p, y, z, cut):
    """Gains, a bias, and weights in the other order."""
    drive = jnp.einsum('bh,oh->bo', 2.0 * cut.into(z), jnp.tanh(p['out']))
    return 0.9 * y + 0.1 * (drive + p['bias'])


@readout({'feed': (I, H), 'rows': (2, 2, O)}, **LINKED)
def readout_of_rows(p, y, z, cut):
    """Units in two rows, reversed, and read by groups of weights."""
    rows = cut.into(z).reshape(B, 2, H // 2)[..., ::-1]
    return 0.9 * y + jnp.einsum('brh,rho->bo', rows, p['rows'])


@readout({'feed': (I, H)}, **LINKED)
def fixed_readout(p, y, z, cut):
    return 0.9 * y + cut.read(z, drawn(H, O, seed=6))


@readout(FEED | {'decay': (O,)}, **PARTLY)
def learned_decay(p, y, z, cut):
    return sigmoid(p['decay']) * y + cut.now(z) @ p['out']


@readout(**PARTLY)
def saturating(p, y, z, cut):
    return jnp.tanh(0.9 * y + cut.now(z) @ p['out'])


@readout(**PARTLY)
def normalised(p, y, z, cut):
    z = cut.now(z)
    return 0.9 * y + (z - z.mean(-1, keepdims=True)) @ p['out']


@readout(**PARTLY)
def gated_by_spikes(p, y, z, cut):
    """∂Y/∂u changes from step to step."""
    z = cut.now(z)
    return 0.9 * y + jnp.sum(z) * (z @ p['out'])


@case(FEED, UNITS | {'z': (B, H)}, **LINKED)
def spikes_as_state(p, s, x, cut):
    new, z = units(p, s, x)
    y = 0.9 * s['y'] + cut.read(z, p['out'])
    return {**new, 'z': z, 'y': y}, y


@case(FEED, {'V': (B, H), 'y': (B, O)}, **LINKED)
def memory_in_the_readout(p, s, x, cut):
    V = jnp.tanh(x @ p['feed'])
    y = 0.9 * s['y'] + cut.read(V**3, p['out'])
    return {'V': V, 'y': y}, y


@case(FEED, UNITS, **LINKED)
def output_of_the_step_before(p, s, x, cut):
    new, _ = leaky_readout(p, s, x, cut)
    return new, s['y'] + 0.5 * new['y']


@case(FEED, UNITS, **LINKED)
def readout_of_old_spikes(p, s, x, cut):
    new, _ = units(p, s, x)
    y = 0.9 * s['y'] + cut.read(cut.old_into(fired(s)), p['out'])
    return {**new, 'y': y}, y + s['V'][:, :O]


@case(FEED, UNITS, **LINKED)
def readout_of_old_and_new(p, s, x, cut):
    new, z = units(p, s, x)
    u = jnp.tanh(cut.old_into(s['V']) + 0.3) * z + 0.2 * new['V']
    y = 0.9 * s['y'] + cut.read(u, p['out'])
    return {**new, 'y': y}, y


@case(
    FEED | {'value': (H, 1)},
    UNITS | {'v': (B, 1)},
    linked=True,
    rules=('readout', 'eprop, feedback'),
    back=[drawn(H, O, seed=11), drawn(H, 1, seed=12)],
)
def two_readouts(p, s, x, cut):
    """Of the same units, one with another memory."""
    new, z = units(p, s, x)
    y = 0.9 * s['y'] + cut.read(z, p['out'])
    v = 0.5 * s['v'] + cut.read(z, p['value'], 1)
    return {**new, 'y': y, 'v': v}, y + jnp.tanh(v)


@case(
    {'feed': (I, H), 'more': (I, 2), 'out': (H + 2, O)},
    UNITS | {'h': (B, 2)},
    **LINKED,
)
def two_populations(p, s, x, cut):
    """Two groups side by side, read by one product."""
    new, z = units(p, s, x)
    h = 0.6 * s['h'] + jnp.sin(x @ p['more'])
    y = 0.9 * s['y'] + cut.read(join(z, h**2), p['out'])
    return {**new, 'h': h, 'y': y}, y


@case(FEED | {'last': (O, O)}, UNITS, **LINKED)
def readout_then_dense(p, s, x, cut):
    new, y = leaky_readout(p, s, x, cut)
    return new, jnp.tanh(y) @ p['last']


@case(
    {'feed': (I, H), 'seen': (I, H), 'out': (H, O)},
    {'V': (B, H), 'a': (B, H), 'W': (B, H), 'c': (B, H)},
    exact=True,
    rules=('eprop, feedback',),
)
def two_ways(p, s, x, cut):
    """Units seen by way of a read-out, beside units that are seen as they are."""
    new, z = units(p, s, x)
    more, direct = units({'feed': p['seen']}, {'V': s['W'], 'a': s['c']}, x)
    out = cut.read(z, p['out']) + direct[:, :O]
    return {**new, 'W': more['V'], 'c': more['a']}, out


@case(FEED | {'r': (H, H)}, UNITS, **PARTLY)
def recurrent_units_and_readout(p, s, x, cut):
    z = fired(s)
    V = 0.8 * s['V'] + x @ p['feed'] + 0.1 * cut.old(z) @ p['r'] - 0.3 * z
    new = {'V': V, 'a': 0.95 * s['a'] + z}
    y = 0.9 * s['y'] + cut.read(fired(new), p['out'])
    return {**new, 'y': y}, y


@case(FEED, UNITS, **PARTLY)
def fed_back(p, s, x, cut):
    """The output drives the units."""
    new, z = units(p, s, x.at[:, :O].add(0.1 * cut.old_across(s['y'])))
    y = 0.9 * s['y'] + cut.now(z) @ p['out']
    return {**new, 'y': y}, y


@case(
    {'first': (I, 5), 'feed': (5, H), 'out': (H, O)},
    UNITS | {'h': (B, 5)},
    **PARTLY,
)
def two_layers_and_readout(p, s, x, cut):
    """Only the layer below the read-out is linked."""
    h = 0.7 * s['h'] + jnp.tanh(x @ p['first'])
    new, y = leaky_readout(p, s, cut.now(h), cut)
    return {**new, 'h': h}, y


@case(FEED | {'last': (O, O)}, UNITS | {'layer': (B, O)}, **PARTLY)
def linear_layer_below_the_readout(p, s, x, cut):
    """A leaky linear layer that feeds the read-out is none itself."""
    new, z = units(p, s, x)
    layer = 0.7 * s['layer'] + cut.now(z) @ p['out']
    y = 0.9 * s['y'] + cut.read(layer, p['last'])
    return {**new, 'layer': layer, 'y': y}, y


# ---------------------------------------------------------------- complex numbers

TURN = 0.6 + 0.5j
WAVE = {'feed': (I, H), 'heads': (2, 2, 2), 'gain': (H,), 'back': (H, H), 'out': (H, O)}


def by_heads(x, w):
    return jnp.einsum('bij,ijk->bik', x.reshape(B, 2, 2), w).reshape(B, H)


def complex_step(p, s, x):
    """Complex states and inputs that meet real weights."""
    h = s['h']
    drive = x @ p['feed'] + h @ p['back']
    drive = by_heads(drive / (1 + jnp.abs(drive) ** 2), p['heads'])
    gain = jax.lax.complex(p['gain'] * x.real[:, :1], p['gain'] * x.imag[:, :1])
    h = TURN * h + drive + gain
    return {'h': h}, jnp.imag(h @ p['out'])


@case(
    WAVE,
    {'re': (B, H), 'im': (B, H)},
    x=lambda draw: draw(T, B, I) + 1j * draw(T, B, I),
    rest=0.0,
    model=(complex_step, lambda s: {'h': s['re'] + 1j * s['im']}),
    rules=('rtrl', 'bptt', 'tbptt', 'ostl_recurrent'),
)
def complex_states(p, s, x, cut):
    """The same in real and imaginary parts."""
    parts, old = (x.real, x.imag), (s['re'], s['im'])
    drives = [
        y @ p['feed'] + cut.old(h) @ p['back'] for y, h in zip(parts, old, strict=True)
    ]
    size = 1 + drives[0] ** 2 + drives[1] ** 2
    drives = [
        by_heads(cut.now(d / size), p['heads']) + p['gain'] * y[:, :1]
        for d, y in zip(drives, parts, strict=True)
    ]
    re = TURN.real * old[0] - TURN.imag * old[1] + drives[0]
    im = TURN.real * old[1] + TURN.imag * old[0] + drives[1]
    return {'re': re, 'im': im}, im @ p['out']


@case(
    {'w': 0.4 * drawn(I, H) + 0.4j * drawn(I, H, seed=8),
     'r': 0.4 * drawn(H) + 0.4j * drawn(H, seed=8)},
    {'h': np.zeros((B, H), complex)},
    rest=0.0,
    rules=('rtrl', 'bptt', 'only rtrl'),
)  # fmt: skip
def complex_weights(p, s, x, cut):
    """A conjugate on the way: not holomorphic."""
    turned = p['r'] * jnp.roll(s['h'].conj(), 1, -1)
    h = 0.5 * s['h'] + x @ p['w'] + turned
    return {'h': h}, join(h.real, h.imag**2)
