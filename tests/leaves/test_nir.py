"""Models from and to NIR files, against solutions of the specification's equations.

The references are NumPy in float64, written from the specification: the differential
equations by a matrix exponential, convolutions and pools by loops.
"""

import itertools
import re
import tracemalloc

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import braintrace
from braintrace import nir as bnir

nir = pytest.importorskip('nir')

DT = 1e-3
N = 4
random = np.random.default_rng(0)


def uniform(low, high, *shape):
    return random.uniform(low, high, shape or (N,))


def compare(model, xs, **outputs):
    """Run a model over steps and compare its outputs by name."""
    brainstate.nn.init_all_states(model)
    found = brainstate.transform.for_loop(model, jnp.asarray(xs))
    for name, wanted in outputs.items():
        got = found[name] if isinstance(found, dict) else found
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6, err_msg=name)


# ------------------------------------------------------------ neurons

LEAK = {'r': uniform(1, 3), 'v_leak': uniform(-0.1, 0.1)}
SPIKE = {'v_threshold': uniform(0.3, 0.6), 'v_reset': uniform(-0.2, 0)}
TAU = {'tau': uniform(5e-3, 2e-2)}
# One element has equal time constants, where the general solution is 0/0.
CUBA = {'tau_syn': uniform(2e-3, 8e-3), 'tau_mem': uniform(5e-3, 2e-2)}
CUBA['tau_mem'][0] = CUBA['tau_syn'][0]
CUBA['w_in'] = uniform(0.5, 2)
GAIN = {'r': uniform(50, 150)}
NEURONS = {
    'i': nir.I(**GAIN),
    'if': nir.IF(**GAIN, **SPIKE),
    'li': nir.LI(**TAU, **LEAK),
    'lif': nir.LIF(**TAU, **LEAK, **SPIKE),
    'cuba_li': nir.CubaLI(**CUBA, **LEAK),
    'cuba_lif': nir.CubaLIF(**CUBA, **LEAK, **SPIKE),
}


def derivative(node, k):
    """The matrix of d/dt (I, v, S, 1) of element k, with a constant input S."""
    matrix = np.zeros((4, 4))
    name = type(node).__name__
    if name in ('I', 'IF'):
        matrix[1, 2] = node.r[k]
    elif name in ('LI', 'LIF'):
        matrix[1] = np.array([0, -1, node.r[k], node.v_leak[k]]) / node.tau[k]
    else:
        matrix[0] = np.array([-1, 0, node.w_in[k], 0]) / node.tau_syn[k]
        matrix[1] = np.array([node.r[k], -1, 0, node.v_leak[k]]) / node.tau_mem[k]
    return matrix


def solve(node, xs):
    """Potentials before the reset, and outputs, of every step."""
    size = len(node.r)
    steps = [scipy.linalg.expm(DT * derivative(node, k)) for k in range(size)]
    current, v = np.zeros(size), np.zeros(size)
    potentials, outputs = [], []
    for x in xs:
        new = np.array([m @ [current[k], v[k], x[k], 1] for k, m in enumerate(steps)])
        current, v = new[:, 0], new[:, 1]
        potentials.append(v)
        outputs.append(v)
        if hasattr(node, 'v_threshold'):
            outputs[-1] = (v > node.v_threshold).astype(float)
            v = np.where(v > node.v_threshold, node.v_reset, v)
    return np.array(potentials), np.array(outputs)


def fan_out(nodes):
    """A graph of one input and an output for every node."""
    parts = {'input': nir.Input(np.array([N])), **nodes}
    edges = []
    for name in nodes:
        parts[f'out_{name}'] = nir.Output(np.array([N]))
        edges += [('input', name), (name, f'out_{name}')]
    return nir.NIRGraph(nodes=parts, edges=edges)


@pytest.mark.parametrize('bits', [32, 64])
def test_potentials_are_the_solution_of_the_equations(bits):
    xs = random.normal(size=(100, N)) * 0.4 + 0.3
    with jax.enable_x64(bits == 64):
        model = bnir.read(fan_out(NEURONS), DT)
        brainstate.nn.init_all_states(model)

        def step(x):
            model(x)
            return {name: part.v.value for name, part in model.parts.items()}

        found = brainstate.transform.for_loop(step, jnp.asarray(xs))
        for name, node in NEURONS.items():
            potentials, _ = solve(node, xs)
            size = 1 if bits == 64 else np.abs(potentials).max()
            error = np.abs(found[name] - potentials).max() / size
            assert error < (1e-12 if bits == 64 else 1e-6), (name, error)


def test_outputs_are_spikes_or_potentials(x64):
    xs = random.normal(size=(100, N)) * 0.4 + 0.3
    wanted = {f'out_{name}': solve(node, xs)[1] for name, node in NEURONS.items()}
    rates = [wanted[f'out_{name}'].mean() for name in ('if', 'lif', 'cuba_lif')]
    assert all(0.02 < rate < 0.9 for rate in rates)  # neurons spike, and not always
    compare(bnir.read(fan_out(NEURONS), DT), xs, **wanted)


# ------------------------------------------------------------ nodes without a state


def correlate(x, weight, bias, stride, padding, dilation, groups):
    """A convolution of NIR, position by position."""
    out, per_group, *kernel = weight.shape
    axes = len(kernel)
    x = np.pad(x, [(0, 0)] + [(p, p) for p in padding])
    sizes = [
        (x.shape[i + 1] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i in range(axes)
    ]
    y = np.zeros((out, *sizes))
    for o in range(out):
        first = o // (out // groups) * per_group
        for place in itertools.product(*map(range, sizes)):
            total = bias[o]
            for c in range(per_group):
                for tap in itertools.product(*map(range, kernel)):
                    at = [
                        p * s + t * d
                        for p, s, t, d in zip(place, stride, tap, dilation, strict=True)
                    ]
                    total += weight[(o, c, *tap)] * x[(first + c, *at)]
            y[(o, *place)] = total
    return y


def pool(x, kernel, stride, padding):
    """The window sums of NIR."""
    channels = x.shape[0]
    eye = np.zeros((channels, 1, *kernel)) + 1
    return correlate(x, eye, np.zeros(channels), stride, padding, (1, 1), channels)


def test_layers_are_those_of_the_specification(x64):
    kernel, bias = random.normal(size=(4, 1, 3, 3)), random.normal(size=4)
    conv = {'stride': (2, 1), 'padding': (1, 2), 'dilation': (1, 2), 'groups': 2}
    summed = {'kernel_size': (2, 2), 'stride': (1, 2), 'padding': (1, 0)}
    averaged = {'kernel_size': (2, 3), 'stride': (2, 1), 'padding': (0, 1)}
    x = random.normal(size=(2, 7, 8))
    conv_y = correlate(x, kernel, bias, **conv)
    sum_y = pool(conv_y, *summed.values())
    mean_y = pool(sum_y, *averaged.values()) / 6
    flat_y = mean_y.reshape(4, -1)
    weight, shift = random.normal(size=(3, flat_y.size)), random.normal(size=3)
    affine_y = weight @ flat_y.ravel() + shift
    linear = random.normal(size=(5, 3))
    scale, threshold = random.normal(size=5), random.normal(size=5)
    scale_y = scale * (linear @ affine_y)
    arrays = lambda options: {n: np.array(v) for n, v in options.items()}
    graph = nir.NIRGraph.from_list(
        nir.Conv2d((7, 8), kernel, bias=bias, **conv),
        nir.SumPool2d(**arrays(summed)),
        nir.AvgPool2d(**arrays(averaged)),
        nir.Flatten(np.array(mean_y.shape), start_dim=1, end_dim=2),
        nir.Flatten(np.array(flat_y.shape), start_dim=0, end_dim=-1),
        nir.Affine(weight, shift),
        nir.Linear(linear),
        nir.Scale(scale),
        nir.Threshold(threshold),
    )
    model = bnir.read(graph, DT)
    by_kind = {}
    for name in model.order:
        x_in = by_kind.get('last', jnp.asarray(x))
        by_kind['last'] = by_kind[name] = model._run(name, x_in)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    close(by_kind['conv2d'], conv_y)
    close(by_kind['sumpool2d'], sum_y)
    close(by_kind['avgpool2d'], mean_y)
    close(by_kind['flatten'], flat_y)
    close(by_kind['scale'], scale_y)
    close(model(jnp.asarray(x)), (scale_y > threshold).astype(float))
    batched = np.stack([x, 2 * x])
    wanted = [model(jnp.asarray(one)) for one in batched]
    close(model(jnp.asarray(batched)), np.stack(wanted))


@pytest.mark.parametrize(
    ('padding', 'around'), [('same', (2,)), ('valid', (0,)), (1, (1,))]
)
def test_convolutions_over_one_axis(x64, padding, around):
    kernel, bias = random.normal(size=(3, 2, 3)), random.normal(size=3)
    x = random.normal(size=(2, 9))
    node = nir.Conv1d(9, kernel, 1, padding, 2, 1, bias)
    model = bnir.read(nir.NIRGraph.from_list(node), DT)
    wanted = correlate(x, kernel, bias, (1,), around, (2,), 1)
    np.testing.assert_allclose(model(jnp.asarray(x)), wanted, atol=1e-12)


def test_kernels_that_are_not_square_and_shapes_that_a_file_does_not_have(
    x64,
):
    kernel, bias = random.normal(size=(2, 1, 3, 2)), np.zeros(2)
    options = {'stride': (1, 1), 'padding': (0, 1), 'dilation': (1, 1), 'groups': 1}
    # Types are not checked: the package takes all kernels for square ones.
    graph = nir.NIRGraph(
        {
            'input': nir.Input(np.array([1, 5, 4])),
            'conv': nir.Conv2d(None, kernel, bias=bias, **options),
            'flat': nir.Flatten(None, start_dim=0),
            'output': nir.Output(np.array([2 * 3 * 5])),
        },
        [('input', 'conv'), ('conv', 'flat'), ('flat', 'output')],
        type_check=False,
    )
    x = random.normal(size=(1, 5, 4))
    wanted = correlate(x, kernel, bias, **options).ravel()
    model = bnir.read(graph, DT)
    np.testing.assert_allclose(model(jnp.asarray(x)), wanted, atol=1e-12)
    twice = model(jnp.asarray([x, 2 * x]))
    np.testing.assert_allclose(twice, [wanted, 2 * wanted], atol=1e-12)


def test_weights_of_several_groups(x64):
    weight, bias = random.normal(size=(2, 3, 5)), random.normal(size=(2, 3))
    model = bnir.read(nir.NIRGraph.from_list(nir.Affine(weight, bias)), DT)
    x = random.normal(size=(7, 2, 5))
    wanted = np.stack([x[:, g] @ weight[g].T + bias[g] for g in range(2)], 1)
    np.testing.assert_allclose(model(jnp.asarray(x)), wanted, atol=1e-12)


# ------------------------------------------------------------ cycles and graphs inside


def recurrent():
    """Recurrent LIF units inside a graph of their own, and a delayed read-out."""
    inner = nir.NIRGraph(
        nodes={
            'in': nir.Input(np.array([N])),
            'lif': nir.LIF(**TAU, **LEAK, **SPIKE),
            'w': nir.Affine(random.normal(size=(N, N)), random.normal(size=N) * 0.1),
            'out': nir.Output(np.array([N])),
        },
        edges=[('in', 'lif'), ('lif', 'w'), ('w', 'lif'), ('lif', 'out')],
    )
    return nir.NIRGraph(
        nodes={
            'input': nir.Input(np.array([3])),
            'feed': nir.Linear(random.normal(size=(N, 3))),
            'units': inner,
            'wait': nir.Delay(DT * np.array([0, 1, 2, 4])),
            'read': nir.Linear(random.normal(size=(2, N))),
            'output': nir.Output(np.array([2])),
        },
        edges=[
            ('input', 'feed'),
            ('feed', 'units'),
            ('units', 'wait'),
            ('wait', 'read'),
            ('read', 'output'),
        ],
    )


def by_hand(graph, xs):
    """The same network, written out."""
    feed, read = graph.nodes['feed'].weight, graph.nodes['read'].weight
    lif, w = (graph.nodes['units'].nodes[name] for name in ('lif', 'w'))
    keep = np.exp(-DT / lif.tau)
    v, z, past, found = np.zeros(N), np.zeros(N), [np.zeros(N)] * 4, []
    for x in xs:
        drive = feed @ x + w.weight @ z + w.bias
        v = keep * v + (1 - keep) * (lif.v_leak + lif.r * drive)
        z = (v > lif.v_threshold).astype(float)
        v = np.where(z > 0, lif.v_reset, v)
        past = [z, *past]
        late = [past[d][k] for k, d in enumerate((0, 1, 2, 4))]
        found.append(read @ late)
    return np.array(found)


GRAPH = recurrent()


def test_an_edge_that_closes_a_cycle_delays_by_one_step(x64):
    xs = random.normal(size=(100, 3)) * 2
    model = bnir.read(GRAPH, DT)
    assert model.closing == [('units/w', 'units/lif')]
    assert not model.is_kept
    wanted = by_hand(GRAPH, xs)
    assert np.unique(wanted).size > 10  # units fire in many patterns
    compare(model, xs, output=wanted)


def test_a_cycle_without_a_state_keeps_its_last_output(x64):
    w = 0.3 * random.normal(size=(N, N))
    nodes = {
        'input': nir.Input(np.array([N])),
        'w': nir.Linear(w),
        'output': nir.Output(np.array([N])),
    }
    edges = [('input', 'w'), ('w', 'w'), ('w', 'output')]
    model = bnir.read(nir.NIRGraph(nodes, edges), DT)
    xs, y, wanted = random.normal(size=(20, N)), np.zeros(N), []
    for x in xs:
        y = w @ (x + y)
        wanted.append(y)
    compare(model, xs, output=np.array(wanted))


def test_the_order_of_nodes_in_a_file_does_not_matter():
    names = ['c', 'in', 'b', 'a']
    edges = [('in', 'b'), ('in', 'a'), ('a', 'b'), ('b', 'a'), ('b', 'c'), ('c', 'c')]
    found = [
        braintrace.nir.model.ordered(['in'], some, others)
        for some in itertools.permutations(names)
        for others in (edges, edges[::-1])
    ]
    assert all(each == found[0] for each in found)
    order, closing = found[0]
    assert sorted(closing) == [('b', 'a'), ('c', 'c')]
    assert order == ['in', 'a', 'b', 'c']


# ------------------------------------------------------------ files


def alike(a, b):
    """Whether two graphs have the same nodes, edges and arrays."""
    assert sorted(a.nodes) == sorted(b.nodes)
    assert sorted(a.edges) == sorted(b.edges)
    for name, node in a.nodes.items():
        other = b.nodes[name]
        assert type(node) is type(other)
        if isinstance(node, nir.NIRGraph):
            alike(node, other)
            continue
        mine, theirs = node.to_dict(), other.to_dict()
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {'metadata', 'type'}:
            np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-7)


def test_round_trips(tmp_path):
    graph, file = GRAPH, tmp_path / 'net.nir'
    model = bnir.read(graph, DT)
    bnir.write(file, model)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    alike(nir.read(file), graph)
    again = bnir.read(file)  # the file has the time step
    assert again.dt == DT
    assert (again.order, again.closing) == (model.order, model.closing)
    alike(bnir.to_graph(again), graph)
    alike(bnir.to_graph(bnir.read(fan_out(NEURONS), DT)), fan_out(NEURONS))


def test_trained_values_are_written(tmp_path):
    model = bnir.read(GRAPH, DT, train=('weight', 'tau'))
    paths = set(model.states(brainstate.ParamState))
    assert ('parts', 'units/lif', 'tau') in paths
    assert ('parts', 'units/w', 'bias') not in paths
    model.parts['units/lif'].tau.value = jnp.full(N, 0.007)
    bnir.write(tmp_path / 'net.nir', model)
    found = nir.read(tmp_path / 'net.nir').nodes['units'].nodes['lif']
    np.testing.assert_allclose(found.tau, 0.007, rtol=1e-6)
    model.parts['units/lif'].tau.value = jnp.full(N, -0.007)
    with pytest.raises(ValueError, match='time constant'):
        bnir.write(tmp_path / 'net.nir', model)


def test_chains_of_layers_are_written(tmp_path, x64):
    feed, shift, read = (random.normal(size=s) for s in ((3, N), N, (N, 2)))
    net = brainstate.nn.Sequential(
        brainstate.nn.Linear(3, N, w_init=feed, b_init=shift),
        bnir.LIF(dt=DT, tau=np.full(N, 0.01), r=4.0, v_leak=0.0, v_threshold=0.3),
        braintrace.nn.Linear(N, 2, w_init=read, b_init=None),
        bnir.LI(dt=DT, tau=np.full(2, 0.01), r=1.0, v_leak=0.0),
    )
    bnir.write(tmp_path / 'net.nir', net)
    model = bnir.read(tmp_path / 'net.nir')
    xs = random.normal(size=(30, 3))
    brainstate.nn.init_all_states(net)
    compare(model, xs, output=brainstate.transform.for_loop(net, jnp.asarray(xs)))
    with pytest.raises(ValueError, match='Dropout'):
        bnir.write(tmp_path / 'net.nir', brainstate.nn.Dropout(0.5))


# ------------------------------------------------------------ learning


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + (3 * v) ** 2)


B, T = 2, 24
LEARNED = {'tau': TAU['tau'], **LEAK, **SPIKE}


def layered(loop):
    """An affine layer, LIF units, perhaps feeding themselves, and a linear read-out."""
    nodes = {
        'input': nir.Input(np.array([3])),
        'feed': nir.Affine(random.normal(size=(N, 3)), random.normal(size=N) * 0.1),
        'lif': nir.LIF(**LEARNED),
        'wait': nir.Delay(DT * np.array([0, 1, 2, 2])),
        'read': nir.Linear(random.normal(size=(2, N))),
        'output': nir.Output(np.array([2])),
    }
    names = ['input', 'feed', 'lif', 'wait', 'read', 'output']
    edges = list(itertools.pairwise(names))
    if loop:
        nodes['loop'] = nir.Linear(random.normal(size=(N, N)))
        edges += [('lif', 'loop'), ('loop', 'lif')]
    return nir.NIRGraph(nodes, edges)


def loss_by_hand(graph, params, xs):
    """The mean loss of a sequence, through steps that are written out."""
    lif = graph.nodes['lif']
    keep = jnp.exp(-DT / params['lif', 'tau'])

    def step(carry, x):
        v, z, past = carry
        drive = x @ params['feed', 'weight'].T + params['feed', 'bias']
        if ('loop', 'weight') in params:
            drive = drive + z @ params['loop', 'weight'].T
        v = jnp.where(v > lif.v_threshold, lif.v_reset, v)
        v = keep * v + (1 - keep) * (lif.v_leak + lif.r * drive)
        z = spike((v - lif.v_threshold) / lif.v_threshold)
        past = jnp.concatenate([z[None], past[:-1]])
        late = past[jnp.array([0, 1, 2, 2]), :, jnp.arange(N)].T
        y = late @ params['read', 'weight'].T
        return (v, z, past), jnp.mean((y - 0.5) ** 2)

    zero = jnp.zeros((B, N))
    start = (zero, zero, jnp.zeros((3, B, N)))
    return jnp.mean(jax.lax.scan(step, start, xs)[1])


@pytest.mark.parametrize(
    ('loop', 'rule'), [(False, 'd_rtrl'), (True, 'bptt'), (True, 'd_rtrl')]
)
def test_gradients_of_a_read_out_loss(x64, loop, rule):
    graph = layered(loop)
    model = bnir.read(graph, DT, train=('weight', 'bias', 'tau'), surrogate=spike)
    xs = jnp.asarray(random.normal(size=(T, B, 3)) * 1.5)
    learner = braintrace.compile(model, rule, xs[0], batch_size=B)
    params = {path[1:]: state.value for path, state in learner.param_states.items()}
    wanted = jax.grad(lambda p: loss_by_hand(graph, p, xs))(params)
    step_fn = lambda x: jnp.mean((learner(x) - 0.5) ** 2)
    # Without fresh, a window at a time: traces carry the credit of the steps before.
    windows = [xs] if rule == 'bptt' else jnp.split(xs, 3)
    parts = [learner.etrace_grad(w, step_fn=step_fn) for w in windows]
    mean = lambda *each: sum(each) / len(each)
    found = {path[1:]: x for path, x in jax.tree.map(mean, *parts).items()}
    is_exact = rule == 'bptt' or not loop
    differ = []
    for name, gradient in wanted.items():
        error = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        differ += [name] if error > 1e-3 else []
        assert not is_exact or error < 1e-9, (name, error)
    assert is_exact or ('loop', 'weight') in differ


# ------------------------------------------------------------ refusals

CHAIN = nir.NIRGraph.from_list(nir.LIF(**LEARNED))
TWO = nir.NIRGraph(
    {
        'a': nir.Input(np.array([N])),
        'b': nir.Input(np.array([N])),
        'c': nir.Output(np.array([N])),
    },
    [('a', 'c'), ('b', 'c')],
)


@pytest.mark.parametrize(
    ('make', 'said'),
    [
        (lambda: bnir.read(CHAIN), 'needs a time step'),
        (lambda: bnir.read(CHAIN, 0.0), 'needs a time step'),
        (lambda: bnir.read(CHAIN, DT, train=['weights']), 'no weights'),
        (lambda: bnir.read(TWO, DT)(jnp.ones(N)), 'with 1 inputs'),
        (lambda: bnir.LIF(tau=1.0, dt=DT), 'v_threshold'),
        (lambda: bnir.LI(tau=0.0, r=1.0, v_leak=0.0), 'time constant is positive'),
        (lambda: bnir.Delay(delay=np.array([1.5]), dt=1.0), 'whole steps'),
        (lambda: bnir.read(__file__, DT), 'cannot be read'),
        (lambda: bnir.write(bnir.read(CHAIN, DT), 'x.nir'), 'path comes first'),
    ],
)
def test_what_is_refused(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()


def test_several_inputs_are_taken_in_the_order_of_their_names(x64):
    model = bnir.read(TWO, DT)
    np.testing.assert_array_equal(model(jnp.ones(N), jnp.arange(N)), 1 + np.arange(N))


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        bnir.read('nowhere.nir', DT)


# ------------------------------------------------------------ graphs that cannot work


def chain(node, width=N):
    """A graph of one node."""
    ends = {'input': nir.Input(np.array([N])), 'output': nir.Output(np.array([width]))}
    edges = [('input', 'node'), ('node', 'output')]
    nodes = {**ends, 'node': node}
    return nir.NIRGraph(nodes=nodes, edges=edges, type_check=False)


def with_an_edge_to_nowhere():
    graph = chain(nir.Scale(np.ones(N)))
    graph.edges.append(('node', 'nowhere'))
    return graph


def with_itself_inside():
    graph = chain(nir.Scale(np.ones(N)))
    graph.nodes['again'] = graph
    graph.edges += [('node', 'again'), ('again', 'output')]
    return graph


def with_weights_of(values):
    graph = chain(nir.Scale(np.ones(N)))
    graph.nodes['node'].scale = np.array(values)
    return graph


def changed(**fields):
    graph = chain(nir.Scale(np.ones(N)))
    for name, value in fields.items():
        setattr(graph, name, value)
    return graph


def test_options_that_cannot_work_are_named():
    for options in (
        {'dtype': 'abc'},
        {'dtype': int},
        {'train': 'weight'},
        {'train': None},
    ):
        with pytest.raises(TypeError, match='Fix: '):
            bnir.read(changed(), DT, **options)


def test_names_of_nodes_may_be_numbers():
    ends = {0: nir.Input(np.array([N])), 2: nir.Output(np.array([N]))}
    nodes = {**ends, 1: nir.Scale(np.full(N, 2.0))}
    graph = nir.NIRGraph(nodes=nodes, edges=[(0, 1), (1, 2)], type_check=False)
    np.testing.assert_allclose(bnir.read(graph, DT)(np.ones(N)), 2.0)


def test_graphs_that_cannot_work_are_named():
    plain = lambda: chain(nir.Scale(np.ones(N)))
    delayed = lambda by: lambda: chain(nir.Delay(np.full(N, by)))
    for graph, dt, told in [
        (with_an_edge_to_nowhere, DT, "no node 'nowhere'"),
        (with_itself_inside, DT, 'contains itself'),
        (lambda: with_weights_of(['a', 'b', 'c', 'd']), DT, 'whose scale has the type'),
        (lambda: with_weights_of([1j] * N), DT, 'complex128'),
        (plain, 'abc', "dt='abc'"),
        (plain, [DT], 'a positive number'),
        (plain, np.inf, 'dt=inf'),
        (delayed(np.nan), DT, 'whole steps'),
        (delayed(np.inf), DT, 'whole steps'),
        (lambda: 3, DT, 'nir.read of a int'),
        (lambda: changed(edges=None), DT, 'nir.read of a NIRGraph'),
        (lambda: changed(edges=[('input', 'node', 'output')]), DT, 'from one node to'),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(told)):
            bnir.read(graph(), dt)


def test_the_memory_of_a_delay_is_predicted_before_it_is_allocated():
    # 10^8 steps of 4 elements: 1.5 GiB of states, and as much for their choice.
    long = chain(nir.Delay(np.full(N, 1e5)))
    tracemalloc.start()
    with pytest.raises(ValueError, match='max_delay_bytes=1600000016') as error:
        bnir.read(long, DT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert '1.5 GiB for each sample, and at most 256.0 MiB' in str(error.value)
    with pytest.raises(ValueError, match='1e'):
        bnir.read(chain(nir.Delay(np.full(N, 1e300))), DT)
    short = chain(nir.Delay(np.full(N, 4 * DT)))
    with pytest.raises(ValueError, match='80 B'):
        bnir.read(short, DT, max_delay_bytes=79)
    assert bnir.read(short, DT, max_delay_bytes=80).parts['node'].shape == (N,)


def test_fields_of_a_neuron_have_one_shape():
    with pytest.raises(ValueError, match=r'tau \(3,\), r \(4,\)'):
        bnir.LI(tau=np.ones(3), r=np.ones(4), v_leak=0.0)
