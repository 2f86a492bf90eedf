"""Neurons and synapses of brainpy.state, with units, in small networks."""

import brainpy.state as bp
import brainstate
import braintools
import brainunit as u
import jax.numpy as jnp

from .base import B, H, I, Step, array, case, linear, shake

SPIKE = braintools.surrogate.Sigmoid(alpha=1.0)


class Clocked(Step):
    """A `Step` whose update knows the time step and the time."""

    def update(self, *inputs):
        with brainstate.environ.context(dt=0.1 * u.ms, t=1.2 * u.ms, i=12):
            return self.step(self, *inputs)


def net(step, scale=0.1, **parts):
    with brainstate.environ.context(dt=0.1 * u.ms):
        model = brainstate.nn.init_all_states(Clocked(step, **parts), batch_size=B)
    return shake(model, scale)


def spikes(n):
    return jnp.asarray(array(B, n) > -0.2, jnp.float32)


IN = {'inp/weight/weight': 'exact 0', 'inp/weight/bias': 'exact 0'}
IN_LOCAL = dict.fromkeys(IN, 'local 0')
REC_LOCAL = {'rec/weight/weight': 'local 0', 'rec/weight/bias': 'local 0'}


# one neuron model each, driven through a linear layer


def driven(name, states, make, unit):
    """Register a case of one neuron model under a learned input current."""

    def builder():
        def step(m, x):
            return m.neuron(m.inp(x) * unit)

        return net(step, inp=linear(I, H), neuron=make(H, spk_fun=SPIKE)), (
            array(B, I),
        )

    builder.__name__ = f'brainpy_{name}'
    case([' '.join(f'neuron/{state}' for state in states.split())], IN)(builder)


driven('if', 'V', bp.IF, u.mA)
driven('lif', 'V', bp.LIF, u.mA)
driven('lif_hard_reset', 'V', lambda n, **k: bp.LIF(n, spk_reset='hard', **k), u.mA)
driven(
    'lif_ref', 'V', bp.LIFRef, u.mA
)  # the time of the last spike is stopped by brainpy itself
driven('alif', 'V a', bp.ALIF, u.mA)
driven('exp_if', 'V', bp.ExpIF, u.mA)
driven('exp_if_ref', 'V', bp.ExpIFRef, u.mA)
driven('adex_if', 'V w', bp.AdExIF, u.mA)
driven('adex_if_ref', 'V w', bp.AdExIFRef, u.mA)
driven('qua_if', 'V', bp.QuaIF, u.mA)
driven('adqua_if', 'V w', bp.AdQuaIF, u.mA)
driven('izhikevich', 'V u', bp.Izhikevich, u.mV / u.ms)
driven(
    'gif',
    'V I1 I2 V_th',
    lambda n, **k: bp.Gif(n, a=0.01 / u.ms, A1=0.1 * u.mA, A2=0.2 * u.mA, **k),
    u.mA,
)
driven('hh', 'V m h n', bp.HH, u.uA)
driven('morris_lecar', 'V W', bp.MorrisLecar, u.uA)
driven('wang_buzsaki', 'V h n', bp.WangBuzsakiHH, u.uA)
driven('fitzhugh_nagumo', 'V w', bp.FitzHughNagumo, u.UNITLESS)
driven('hindmarsh_rose', 'V y z', bp.HindmarshRose, u.UNITLESS)


# neurons that hold their synapse


@case(['neuron/V neuron/g'], IN)
def brainpy_cuba_lif():
    def step(m, x):
        m.proj(x)
        return m.neuron()

    neuron = bp.CubaLIF(H, spk_fun=SPIKE)
    initial = {
        'w_init': braintools.init.KaimingNormal(unit=u.mA),
        'b_init': braintools.init.Constant(0.1 * u.mA),
    }
    inp = brainstate.nn.Linear(I, H, **initial)
    return net(
        step, inp=inp, proj=bp.DeltaProj(comm=inp, post=neuron), neuron=neuron
    ), (spikes(I),)


@case(['neuron/V neuron/g'], IN)
def brainpy_coba_lif():
    def step(m, x):
        m.neuron.add_delta_input('inp', m.inp(x) * u.siemens)
        return m.neuron()

    return net(
        step, inp=linear(I, H), neuron=bp.CobaLIF(H, E=3.0 * u.mV, spk_fun=SPIKE)
    ), (spikes(I),)


# synapses after the weights: the conductance belongs to the neuron it feeds


def post_projection(syn, out, E):
    def step(m, x):
        m.proj(x)
        return m.neuron()

    neuron = bp.LIF(H, R=20.0 * u.ohm, spk_fun=SPIKE)
    comm = brainstate.nn.Linear(
        I, H, w_init=braintools.init.KaimingNormal(unit=u.siemens), b_init=None
    )
    return net(
        step,
        proj=bp.AlignPostProj(comm=comm, syn=syn, out=out(E), post=neuron),
        neuron=neuron,
    ), (spikes(I),)


COMM = {'proj/comm/weight/weight': 'exact 0'}


def conductance():
    return {'g_initializer': braintools.init.Constant(0.5 * u.siemens)}


@case(['proj/syn/g neuron/V'], COMM)
def brainpy_expon_coba():
    return post_projection(bp.Expon(H, **conductance()), bp.COBA, 3.0 * u.mV)


@case(['proj/syn/g neuron/V'], COMM)
def brainpy_expon_cuba():
    return post_projection(bp.Expon(H, **conductance()), bp.CUBA, 1.0 * u.mV)


@case(['proj/syn/g_rise proj/syn/g_decay neuron/V'], COMM)
def brainpy_dual_expon_coba():
    return post_projection(bp.DualExpon(H, **conductance()), bp.COBA, 3.0 * u.mV)


MERGED = "(<class 'brainpy.state.Expon'>, (4,), {}) // (<class 'brainpy.state.CUBA'>, (), {})"  # a key brainpy makes


@case(
    [[('neuron', 'V'), ('neuron', '_before_updates', MERGED, 'syn', 'g')]],
    {
        'proj_left/comm/weight/weight': 'exact 0',
        'proj_right/comm/weight/weight': 'exact 0',
    },
    note='two projections that share one synapse, which hangs on the neuron',
)
def brainpy_merged_projections():
    def step(m, x, y):
        m.proj_left(x)
        m.proj_right(y)
        return m.neuron()

    def projection(n):
        comm = brainstate.nn.Linear(
            n, H, w_init=braintools.init.KaimingNormal(unit=u.mS), b_init=None
        )
        return bp.AlignPostProj(
            comm=comm, syn=bp.Expon.desc(H), out=bp.CUBA.desc(), post=neuron
        )

    neuron = bp.LIF(H, spk_fun=SPIKE)
    return net(
        step, proj_left=projection(I), proj_right=projection(5), neuron=neuron
    ), (spikes(I), spikes(5))


@case(
    ['neuron/V'],
    {'proj/comm/weight/weight': 'exact 0'},
    note='spikes jump the membrane directly',
)
def brainpy_delta_synapse():
    def step(m, x):
        m.proj(x)
        return m.neuron()

    neuron = bp.LIF(H, spk_fun=SPIKE)
    comm = brainstate.nn.Linear(
        I, H, w_init=braintools.init.KaimingNormal(unit=u.mV), b_init=None
    )
    return net(step, neuron=neuron, proj=bp.DeltaProj(comm=comm, post=neuron)), (
        spikes(I),
    )


@case(['syn/g syn/h neuron/V'], IN)
def brainpy_alpha():
    def step(m, x):
        g = m.syn(m.inp(x) * u.siemens)
        return m.neuron(g * (3.0 * u.mV - m.neuron.V.value))

    parts = {
        'inp': linear(I, H),
        'syn': bp.Alpha(H, **conductance()),
        'neuron': bp.LIF(H, spk_fun=SPIKE),
    }
    return net(step, **parts), (spikes(I),)


# synapses before the weights: a group of their own, which no parameter reaches


def pre_synapse(syn, current):
    def step(m, x):
        return m.neuron(current(m.inp(m.syn(x)), m.neuron.V.value))

    parts = {
        'syn': syn,
        'inp': brainstate.nn.Linear(I, H, b_init=None),
        'neuron': bp.LIF(H, spk_fun=SPIKE),
    }
    return net(step, **parts), (spikes(I) > 0,)


PRE = {'inp/weight/weight': 'exact 1'}


@case(['syn/g', 'neuron/V'], PRE)
def brainpy_ampa():
    return pre_synapse(bp.AMPA(I, **conductance()), lambda g, V: g * (3.0 * u.mV - V))


@case(['syn/g', 'neuron/V'], PRE)
def brainpy_gaba_a():
    return pre_synapse(bp.GABAa(I, **conductance()), lambda g, V: g * (-5.0 * u.mV - V))


@case(
    ['syn/g syn/x', 'neuron/V'],
    PRE,
    note='behind a magnesium block, which reads the old V',
)
def brainpy_bio_nmda():
    block = bp.MgBlock(E=3.0 * u.mV, V_offset=0.0 * u.mV, alpha=0.062 / u.mV)
    return pre_synapse(bp.BioNMDA(I, **conductance()), block.update)


@case(['syn/x syn/u', 'neuron/V'], PRE)
def brainpy_stp():
    return pre_synapse(bp.STP(I), lambda y, V: y * u.mA)


@case(['syn/x', 'neuron/V'], PRE)
def brainpy_std():
    return pre_synapse(bp.STD(I), lambda y, V: y * u.mA)


# recurrent networks


def recurrent(neuron, unit):
    def step(m, x):
        drive = m.inp(x) + m.rec(m.neuron.get_spike())
        return m.neuron(drive * unit)

    return net(step, inp=linear(I, H), rec=linear(H, H), neuron=neuron, scale=0.5), (
        array(B, I),
    )


@case(['neuron/V'], IN_LOCAL | REC_LOCAL)
def brainpy_lif_recurrent():
    return recurrent(bp.LIF(H, V_th=0.1 * u.mV, spk_fun=SPIKE), u.mA)


@case(['neuron/V neuron/a'], IN_LOCAL | REC_LOCAL)
def brainpy_alif_recurrent():
    return recurrent(bp.ALIF(H, V_th=0.1 * u.mV, spk_fun=SPIKE), u.mA)


@case(['neuron/V neuron/m neuron/h neuron/n'], IN_LOCAL | REC_LOCAL)
def brainpy_hh_recurrent():
    around_threshold = braintools.init.Uniform(10.0 * u.mV, 30.0 * u.mV)
    return recurrent(bp.HH(H, V_initializer=around_threshold, spk_fun=SPIKE), u.uA)


@case(
    ['neuron/V syn/u syn/x'],
    IN_LOCAL | REC_LOCAL,
    note='the spikes of each neuron drive its own release: V, u and x share positions',
)
def brainpy_stp_recurrent():
    def step(m, x):
        drive = m.inp(x) + m.rec(m.syn(m.neuron.get_spike()))
        return m.neuron(drive * u.mA)

    parts = {'inp': linear(I, H), 'rec': linear(H, H), 'syn': bp.STP(H)}
    return net(
        step, **parts, neuron=bp.LIF(H, V_th=0.1 * u.mV, spk_fun=SPIKE), scale=0.5
    ), (array(B, I),)


@case(
    ['proj_exc/syn/g proj_inh/syn/g neuron/V'],
    {
        'inp/weight/weight': 'local 0',
        'proj_exc/comm/weight/weight': 'local 0',
        'proj_inh/comm/weight/weight': 'local 0',
    },
    note='excitatory and inhibitory cells of one population, conductances of both kinds',
)
def brainpy_ei_network():
    def step(m, x):
        fired = m.neuron.get_spike()
        m.proj_exc(fired[:, :3])
        m.proj_inh(fired[:, 3:])
        return m.neuron(m.inp(x) * u.mA)

    def projection(n, E):
        comm = brainstate.nn.Linear(
            n, 5, w_init=braintools.init.KaimingNormal(unit=u.siemens), b_init=None
        )
        return bp.AlignPostProj(
            comm=comm,
            syn=bp.Expon(5, **conductance()),
            out=bp.COBA(E * u.mV),
            post=neuron,
        )

    neuron = bp.LIF(5, V_th=0.1 * u.mV, spk_fun=SPIKE)
    inp = brainstate.nn.Linear(I, 5, b_init=None)
    parts = {
        'inp': inp,
        'proj_exc': projection(3, 3.0),
        'proj_inh': projection(2, -5.0),
        'neuron': neuron,
    }
    return net(step, **parts, scale=0.5), (array(B, I),)


@case(
    ['neuron/V', 'readout/r'],
    {
        'inp/weight/weight': 'local 0',
        'inp/weight/bias': 'local 0',
        'readout/weight': 'exact 1',
    },
)
def brainpy_leaky_readout():
    def step(m, x):
        return m.readout(m.neuron(m.inp(x) * u.mA))

    with brainstate.environ.context(dt=0.1 * u.ms):
        readout = bp.LeakyRateReadout(H, 5)
    neuron = bp.LIF(H, V_th=0.1 * u.mV, spk_fun=SPIKE)
    return net(step, inp=linear(I, H), neuron=neuron, readout=readout, scale=0.5), (
        array(B, I),
    )


@case(
    ['layers/0/V', 'layers/1/V layers/1/a'],
    {
        'inp/weight/weight': 'local 0',
        'inp/weight/bias': 'local 0',
        'up/weight/weight': 'exact 1',
        'up/weight/bias': 'exact 1',
    },
)
def brainpy_stack():
    def step(m, x):
        fired = m.layers[0](m.inp(x) * u.mA)
        return m.layers[1](m.up(fired) * u.mA)

    layers = [bp.LIF(H, V_th=0.1 * u.mV, spk_fun=SPIKE), bp.ALIF(5, spk_fun=SPIKE)]
    return net(step, inp=linear(I, H), up=linear(H, 5), layers=layers, scale=0.5), (
        array(B, I),
    )
